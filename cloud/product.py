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

HEIGHTS = (4, 16, 64)  # rows a tile in exact mode; the first is what the others must agree with


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
        rows = len(x)
        out = x.new_empty(_padded(rows, self.heights[0]), self.weight.shape[0])
        x = F.pad(x, (0, 0, 0, len(out) - rows))
        first = 0
        while first < len(out):
            height = max(h for h in self.heights if h <= len(out) - first)
            torch.mm(x[first : first + height], self.weight.t(), out=out[first : first + height])
            first += height
        out = out[:rows]
        return out if self.bias is None else out + self.bias


def _padded(rows: int, height: int) -> int:
    return -(-rows // height) * height


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
