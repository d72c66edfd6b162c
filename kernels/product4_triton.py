"""Products of few rows with weights of four bits, in Triton: the weights are read once, as they are, and widened in registers.

For up to 64 rows a step is bound by the bytes of the weights, so four bits cost a quarter of sixteen. K is cut into runs by the
weight's shape alone, and the runs are summed in order: the result does not depend on how many rows there are.
"""

import torch
import triton
import triton.language as tl
from paceline.kernels.product4 import GROUP, Packed, unpack
from torch import Tensor
from torch.nn import functional as F

MAX_ROWS = 64  # beyond it the product is bound by arithmetic: widen once, and use the library
_COLUMNS = 64
_BYTES = 64
_BUSY = 256  # programs to aim for


def product4(x: Tensor, packed: Packed) -> Tensor:
    """x [R, K] times the weight's transpose -> [R, N]."""
    rows, (n, k) = x.shape[0], packed.shape
    if rows > MAX_ROWS:
        return F.linear(x, unpack(packed))
    x = x.contiguous()
    columns = triton.cdiv(n, _COLUMNS)
    steps = triton.cdiv(k // 2, _BYTES)
    run = triton.cdiv(steps, max(1, min(_BUSY // columns, steps)))
    runs = triton.cdiv(steps, run)
    part = x.new_empty((runs, rows, n), dtype=torch.float32)
    _product[(columns, runs)](
        x, packed.bits, packed.scale, packed.minimum, part, rows, n, k, run,
        ROWS=max(16, triton.next_power_of_2(rows)), COLUMNS=_COLUMNS, BYTES=_BYTES, GROUP=GROUP,
    )  # fmt: skip
    total = part[0]
    for i in range(1, runs):
        total = total + part[i]
    return total.to(x.dtype)


@triton.jit
def _product(
    x, bits, scale, minimum, part, rows, n, k, run,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One run of K for all rows and COLUMNS columns, into part [runs, R, N]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    here, real = column < n, row < rows
    half = GROUP // 2
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(tl.program_id(1) * run, (tl.program_id(1) + 1) * run):
        byte = step * BYTES + tl.arange(0, BYTES)
        inside = byte < k // 2
        there = inside[:, None] & here[None, :]
        q = tl.load(bits + column[None, :].to(tl.int64) * (k // 2) + byte[:, None], mask=there, other=0)
        group = column[None, :].to(tl.int64) * (k // GROUP) + (byte // half)[:, None]
        s = tl.load(scale + group, mask=there, other=0.0).to(tl.float32)
        m = tl.load(minimum + group, mask=there, other=0.0).to(tl.float32)
        low = (byte // half) * GROUP + byte % half
        at = row[:, None] * k + low[None, :]
        known = real[:, None] & inside[None, :]
        a = tl.load(x + at, mask=known, other=0.0)
        b = tl.load(x + at + half, mask=known, other=0.0)
        first = ((q & 15).to(tl.float32) * s + m).to(a.dtype)
        second = ((q >> 4).to(tl.float32) * s + m).to(a.dtype)
        total += tl.dot(a, first, input_precision="ieee")
        total += tl.dot(b, second, input_precision="ieee")
    out = (tl.program_id(1) * rows + row[:, None]) * n + column[None, :]
    tl.store(part + out, total, mask=real[:, None] & here[None, :])
