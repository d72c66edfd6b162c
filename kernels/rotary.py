"""Rotary position embedding, with the write of keys and values into the paged cache, in torch.

(a, b) -> (a cos - b sin, b cos + a sin)   for a, b the two halves of a head      (Su et al., arXiv 2104.09864)
"""

import torch
from torch import Tensor


def table(inverse_frequencies: Tensor, positions: int) -> Tensor:
    """cos and sin [positions, D/2, 2] in float32, from inverse frequencies [D/2]; angles in float64."""
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * inverse_frequencies.double()
    return torch.stack((angle.cos(), angle.sin()), dim=-1).float()


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """x [R, H, D] by turn [R, D/2, 2]."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = turn[:, None, :, 0], turn[:, None, :, 1]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, turns: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Rotated q [R, H, D]. Rotated k and v [R, Hkv, D] go to `slots` [R] of keys and values [Hkv, slots, D].

    `turns` is a `table`, `positions` [R] says which row of it each row takes.
    """
    turn = turns[positions]
    keys[:, slots] = rotate(k, turn).transpose(0, 1)
    values[:, slots] = v.transpose(0, 1)
    return rotate(q, turn)
