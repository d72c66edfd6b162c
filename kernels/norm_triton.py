"""RMSNorm in Triton, alone and with the residual sum before it: one program a vector, sums in float32 in one fixed order."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [R, D] or [R, H, D] with contiguous last dimension, weight [D] -> the same shape, contiguous."""
    d = x.shape[-1]
    three = x.unsqueeze(1) if x.dim() == 2 else x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm[(three.shape[0], three.shape[1])](
        three,
        three,
        weight,
        out,
        out,
        three.stride(0),
        three.stride(1),
        eps,
        D=d,
        DP=triton.next_power_of_2(d),
        ADD=False,
    )
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream x + delta [R, D], and its norm."""
    x, delta = x.contiguous(), delta.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    d = x.shape[-1]
    _norm[(x.shape[0], 1)](x, delta, weight, total, out, d, d, eps, D=d, DP=triton.next_power_of_2(d), ADD=True)
    return total, out


@triton.jit
def _norm(x, delta, weight, total, out, row, head, eps, D: tl.constexpr, DP: tl.constexpr, ADD: tl.constexpr):
    d = tl.arange(0, DP)
    here = d < D
    source = tl.program_id(0) * row + tl.program_id(1) * head + d
    target = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * D + d
    v = tl.load(x + source, mask=here, other=0.0)
    if ADD:
        v = (v.to(tl.float32) + tl.load(delta + source, mask=here, other=0.0).to(tl.float32)).to(v.dtype)
        tl.store(total + target, v, mask=here)
    wide = v.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide) / D + eps)
    w = tl.load(weight + d, mask=here, other=0.0).to(tl.float32)
    tl.store(out + target, (wide * scale * w).to(out.dtype.element_ty), mask=here)
