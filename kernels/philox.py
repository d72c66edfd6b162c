"""Philox-4x32-10 and Gumbel noise in torch: the same 32-bit words as `paceline.protocol.philox`, broadcast over tensors."""

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 10


def words(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """The 32-bit words, as int64, of int64 tensors that broadcast against each other."""
    shape = torch.broadcast_shapes(seed.shape, position.shape, token.shape)
    seed, position, token = seed.expand(shape), position.expand(shape), token.expand(shape)
    c0, c1 = token >> 2, torch.zeros_like(token)
    c2, c3 = position & _LOW, (position >> 32) & _LOW
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return torch.stack((c0, c1, c2, c3)).gather(0, (token & 3)[None])[0]


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low words of the 64-bit product of two 32-bit words; int64 has no unsigned product, so `a` goes in halves."""
    low, high = (a & 0xFFFF) * b, (a >> 16) * b  # each below 2^48
    total = high + (low >> 16)
    return total >> 16, ((total & 0xFFFF) << 16) | (low & 0xFFFF)


def gumbel(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Standard Gumbel noise in float64."""
    v = (words(seed, position, token).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v))
