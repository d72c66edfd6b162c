"""Which feed-forward neurons a draft can do without, by second-order saliency."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def keep_neurons(down: Tensor, x: Tensor, keep: int, damp: float = 0.01) -> Tensor:
    """Ascending indices of the `keep` inputs of `down` [R, C] that remain when those cheapest to remove are gone, the rest
    refitted each time (Optimal Brain Surgeon).

    x: [N, C], the inputs seen. One input goes at a time; the inverse Hessian is updated by elimination.
    """
    h = (x.T @ x / len(x)).double()
    h += damp * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)
    inverse, w = torch.linalg.inv(h).float(), down.float().clone()
    alive = torch.ones(len(h), dtype=torch.bool)
    for _ in range(len(h) - keep):
        diagonal = inverse.diagonal()
        cost = torch.where(alive, w.pow(2).sum(0) / diagonal, float("inf"))
        j = int(cost.argmin())
        row = inverse[j] / diagonal[j]
        w -= w[:, j, None] * row[None]
        inverse -= inverse[:, j, None] * row[None]
        inverse[j, j] = 1.0
        alive[j] = False
        w[:, j] = 0
    return alive.nonzero().squeeze(1)
