"""RMSNorm, alone and with the residual sum before it, in torch.

norm(x) = x / sqrt(mean(x^2) + eps) * w        (Zhang and Sennrich, arXiv 1910.07467), in float32 whatever the input
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D]."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream x + delta [R, D], and its norm."""
    x = x + delta
    return x, rms_norm(x, weight, eps)
