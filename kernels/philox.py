"""Philox-4x32-10 and Gumbel noise in torch: the same 32-bit words as `paceline.protocol.philox`, broadcast over tensors."""

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 10


def words(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """The 32-bit words, as int64, of int64 tensors that broadcast against each other."""
    token = token + torch.zeros_like(seed + position)  # to the shape they have together
    return _blocks(seed, position, token >> 2).gather(-1, (token & 3)[..., None])[..., 0]


def _blocks(seed: Tensor, position: Tensor, counter: Tensor) -> Tensor:
    """Blocks [..., 4] of 32-bit words, for counters [...] and seeds and positions that broadcast to them.

    64-bit products wrap, but their bits are right, and the mask undoes what a shift makes of the sign. c1 and c3 keep the upper
    halves of the products as well: nobody reads them. Operations are in place: fresh memory costs more than the arithmetic.
    """
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    p0, p1 = counter * _M0, (position & _LOW) * _M1  # the first round: c1 is 0, c2 and c3 are the position
    c0, c1 = torch.zeros_like(p0) + ((p1 >> 32) & _LOW ^ k0), torch.zeros_like(p0) + p1
    c2, c3 = (p0 >> 32).bitwise_and_(_LOW).bitwise_xor_((position >> 32) & _LOW ^ k1), p0
    p0, p1 = torch.empty_like(c0), torch.empty_like(c0)
    for _ in range(_ROUNDS - 1):
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
        torch.mul(c0, _M0, out=p0)
        torch.mul(c2, _M1, out=p1)
        torch.bitwise_right_shift(p1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_LOW)
        torch.bitwise_right_shift(p0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_LOW)
        c1, c3, p0, p1 = p1, p0, c3, c1
    return torch.stack((c0, c1.bitwise_and_(_LOW), c2, c3.bitwise_and_(_LOW)), dim=-1)


def gumbel(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Standard Gumbel noise in float64."""
    v = (words(seed, position, token).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v))


def minus_all_gumbel(seed: Tensor, position: Tensor, tokens: int) -> Tensor:
    """Minus the noise, [n, tokens], of every token id in float32, right to 1e-5: to find the few that `gumbel` must tell apart.

    The factor keeps the largest words, which float32 rounds up to 2^32, below 1.
    """
    counters = torch.arange(-(-tokens // 4), device=seed.device)  # a block serves four neighbouring ids
    blocks = _blocks(seed[:, None], position[:, None], counters.repeat(len(seed), 1))
    v = blocks.flatten(1)[:, :tokens].float()
    return v.mul_(-(2.0**-32) * (1 - 2.0**-24)).add_(-(2.0**-33)).log1p_().neg_().log_()
