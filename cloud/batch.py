"""One step's rows, laid out: from works to token ids, positions, slots, the attention's layout and the forest of choices.

Host-side arithmetic over NumPy arrays; `to_device` at the end. A work's rows are its tokens, then its nodes in the plan's
order. Token rows go to their final slots at once; node i is put i slots beyond the last token, and moves when it is accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from paceline.cloud.engine import Work
from paceline.cloud.pages import Held
from paceline.kernels.choice import Adjustment, Choices, Forest
from paceline.kernels.layout import BLOCK_ROWS, PAGE, Block, Bools, Ints, Layout, prefix_slots
from paceline.protocol.sampling import History


@dataclass(frozen=True)
class Share:
    """A work and where it begins: its cached length and its pages, which have room for its tokens and nodes."""

    work: Work
    length: int
    pages: Ints
    depths: Ints  # [n] of its nodes, 1 for a child of the last token

    @classmethod
    def of(cls, work: Work, held: Held) -> "Share":
        return cls(work, len(held.tokens), np.array(held.pages, dtype=np.int64), depths(work.plan.parents))

    @property
    def base(self) -> int:
        """Keys at their final places once the tokens are in."""
        return self.length + len(self.work.tokens)

    @property
    def rows(self) -> int:
        return len(self.work.tokens) + len(self.work.plan.tokens)

    @property
    def positions(self) -> Ints:
        tokens: Ints = np.arange(self.length, self.base)
        return np.concatenate((tokens, self.base - 1 + self.depths))

    def slots(self) -> Ints:
        """Slot of each row."""
        return prefix_slots(self.pages, self.length + self.rows)[self.length :]


def depths(parents: Sequence[int]) -> Ints:
    """Depth [n] of each node below the last token."""
    out = np.zeros(len(parents), dtype=np.int64)
    for i, parent in enumerate(parents):
        out[i] = 1 + (out[parent] if parent >= 0 else 0)
    return out


def ancestors(parents: Sequence[int]) -> Bools:
    """[n, n] whether node j is node i or above it."""
    out = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            out[i] |= out[parent]
    return out


@dataclass(frozen=True)
class Batch:
    """A step, on the host."""

    shares: tuple[Share, ...]
    tokens: Ints  # [R]
    slots: Ints  # [R]
    layout: Layout
    asked: Ints  # [N] rows whose logits are wanted
    choosing: tuple[Share, ...]


def lay_out(shares: Sequence[Share], exact: bool) -> Batch:
    """The rows of all shares, one after the other."""
    firsts = np.cumsum([0, *(s.rows for s in shares)])
    blocks = [b for s, first in zip(shares, firsts, strict=False) for b in _blocks(s, int(first), exact)]
    choosing = tuple(s for s in shares if s.work.choose)
    asked = [
        np.arange(first + len(s.work.tokens) - 1, first + s.rows)
        for s, first in zip(shares, firsts, strict=False)
        if s.work.choose
    ]
    return Batch(
        shares=tuple(shares),
        tokens=np.array([t for s in shares for t in (*s.work.tokens, *s.work.plan.tokens)], dtype=np.int64),
        slots=np.concatenate([s.slots() for s in shares]),
        layout=Layout(tuple(blocks), np.concatenate([s.positions for s in shares])),
        asked=np.concatenate(asked) if asked else np.empty(0, dtype=np.int64),
        choosing=choosing,
    )


def _blocks(share: Share, first: int, exact: bool) -> list[Block]:
    """A share's rows in blocks. In exact mode a row stands alone, its tail of keys in the order of positions."""
    tokens = len(share.work.tokens)
    slots, positions = share.slots(), share.positions
    if exact:
        return _lone_rows(share, first, slots, positions)
    if tokens + len(share.depths) <= BLOCK_ROWS:
        return [_block(share, first, 0, share.rows, slots, positions)]
    head = [(i, min(i + BLOCK_ROWS, tokens)) for i in range(0, tokens, BLOCK_ROWS)]
    tail = [(i, min(i + BLOCK_ROWS, share.rows)) for i in range(tokens, share.rows, BLOCK_ROWS)]
    return [_block(share, first, a, b, slots, positions) for a, b in head + tail]


def _block(share: Share, first: int, start: int, stop: int, slots: Ints, positions: Ints) -> Block:
    """Rows [start, stop) of a share: all tokens before them are prefix, what may be hidden from some is extra."""
    tokens = len(share.work.tokens)
    before = min(start, tokens)  # extra keys are the rows from here on
    own = share.rows if stop > tokens else stop
    visible = np.tri(own - before, dtype=bool)
    if own > tokens:
        t = tokens - before
        visible[t:, :t] = True
        visible[t:, t:] = ancestors(share.work.plan.parents)
    return Block(
        first=first + start,
        rows=stop - start,
        pages=share.pages,
        prefix=share.length + before,
        extra=slots[before:own],
        extra_positions=positions[before:own],
        mask=visible[start - before : stop - before],
    )


def _lone_rows(share: Share, first: int, slots: Ints, positions: Ints) -> list[Block]:
    committed, nodes = prefix_slots(share.pages, share.base), slots[len(share.work.tokens) :]
    above = ancestors(share.work.plan.parents)
    out = []
    for row in range(share.rows):
        node = row - len(share.work.tokens)
        seen = share.base if node >= 0 else share.length + row + 1
        prefix = seen // PAGE * PAGE
        tail = committed[prefix:seen]
        extra = np.concatenate((tail, nodes[above[node]])) if node >= 0 else tail
        mask = np.ones((1, len(extra)), dtype=bool)
        at = np.arange(prefix, prefix + len(extra))
        out.append(Block(first + row, 1, share.pages, prefix, extra, at, mask))
    return out


def forest(batch: Batch, device: torch.device) -> Forest:
    """The trees over the rows of logits that the step asks for."""
    sizes = [1 + len(s.depths) for s in batch.choosing]
    roots = np.cumsum([0, *sizes])[:-1]
    parents = [
        np.array([-1, *(1 + p + root for p in s.work.plan.parents)])
        for s, root in zip(batch.choosing, roots, strict=True)
    ]
    tokens = [(-1, *s.work.plan.tokens) for s in batch.choosing]
    columns = np.stack((np.repeat(np.arange(len(sizes)), sizes), np.concatenate(parents), np.concatenate(tokens)))
    sessions, parent, token = torch.from_numpy(columns).to(device)
    return Forest(
        roots=torch.from_numpy(roots).to(device),
        sessions=sessions,
        parents=parent,
        tokens=token,
        positions=torch.from_numpy(batch.layout.positions[batch.asked] + 1).to(device),
        deepest=max(int(s.depths.max(initial=0)) for s in batch.choosing),
    )


def choices(batch: Batch, vocabulary: int, device: torch.device) -> Choices:
    """Sampling parameters of each choosing session, and bias and penalties spelt out for its rows."""
    entries: list[tuple[int, int, float, float, float]] = []
    root = 0
    for share in batch.choosing:
        work = share.work
        if work.sampling.penalised or work.sampling.logit_bias:
            for row, path in enumerate(_paths(work)):
                entries.extend((root + row, *e) for e in _entries(work, path, vocabulary))
        root += 1 + len(share.depths)
    params = tuple(s.work.sampling for s in batch.choosing)
    if not entries:
        return Choices(params)
    rows, tokens, bias, repetition, subtract = zip(*entries, strict=True)
    return Choices(
        params,
        Adjustment(
            *(torch.tensor(ids, device=device) for ids in (rows, tokens)),
            *(torch.tensor(x, dtype=torch.float64, device=device) for x in (bias, repetition, subtract)),
        ),
    )


def _paths(work: Work) -> list[list[int]]:
    """Drafted tokens on the way to each row: none for the root, then the nodes."""
    out: list[list[int]] = [[]]
    for parent, token in zip(work.plan.parents, work.plan.tokens, strict=True):
        out.append([*out[parent + 1], token])
    return out


def _entries(work: Work, path: list[int], vocabulary: int) -> list[tuple[int, float, float, float]]:
    """(token, bias, repetition, subtract) of every token whose logit changes after `path`."""
    s = work.sampling
    bias: dict[int, float] = {}
    for token, value in s.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    history = work.history.after(path) if s.penalised and work.history is not None else History(())
    seen = dict(zip(*(column.tolist() for column in history.seen(vocabulary)), strict=True))
    out = []
    for token in sorted(t for t in seen.keys() | bias.keys() if t < vocabulary):
        written = seen.get(token, 0)
        subtract = s.frequency_penalty * written + s.presence_penalty if written else 0.0
        out.append((token, bias.get(token, 0.0), s.repetition_penalty if token in seen else 1.0, subtract))
    return out
