"""Tree attention over a paged cache, in torch: the reference that the Triton kernel is held to, and what runs without a GPU.

    out[r] = sum over keys k that row r sees of softmax_k(scale * q[r] . K[k]) V[k]

Two forms. `attend` is quick: one dense attention a block, whatever shapes come. `attend_exact` gives a row the same bits
whatever else is in the batch: it lays each row's keys out in the order of their positions and works in products of one fixed
shape, [G, D] x [D, PAGE] and [G, PAGE] x [PAGE, D], summed tile after tile. A tree node and the same token in a plain
sequence then go through the very same arithmetic.
"""

from dataclasses import dataclass

import numpy as np
import torch
from paceline.kernels.layout import PAGE, Block, Bools, Ints, Layout, prefix_slots
from torch import Tensor
from torch.nn import functional as F

GATHERED_KEYS = 16_384  # keys copied out of the cache at a time in `attend_exact`: bounds its memory


@dataclass(frozen=True)
class Seen:
    """One block, ready for `attend`: its rows, the slots [L] of its keys, who sees what for each window in use."""

    rows: slice
    slots: Tensor
    visible: dict[int, Tensor]  # window -> [rows, L]


@dataclass(frozen=True)
class RowKeys:
    """For `attend_exact`: each row's own keys in order, padded to whole tiles."""

    slots: Tensor  # [R, L]
    hidden: dict[int, Tensor]  # window -> [R, L], True where there is no key, or the window has left it behind


def see(layout: Layout, windows: frozenset[int], device: torch.device) -> list[Seen]:
    """Once a step: what `attend` needs of the layout."""
    return [_see(b, layout.positions, windows, device) for b in layout.blocks]


def _see(b: Block, positions: Ints, windows: frozenset[int], device: torch.device) -> Seen:
    slots = np.concatenate((prefix_slots(b.pages, b.prefix), b.extra))
    at = np.concatenate((np.arange(b.prefix), b.extra_positions))
    mask = np.concatenate((np.ones((b.rows, b.prefix), dtype=bool), b.mask), axis=1)
    rows = slice(b.first, b.first + b.rows)
    visible = {w: torch.from_numpy(mask & _inside(at, positions[rows, None], w)).to(device) for w in windows}
    return Seen(rows, torch.from_numpy(slots).to(device), visible)


def _inside(key: Ints, query: Ints, window: int) -> Bools:
    """Whether keys at positions `key` are still in the window of queries at positions `query`; window 0 is endless."""
    inside: Bools = (
        key > query - window if window else np.broadcast_to(True, np.broadcast_shapes(key.shape, query.shape))
    )
    return inside


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: list[Seen], window: int, scale: float) -> Tensor:
    """q [R, H, D], keys and values [Hkv, slots, D] of one layer -> [R, H, D]."""
    out = torch.empty_like(q)
    for block in seen:
        k, v = keys[:, block.slots], values[:, block.slots]  # [Hkv, L, D]
        heads = q[block.rows].transpose(0, 1)  # [H, r, D]
        mixed = F.scaled_dot_product_attention(
            heads[None], k[None], v[None], attn_mask=block.visible[window], scale=scale, enable_gqa=True
        )
        out[block.rows] = mixed[0].transpose(0, 1)
    return out


def line_up(layout: Layout, windows: frozenset[int], device: torch.device) -> RowKeys:
    """Once a step: what `attend_exact` needs of the layout."""
    slots: list[Ints] = []
    counts: list[int] = []
    for b in layout.blocks:
        prefix = prefix_slots(b.pages, b.prefix)
        for mask in b.mask:
            slots.append(np.concatenate((prefix, b.extra[mask])))
            counts.append(len(slots[-1]))
    length = -(-max(counts) // PAGE) * PAGE
    table = np.zeros((len(slots), length), dtype=np.int64)
    for row, own in zip(table, slots, strict=True):
        row[: len(own)] = own
    at = np.arange(length)
    missing = at >= np.array(counts)[:, None]
    hidden = {w: torch.from_numpy(missing | ~_inside(at, layout.positions[:, None], w)).to(device) for w in windows}
    return RowKeys(torch.from_numpy(table).to(device), hidden)


def attend_exact(q: Tensor, keys: Tensor, values: Tensor, own: RowKeys, window: int, scale: float) -> Tensor:
    """As `attend`, but bit for bit the same for a row alone, in a tree, and in any batch."""
    rows = max(1, GATHERED_KEYS // own.slots.shape[1])
    parts = [
        _attend_rows(q[i : i + rows], keys, values, own.slots[i : i + rows], own.hidden[window][i : i + rows], scale)
        for i in range(0, len(q), rows)
    ]
    return torch.cat(parts)


def _attend_rows(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, hidden: Tensor, scale: float) -> Tensor:
    (r, h, d), hkv, tiles = q.shape, keys.shape[0], slots.shape[1] // PAGE
    g = h // hkv
    k = keys[:, slots].reshape(-1, PAGE, d)  # [Hkv * r * tiles, PAGE, D]
    v = values[:, slots].reshape(-1, PAGE, d)
    heads = q.view(r, hkv, g, d).transpose(0, 1)  # [Hkv, r, G, D]
    asked = heads.unsqueeze(2).expand(-1, -1, tiles, -1, -1).reshape(-1, g, d)
    scores = torch.bmm(asked, k.transpose(1, 2)).view(hkv, r, tiles, g, PAGE)
    scores = scores.transpose(2, 3).reshape(hkv, r, g, tiles * PAGE).float() * scale
    weights = torch.softmax(scores.masked_fill_(hidden[None, :, None], -torch.inf), dim=-1).to(q.dtype)
    tiled = weights.view(hkv, r, g, tiles, PAGE).transpose(2, 3).reshape(-1, g, PAGE)
    parts = torch.bmm(tiled, v).view(hkv, r, tiles, g, d)
    out = parts[:, :, 0]
    for t in range(1, tiles):
        out = out + parts[:, :, t]
    return out.transpose(0, 1).reshape(r, h, d)
