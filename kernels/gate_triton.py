"""act(g) * u from [g, u] side by side, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def gate(x: Tensor, gelu: bool) -> Tensor:
    """x [R, 2F] -> [R, F]; `gelu` asks for the tanh form of GELU, SiLU otherwise."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    _gate[(rows, triton.cdiv(width, _BLOCK))](x.contiguous(), out, width, GELU=gelu, BLOCK=_BLOCK)
    return out


@triton.jit
def _gate(x, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = f < width
    g = tl.load(x + row * 2 * width + f, mask=here, other=0.0).to(tl.float32)
    u = tl.load(x + row * 2 * width + width + f, mask=here, other=0.0).to(tl.float32)
    y = g
    if GELU:  # 0.5 g (1 + tanh(y)) = g sigmoid(2 y)
        y = 1.5957691216057308 * (g + 0.044715 * g * g * g)
    g = g * tl.sigmoid(y)
    tl.store(out + row * width + f, (g.to(out.dtype.element_ty).to(tl.float32) * u).to(out.dtype.element_ty), mask=here)
