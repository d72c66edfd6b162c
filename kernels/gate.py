"""The gate of a gated feed-forward layer, in torch: act(g) * u from [g, u] side by side."""

import torch
from torch import Tensor
from torch.nn import functional as F

_SERIAL = 32_768  # elements up to which torch runs an elementwise operation as one vectorised loop on one thread


def gate(x: Tensor, gelu: bool) -> Tensor:
    """x [R, 2F] -> [R, F]; `gelu` asks for the tanh form of GELU (Gemma), SiLU otherwise."""
    g, u = x.chunk(2, dim=-1)
    return (F.gelu(g, approximate="tanh") if gelu else F.silu(g)) * u


def gate_exact(x: Tensor, gelu: bool) -> Tensor:
    """As `gate`, with the same bits for a row wherever it stands in the batch.

    torch computes exp and tanh in vectors, and what is left at the end of a thread's share one by one, with other rounding.
    Flat pieces of a fixed size that a vector's width divides leave nothing over, so every element takes the vector path.
    """
    g, u = x.chunk(2, dim=-1)
    rows, width = g.shape
    padded = -(-width // 64) * 64
    flat = g.new_zeros(rows, padded)
    flat[:, :width] = g
    for piece in torch.split(flat.view(-1), _SERIAL):
        piece.copy_(F.gelu(piece, approximate="tanh") if gelu else F.silu(piece))
    return flat[:, :width] * u
