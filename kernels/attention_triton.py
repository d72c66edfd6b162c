"""Tree attention over a paged cache, in Triton: ancestor bit-mask, grouped heads, split over the keys (flash-decoding).

A program takes some rows of a block, one key head, and a run of key tiles. A tile is one page: the first tiles are the prefix's,
by the page table; the others gather the block's extra keys by slot, and a bit of each row's mask says who sees them. Runs are
summed one by one, in order, by a second kernel (Dao et al., "Flash-Decoding for long-context inference", 2023).

In exact mode each row is its own block, its run of tiles has a fixed length, and its last keys come in the order of positions:
its result is then a function of its own keys alone. Without it, rows of a tree share what they read, and the runs are cut so
that the device is busy.
"""

import itertools
import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from paceline.kernels.layout import PAGE, Layout, pack_bits
from torch import Tensor

EXACT_RUN = 8  # tiles a run in exact mode, whatever the batch
QUERIES = 64  # rows times heads of a group, in one program
BUSY = 512  # programs to aim for


@dataclass(frozen=True)
class Plan:
    """A layout on the device. A program is (block, first row in it); `mask` bit e: row sees extra key e of its block."""

    programs: Tensor  # [P, 2] int32
    blocks: Tensor  # [B, 4] int32: first row, rows, prefix, extra keys
    pages: Tensor  # [B, *] int32
    extra: Tensor  # [B, E] int32 slots
    extra_positions: Tensor  # [B, E] int32
    mask: Tensor  # [R, W] int32
    positions: Tensor  # [R] int32
    tiles: int  # most tiles of keys that a block has
    exact: bool


def rows_a_program(group: int, exact: bool) -> int:
    return 1 if exact else max(1, QUERIES // triton.next_power_of_2(group))  # 64 queries of 256 float32 fill 225 KiB


@dataclass(frozen=True)
class Sizes:
    """Shapes of a plan's tables. They may be larger than a layout needs: what is over points at nothing."""

    rows: int
    programs: int
    blocks: int
    pages: int
    extra: int

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the tables of a Plan, in its order."""
        tables = (self.programs, 2), (self.blocks, 4), (self.blocks, self.pages), (self.blocks, self.extra)
        return *tables, (self.blocks, self.extra), (self.rows, -(-self.extra // 32)), (self.rows,)


def natural_sizes(layout: Layout, group: int, exact: bool) -> Sizes:
    """Just what the layout needs."""
    step = rows_a_program(group, exact)
    return Sizes(
        rows=layout.rows,
        programs=sum(-(-b.rows // step) for b in layout.blocks),
        blocks=len(layout.blocks),
        pages=max(1, *(-(-b.prefix // PAGE) for b in layout.blocks)),
        extra=max(1, *(len(b.extra) for b in layout.blocks)),
    )


def tables(layout: Layout, sizes: Sizes, group: int, exact: bool) -> npt.NDArray[np.int32]:
    """All tables of a plan, end to end. Programs beyond the layout's take the last block, which must then be spare."""
    flat = np.zeros(sum(math.prod(s) for s in sizes.shapes), dtype=np.int32)
    programs, blocks, pages, extra, at, mask, positions = split(flat, sizes)
    step = rows_a_program(group, exact)
    own = [(i, r) for i, b in enumerate(layout.blocks) for r in range(0, b.rows, step)]
    assert len(own) == len(programs) or len(layout.blocks) < len(blocks), "no spare block for spare programs"
    programs[:, 0] = len(blocks) - 1
    programs[: len(own)] = own
    for i, b in enumerate(layout.blocks):
        blocks[i] = b.first, b.rows, b.prefix, len(b.extra)
        width = -(-b.prefix // PAGE)
        pages[i, :width] = b.pages[:width]
        extra[i, : len(b.extra)], at[i, : len(b.extra)] = b.extra, b.extra_positions
        mask[b.first : b.first + b.rows] = pack_bits(b.mask, mask.shape[1])
    positions[: layout.rows] = layout.positions
    return flat


Flat = TypeVar("Flat", Tensor, npt.NDArray[np.int32])


def split(flat: Flat, sizes: Sizes) -> list[Flat]:
    """Views of the tables in their flat form."""
    ends = list(itertools.accumulate(math.prod(s) for s in sizes.shapes))
    return [flat[end - math.prod(s) : end].reshape(s) for s, end in zip(sizes.shapes, ends, strict=True)]


def plan_over(flat: Tensor, sizes: Sizes, exact: bool) -> Plan:
    """A plan that reads its tables from `flat`."""
    programs, blocks, pages, extra, at, mask, positions = split(flat, sizes)
    tiles = sizes.pages + -(-sizes.extra // PAGE)
    return Plan(programs, blocks, pages, extra, at, mask, positions, tiles, exact)


def upload(layout: Layout, windows: frozenset[int], device: torch.device, *, exact: bool, group: int) -> Plan:
    """The layout as tensors, in one transfer. `group` is the number of query heads a key head serves."""
    sizes = natural_sizes(layout, group, exact)
    flat = torch.from_numpy(tables(layout, sizes, group, exact)).to(device)
    return plan_over(flat, sizes, exact)


def attend(q: Tensor, keys: Tensor, values: Tensor, plan: Plan, window: int, scale: float) -> Tensor:
    """q [R, H, D], keys and values [Hkv, slots, D] of one layer -> [R, H, D]."""
    (rows, heads, d), kv_heads = q.shape, keys.shape[0]
    group, programs = heads // kv_heads, len(plan.programs)
    run = EXACT_RUN if plan.exact else max(1, plan.tiles * programs * kv_heads // BUSY)
    runs = -(-plan.tiles // run)
    out = torch.empty_like(q)
    part = q.new_empty((runs, rows, heads, d), dtype=torch.float32) if runs > 1 else out
    lse = q.new_empty((runs, rows, heads), dtype=torch.float32)
    wide = triton.next_power_of_2(group)
    _attend[(programs, kv_heads, runs)](
        q, keys, values, part, lse,
        plan.programs, plan.blocks, plan.pages, plan.extra, plan.extra_positions, plan.mask, plan.positions,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1),
        plan.pages.shape[1], plan.extra.shape[1], plan.mask.shape[1], rows, run, window, scale * 1.4426950408889634,
        HEADS=heads, GROUP=group, WIDE=wide, D=d, DP=triton.next_power_of_2(d), TILE=PAGE,
        ROWS=max(rows_a_program(group, plan.exact), 16 // wide), STEP=rows_a_program(group, plan.exact), WHOLE=runs == 1,
    )  # fmt: skip
    if runs > 1:
        _combine[(rows, heads)](part, lse, out, rows * heads, runs, D=d, DP=triton.next_power_of_2(d))
    return out


@triton.jit
def _attend(
    q, keys, values, part, lse,
    programs, blocks, page_table, extra, extra_positions, mask, positions,
    q_row, q_head, k_head, k_slot,
    page_width, extra_width, mask_words, rows_in_all, run, window, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One run of tiles for ROWS rows x one key head. `scale` includes log2(e): the softmax is in base 2."""
    program, head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = tl.load(programs + program * 2)
    start = tl.load(programs + program * 2 + 1)
    first = tl.load(blocks + block * 4)
    count = tl.load(blocks + block * 4 + 1)
    prefix = tl.load(blocks + block * 4 + 2)
    extras = tl.load(blocks + block * 4 + 3)

    m = tl.arange(0, ROWS * WIDE)  # queries: row by row, the heads of the group side by side
    in_block, own_head = start + m // WIDE, m % WIDE
    real = (m // WIDE < STEP) & (in_block < count) & (own_head < GROUP)
    row = first + in_block
    d = tl.arange(0, DP)
    q_head_index = head * GROUP + own_head
    asked = tl.load(
        q + row[:, None] * q_row + q_head_index[:, None] * q_head + d[None, :],
        mask=real[:, None] & (d[None, :] < D), other=0.0,
    )  # fmt: skip
    position = tl.load(positions + row, mask=real, other=0)

    prefix_tiles = (prefix + TILE - 1) // TILE
    tiles = prefix_tiles + (extras + TILE - 1) // TILE
    begin = index * run
    end = tl.minimum(begin + run, tiles)
    if window > 0:  # tiles that every row has left behind
        oldest = tl.min(tl.where(real, position, 2147483647)) - window + 1
        begin = tl.maximum(begin, tl.minimum(tl.maximum(oldest, 0) // TILE, prefix_tiles))

    top = tl.full([ROWS * WIDE], -float("inf"), tl.float32)
    total = tl.zeros([ROWS * WIDE], tl.float32)
    mixed = tl.zeros([ROWS * WIDE, DP], tl.float32)
    offset = tl.arange(0, TILE)
    for t in range(begin, end):
        e = (t - prefix_tiles) * TILE + offset
        in_prefix = (e < 0) & (t * TILE + offset < prefix)
        is_extra = (e >= 0) & (e < extras)
        page = tl.load(page_table + block * page_width + t + offset * 0, mask=in_prefix, other=0)
        gathered = tl.load(extra + block * extra_width + e, mask=is_extra, other=0)
        slot = tl.where(in_prefix, page * TILE + offset, gathered).to(tl.int64)
        late = tl.load(extra_positions + block * extra_width + e, mask=is_extra, other=0)
        key_position = tl.where(in_prefix, t * TILE + offset, late)
        word = tl.load(
            mask + row[:, None] * mask_words + (e // 32)[None, :], mask=real[:, None] & is_extra[None, :], other=0
        )
        in_tree = ((word >> (e % 32)[None, :]) & 1) != 0
        seen = (in_prefix[None, :] | in_tree) & real[:, None]
        seen = seen & ((key_position[None, :] > position[:, None] - window) | (window == 0))

        at = head * k_head + slot[:, None] * k_slot + d[None, :]
        there = (in_prefix | is_extra)[:, None] & (d[None, :] < D)
        k = tl.load(keys + at, mask=there, other=0.0)
        scores = tl.dot(asked, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing seen yet
        weight = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(values + at, mask=there, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = new_top

    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    base = index * rows_in_all if not WHOLE else 0
    place = (base + row) * HEADS + q_head_index
    tl.store(lse + place, tl.where(total == 0.0, -float("inf"), top + tl.log2(total)), mask=real)
    tl.store(
        part + place[:, None].to(tl.int64) * D + d[None, :],
        mixed.to(part.dtype.element_ty), mask=real[:, None] & (d[None, :] < D),
    )  # fmt: skip


@triton.jit
def _combine(part, lse, out, per_run, runs, D: tl.constexpr, DP: tl.constexpr):
    """Join the runs of one (row, head), in order, by their log-sums."""
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    d = tl.arange(0, DP)
    top = tl.load(lse + place)
    for i in range(1, runs):
        top = tl.maximum(top, tl.load(lse + i * per_run + place))
    mixed = tl.zeros([DP], tl.float32)
    total = 0.0
    for i in range(runs):
        weight = tl.exp2(tl.load(lse + i * per_run + place) - top)
        total += weight
        mixed += weight * tl.load(part + (i * per_run + place).to(tl.int64) * D + d, mask=d < D, other=0.0)
    tl.store(out + place.to(tl.int64) * D + d, (mixed / total).to(out.dtype.element_ty), mask=d < D)
