"""Matrix products with a model's weights, each a callable [R, K] -> [R, N]: dense, or in fixed tiles of rows.

A GEMM library picks its order of summation by the shape it is given, so a row's last bits may change with the number of rows
beside it. `Tiled` hands it a few fixed heights only. Which heights give a row the same bits, wherever it stands in the tile, is
not taken on trust but tried out when the weights are loaded (`agreeing_heights`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from paceline.protocol.errors import EngineError
from torch import Tensor
from torch.nn import functional as F

Product = Callable[[Tensor], Tensor]

HEIGHTS = (4, 8, 16, 32, 64)  # rows a tile in exact mode; the first is what the others must agree with


@dataclass(frozen=True)
class Dense:
    """x W^T + b, with weight [N, K] and bias [N] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Tiled:
    """As `Dense`, in tiles of the given heights: a row's bits depend on the row alone."""

    weight: Tensor
    bias: Tensor | None
    heights: tuple[int, ...]  # ascending; they give the same bits

    def __call__(self, x: Tensor) -> Tensor:
        cut = tiles(len(x), self.heights)
        padded = F.pad(x, (0, 0, 0, sum(cut) - len(x)))
        out = x.new_empty(len(padded), self.weight.shape[0])
        for rows, into in zip(torch.split(padded, cut), torch.split(out, cut), strict=True):
            torch.mm(rows, self.weight.t(), out=into)
        out = out[: len(x)]
        return out if self.bias is None else out + self.bias


def tiles(rows: int, heights: tuple[int, ...]) -> list[int]:
    """Heights that cover the rows: each tile reads all of the weight, so up to half of one may stay empty."""
    out: list[int] = []
    while rows > 0:
        whole = max((h for h in heights if h <= rows), default=heights[0])
        out.append(next((h for h in heights if rows <= h <= 2 * rows), whole))
        rows -= out[-1]
    return out


def agreeing_heights(weight: Tensor) -> tuple[int, ...]:
    """The heights of HEIGHTS in which one row gives the same bits in any place, tried out on random rows.

    Raises EngineError if not even the first height does: exact mode cannot be had with this library on this machine.
    """
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(weight.shape[1], generator=generator).to(weight)
    agreed: list[int] = []
    reference: Tensor | None = None
    for height in HEIGHTS:
        noise = torch.randn(height, weight.shape[1], generator=generator).to(weight)
        outcomes = [_row_at(place, row, noise, weight) for place in sorted({0, 1, height // 2 + 1, height - 1})]
        reference = outcomes[0] if reference is None else reference
        if all(torch.equal(reference, o) for o in outcomes):
            agreed.append(height)
    if HEIGHTS[0] not in agreed:
        shape = "x".join(map(str, weight.shape))
        raise EngineError(f"exact mode is not possible: products with a {shape} weight depend on the row's place here")
    return tuple(agreed)


def _row_at(place: int, row: Tensor, noise: Tensor, weight: Tensor) -> Tensor:
    x = noise.clone()
    x[place] = row
    return torch.mm(x, weight.t())[place]


class Heights:
    """`agreeing_heights`, asked once a shape."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, torch.dtype], tuple[int, ...]] = {}

    def of(self, weight: Tensor) -> tuple[int, ...]:
        key = (weight.shape[0], weight.shape[1], weight.dtype)
        if key not in self._known:
            self._known[key] = agreeing_heights(weight)
        return self._known[key]
