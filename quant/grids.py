"""The 4- and 8-bit block grids of llama.cpp: which values a block of 32 weights can take, and rounding onto them.

A block is 32 neighbours of a row; its values are scale * code, the scale a float16, the codes from a fixed table. The tables are
facts of the GGUF format (ggml's `block_q4_0`, `block_iq4_nl`, `block_q8_0`). llama.cpp reads any scale and codes, so the
choice of both is ours: nothing here imitates its quantiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 32
PIECE = 1 << 22  # elements packed at a time, since it takes several copies


@lru_cache(maxsize=8)
def _half_steps(codes: tuple[int, ...]) -> Tensor:
    """The code nearest to each of -128, -127.5, ... 127.5 (taken a quarter step further, inside its interval): [512]."""
    table = torch.tensor(codes, dtype=torch.float32)
    at = (torch.arange(512) - 256) / 2 + 0.25
    return table[(at[:, None] - table[None]).abs().argmin(1)]


@dataclass(frozen=True)
class Grid:
    """codes: the ascending values of one block before its scale."""

    name: str
    codes: tuple[int, ...]

    def table(self) -> Tensor:
        return torch.tensor(self.codes, dtype=torch.float32)

    def nearest(self, x: Tensor) -> Tensor:
        """Nearest code of each x, as float32 of x's shape; values beyond the ends clamp."""
        low, high = self.codes[0], self.codes[-1]
        if high - low + 1 == len(self.codes):
            return x.round().clamp(low, high)
        # All midpoints are multiples of a half, so a table over half steps is exact, and far quicker than a search.
        place = (x.clamp(-128, 127.9) + 128).mul_(2).to(torch.int32)
        return torch.index_select(_half_steps(self.codes).to(x.device), 0, place.flatten()).view(x.shape)

    def reach(self) -> tuple[float, float]:
        """The ends beyond which a value is clamped rather than rounded."""
        c = self.codes
        return c[0] - (c[1] - c[0]) / 2, c[-1] + (c[-1] - c[-2]) / 2


Q4_0 = Grid("q4_0", tuple(range(-8, 8)))
Q8_0 = Grid("q8_0", tuple(range(-127, 128)))
IQ4_NL = Grid("iq4_nl", (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
GRIDS = {g.name: g for g in (Q4_0, Q8_0, IQ4_NL)}


def scales(w: Tensor, grid: Grid, weight: Tensor | None = None, starts: int = 4) -> Tensor:
    """The scale of each block with the least (weighted) squared error among candidates.

    Those put the absolute maximum at or near either end of the grid, `starts` each, or are the least-squares scale of the codes
    that such a one leads to. w: [R, C]; weight: [C], how much each column counts; returns [R, C / 32] float32 holding float16
    values.
    """
    blocks = w.float().reshape(len(w), -1, BLOCK)  # [R, C/32, 32]
    peak = blocks.gather(2, blocks.abs().argmax(2, keepdim=True)).squeeze(2)  # signed
    if grid is Q8_0:
        found: Tensor = (peak.abs() / 127).half().float()
        return found
    importance = (torch.ones(w.shape[1]) if weight is None else weight.float()).view(1, -1, BLOCK)
    weighed = blocks * importance
    best = torch.zeros_like(peak)
    least = torch.full_like(peak, float("inf"))  # squared error without the part that no scale changes
    for sign in (grid.codes[0], grid.codes[-1]):  # both ends of an asymmetric grid may carry the peak
        for k in range(starts):
            d = (peak / (sign * (0.75 + 0.4 * k / (starts - 1)))).half().float()
            for _ in range(2):
                q = grid.nearest(blocks / torch.where(d == 0, 1, d).unsqueeze(2))
                square, product = (q * q * importance).sum(2), (q * weighed).sum(2)
                error = d * (d * square - 2 * product)
                better = error < least
                best, least = torch.where(better, d, best), torch.where(better, error, least)
                d = (product / square.clamp(min=1e-20)).half().float()
    return best


def rounded(w: Tensor, d: Tensor, grid: Grid) -> Tensor:
    """w on the grid of scales d, as float32. w: [R, C], d: [R, C / 32]."""
    blocks = w.float().reshape(len(w), -1, BLOCK)
    wide = d.unsqueeze(2)
    return (grid.nearest(blocks / torch.where(wide == 0, 1, wide)) * wide).flatten(1)


def packed(w: Tensor, d: Tensor, grid: Grid) -> NDArray[np.uint8]:
    """The bytes of a GGUF tensor: w [R, C] rounded with scales d [R, C / 32], as [R, bytes a row].

    A block is its float16 scale, then its codes: one signed byte each (Q8_0), or nibbles, where byte j holds code j below and
    code j + 16 above (the 4-bit types; the nibble is the code's place in the table).
    """
    rows = max(1, PIECE // w.shape[1])
    return np.concatenate([_packed(w[at : at + rows], d[at : at + rows], grid) for at in range(0, len(w), rows)])


def _packed(w: Tensor, d: Tensor, grid: Grid) -> NDArray[np.uint8]:
    wide = d.float().unsqueeze(2)
    codes = grid.nearest(w.float().reshape(len(w), -1, BLOCK) / torch.where(wide == 0, 1, wide))
    head = d.half().numpy().view(np.uint8).reshape(*d.shape, 2)
    if grid is Q8_0:
        body = codes.to(torch.int8).numpy().view(np.uint8)
    else:
        place = torch.searchsorted(grid.table(), codes.contiguous()).to(torch.uint8).numpy()
        body = place[..., :16] | (place[..., 16:] << 4)
    return np.concatenate([head, body], axis=2).reshape(w.shape[0], -1)
