"""Rounding one linear map so that its output, not its weights, stays near: what is known of the inputs decides.

Second-order rounding after GPTQ (arXiv 2210.17323): columns are rounded one by one and each one's error is spread over those
still to come through the inverse of the inputs' Gram matrix. Then sweeps of coordinate descent (after QuantEase, arXiv
2309.01885): block by block the scale takes its least-squares value and every code is chosen anew with all others known. Knows
one matrix and its inputs' second moments; knows nothing of layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .grids import BLOCK, Grid, scales


@dataclass(frozen=True)
class Latent:
    """A map just before its rounding [R, C] and its scales [R, C / 32]."""

    value: Tensor
    scales: Tensor


def moment(a: Tensor, b: Tensor) -> Tensor:
    """Mean product of the features of a [..., C] with those of b [..., R]: [C, R]."""
    flat = a.flatten(0, -2)
    return flat.T @ b.flatten(0, -2) / len(flat)


class Inputs:
    """What rounding knows of the inputs of a map, shared by the maps that read the same ones.

    gram: [C, C], the moment of the inputs with themselves; damp: ridge, as a share of the mean of its diagonal.
    """

    def __init__(self, gram: Tensor, damp: float = 0.01) -> None:
        wide = gram.double()
        ridge = damp * wide.diagonal().mean().clamp(min=1e-12)
        wide = wide + ridge * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
        self.lower = torch.linalg.cholesky(wide)
        self.gram = wide.float()
        #: Rows of GPTQ's elimination: the upper Cholesky factor of the inverse.
        self.upper = torch.linalg.cholesky(torch.cholesky_inverse(self.lower), upper=True).float()

    def solve(self, with_inputs: Tensor) -> Tensor:
        """[C, R]: the map (transposed) whose output has the given moment with the inputs, in the sense of least squares."""
        return torch.cholesky_solve(with_inputs, self.lower.float())


def refit(w: Tensor, inputs: Inputs, miss: Tensor) -> Tensor:
    """w [R, C] changed so that its output also gives what it misses, as far as least squares with a ridge can.

    miss: [C, R], moment of the inputs with what the output misses.
    """
    return w + inputs.solve(miss).T


def second_order(w: Tensor, inputs: Inputs, grid: Grid, sweeps: int = 1) -> tuple[Tensor, Latent]:
    """Round w [R, C] onto the grid.

    Returns the rounded map and its latent: rounding the latent plainly with the scales gives the first.
    """
    wanted = w.float().T.contiguous()  # [C, R]: what is gone through column by column lies in one piece
    left, out, latent = wanted.clone(), torch.empty_like(wanted), torch.empty_like(wanted)
    d = wanted.new_empty(len(wanted) // BLOCK, wanted.shape[1])
    for b, start in enumerate(range(0, len(wanted), BLOCK)):
        span = slice(start, start + BLOCK)
        block, u = left[span].clone(), inputs.upper[span, span]
        d[b] = scales(block.T.contiguous(), grid, 1 / u.diagonal().pow(2))[:, 0]
        safe = torch.where(d[b] == 0, 1, d[b])
        errors = torch.empty_like(block)
        for j in range(BLOCK):
            latent[start + j] = block[j]
            out[start + j] = grid.nearest(block[j] / safe) * d[b]
            errors[j] = (block[j] - out[start + j]) / u[j, j]
            block[j:].addr_(u[j, j:], errors[j], alpha=-1)
        left[span.stop :].addmm_(inputs.upper[span, span.stop :].T, errors, alpha=-1)
    for _ in range(sweeps):
        sweep(wanted, out, latent, d, inputs.gram, grid)
    return out.T.contiguous(), Latent(latent.T.contiguous(), d.T.contiguous())


def sweep(wanted: Tensor, out: Tensor, latent: Tensor, d: Tensor, gram: Tensor, grid: Grid) -> None:
    """Choose every block's scale and codes anew with all others known, in place: the output's error cannot grow.

    wanted, out, latent: [C, R], the map, its rounding and what is rounded, transposed; d: [C / 32, R] its scales; gram: [C, C] of
    the inputs.
    """
    pull = gram @ (wanted - out)  # [C, R]: minus half the slope of the output's squared error, by weight
    for b, start in enumerate(range(0, len(out), BLOCK)):
        span = slice(start, start + BLOCK)
        before, g = out[span].clone(), gram[span, span]
        near = _rescaled(before, d[b], pull[span], g)
        force = pull[span] - g @ (near - before)
        safe = torch.where(d[b] == 0, 1, d[b])
        for j in range(BLOCK):
            best = near[j] + force[j] / g[j, j]
            chosen = grid.nearest(best / safe) * d[b]
            force.addr_(g[j], chosen - near[j], alpha=-1)
            near[j], latent[start + j] = chosen, best
        out[span] = near
        pull.addmm_(gram[:, span], near - before, alpha=-1)


def _rescaled(block: Tensor, d: Tensor, pull: Tensor, g: Tensor) -> Tensor:
    """The block [32, R] under its least-squares scales, its codes unchanged; d [R] is changed in place."""
    codes = block / torch.where(d == 0, 1, d)
    bend = ((g @ codes) * codes).sum(0)
    better = (d + (pull * codes).sum(0) / bend.clamp(min=1e-20)).half().float()
    d.copy_(torch.where((bend > 0) & better.isfinite() & (better != 0), better, d))
    return codes * d
