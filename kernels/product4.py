"""Products with weights of four bits, in torch: the format, and the reference of the Triton kernel.

Each row of a weight [N, K] is cut into groups of 64; a group has a scale and a minimum: w = scale * q + minimum with q in 0..15.
Byte j of a group's 32 holds q[j] in its low and q[j + 32] in its high half, so that unpacking gives two runs that lie together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 64


@dataclass(frozen=True)
class Packed:
    """A weight [N, K]: 4.5 bits an element with 16-bit scales."""

    bits: Tensor  # [N, K / 2] uint8
    scale: Tensor  # [N, K / GROUP]
    minimum: Tensor  # [N, K / GROUP]

    @property
    def shape(self) -> tuple[int, int]:
        return self.bits.shape[0], 2 * self.bits.shape[1]


def pack(weight: Tensor) -> Packed:
    """Round a weight [N, K] to the nearest of 16 levels between each group's extremes. GROUP must divide K."""
    n, k = weight.shape
    groups = weight.float().view(n, k // GROUP, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).to(weight.dtype)
    minimum = low.to(weight.dtype)
    step = scale.float().clamp(min=torch.finfo(torch.float32).tiny)
    q = ((groups - minimum.float()[..., None]) / step[..., None]).round().clamp(0, 15).to(torch.uint8)
    a, b = q.chunk(2, dim=-1)
    return Packed((a | (b << 4)).reshape(n, k // 2).contiguous(), scale, minimum)


def unpack(packed: Packed) -> Tensor:
    """The weight [N, K] that the bits stand for, in the type of the scales."""
    n, k = packed.shape
    bits = packed.bits.view(n, k // GROUP, GROUP // 2)
    q = torch.cat((bits & 15, bits >> 4), dim=-1).float()
    weight = q * packed.scale.float()[..., None] + packed.minimum.float()[..., None]
    return weight.view(n, k).to(packed.scale.dtype)


def product4(x: Tensor, packed: Packed) -> Tensor:
    """x [R, K] times the weight's transpose -> [R, N]."""
    return F.linear(x, unpack(packed))
