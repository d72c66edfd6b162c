"""Rotary embedding and the write into the paged cache, in Triton: one launch for q, k and v."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, turns: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Rotated q [R, H, D]. Rotated k and v [R, Hkv, D] go to `slots` [R] of keys and values [Hkv, slots, D].

    `turns` [positions, D/2, 2] holds cos and sin; `positions` [R] says which row of it each row takes.
    """
    (rows, heads, d), kv_heads = q.shape, k.shape[1]
    out = torch.empty((rows, heads, d), dtype=q.dtype, device=q.device)
    _rotate[(rows, heads + 2 * kv_heads)](
        q, k, v, out, keys, values, turns, positions, slots,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0), keys.stride(1),
        HEADS=heads, KV_HEADS=kv_heads, HALF=d // 2, HP=triton.next_power_of_2(d // 2),
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    q, k, v, out, keys, values, turns, positions, slots,
    q_row, q_head, k_row, k_head, v_row, v_head, cache_head, cache_slot,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, HP)
    here = i < HALF
    turn = tl.load(positions + row) * (2 * HALF) + 2 * i
    cos = tl.load(turns + turn, mask=here, other=0.0)
    sin = tl.load(turns + turn + 1, mask=here, other=0.0)
    slot = tl.load(slots + row).to(tl.int64)
    if head < HEADS:
        _turn(q + row * q_row + head * q_head, out + (row * HEADS + head) * (2 * HALF), cos, sin, i, here, HALF)
    elif head < HEADS + KV_HEADS:
        own = head - HEADS
        _turn(k + row * k_row + own * k_head, keys + own * cache_head + slot * cache_slot, cos, sin, i, here, HALF)
    else:
        own = head - HEADS - KV_HEADS
        source, target = v + row * v_row + own * v_head, values + own * cache_head + slot * cache_slot
        tl.store(target + i, tl.load(source + i, mask=here), mask=here)
        tl.store(target + HALF + i, tl.load(source + HALF + i, mask=here), mask=here)


@triton.jit
def _turn(source, target, cos, sin, i, here, HALF: tl.constexpr):
    a = tl.load(source + i, mask=here, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + i, mask=here, other=0.0).to(tl.float32)
    tl.store(target + i, (a * cos - b * sin).to(target.dtype.element_ty), mask=here)
    tl.store(target + HALF + i, (b * cos + a * sin).to(target.dtype.element_ty), mask=here)
