"""Any GGUF as the target, through llama.cpp: one context per sequence, trees by sequence ids, cells in the order of positions.

Exactness. llama.cpp's CPU attention visits the cells of the cache in order and skips those of other sequences, so a
row's logits have the same bits alone and in a tree, as long as the cells of its sequence lie in the order of
positions and a batch has fewer than 64 rows. Two things follow. Each sequence has a context of its own: another
session's holes are never filled by this one's tokens. And after a step only those accepted nodes stay whose cells
follow the text without a gap (the likeliest chain is first in the batch, so they usually all do); the others' tokens
run again, in order, with the next step. `keep_order=False` switches that off, to show that it matters.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from paceline.cloud.engine import Blocks, Logits, Work, walk
from paceline.kernels.llama import Context, Model
from paceline.kernels.threads import default_threads
from paceline.protocol.cloud_session import Plan, Walk
from paceline.protocol.errors import EngineError
from paceline.protocol.tokens import common_prefix
from paceline.protocol.vocabulary import Vocabulary

ROWS = 48  # rows in one llama.cpp batch: below the 64 from which its attention rounds differently
PROBE_ROWS = (1, 2, 4, 8)
PROBE_TOKENS = 12


@dataclass
class Slot:
    """A context and the tokens in it, in the order of positions."""

    context: Context
    tokens: list[int] = field(default_factory=list)
    busy: bool = False
    used: int = 0  # when it was last opened, in opens


class LlamaEngine:
    masks = True  # its choice is made on the host, where a grammar can be laid over the logits
    rejects = True  # and where draws can be accepted or refused

    def __init__(
        self,
        path: str | Path,
        *,
        context: int = 2048,
        slots: int = 8,
        max_width: int = 32,
        threads: int | None = None,
        gpu_layers: int = 0,
        keep_order: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert max_width < ROWS
        self._model = Model(path, gpu_layers=gpu_layers)
        self.name = self._model.name
        self.vocabulary = Vocabulary.of(self.name, self._model.tokens())
        self.context = min(context, self._model.context)
        self.max_width = max_width
        self.chunk = 2 * ROWS
        self._threads = threads or default_threads()
        self._limit, self._keep_order = slots, keep_order
        self._slots: list[Slot] = []
        self._clock = clock
        self.forward_seconds = 0.0  # in llama.cpp's decode so far, by `clock`
        self._opens = 0
        self.step_cost = self._measure()
        self.exact = self._rows_are_exact()
        self.free_width = max(n for n, t in self.step_cost if t <= 1.1 * self.step_cost[0][1]) - 1

    def open(self, tokens: Sequence[int]) -> int:
        slot = self._pick(tokens)
        keep = min(common_prefix(slot.tokens, tokens), len(tokens) - 1)
        if keep < len(slot.tokens):
            slot.context.drop(0, keep)
            del slot.tokens[keep:]
        self._opens += 1
        slot.busy, slot.used = True, self._opens
        return self._slots.index(slot)

    def length(self, handle: int) -> int:
        return len(self._slots[handle].tokens)

    def close(self, handle: int) -> None:
        self._slots[handle].busy = False

    @property
    def blocks(self) -> Blocks:
        """Slots: each is the whole context of one sequence, so what a short one leaves of it is of no use to others."""
        return Blocks(sum(slot.busy for slot in self._slots), self._limit, self.context)

    def shut(self) -> None:
        """Free everything; the engine is not used afterwards."""
        for slot in self._slots:
            slot.context.close()
        self._slots.clear()
        self._model.close()

    def verify(self, batch: Sequence[Work]) -> list[Walk | EngineError | None]:
        out: list[Walk | EngineError | None] = []
        for work in batch:
            slot = self._slots[work.handle]
            try:
                out.append(self._verify(slot, work))
            except EngineError as e:
                slot.context.clear()
                slot.tokens.clear()
                out.append(e)
        return out

    # ---- one session's share

    def _verify(self, slot: Slot, work: Work) -> Walk | EngineError | None:
        if len(slot.tokens) + len(work.tokens) > self.context:
            return EngineError(f"the context of {self.context} tokens is full")
        fit = ROWS - len(work.plan.nodes) if work.choose else 0  # tokens that run in one batch with the tree
        cut = max(0, len(work.tokens) - fit)
        for i in range(0, cut, ROWS):
            self._append(slot, work.tokens[i : min(i + ROWS, cut)])
        return self._step(slot, work.tokens[cut:], work) if work.choose else None

    def _append(self, slot: Slot, tokens: Sequence[int]) -> None:
        n, at = len(tokens), len(slot.tokens)
        self._decode(slot, tokens, range(at, at + n), [(0,)] * n, [False] * n)
        slot.tokens.extend(tokens)

    def _step(self, slot: Slot, tokens: Sequence[int], work: Work) -> Walk | EngineError:
        plan, n, at = work.plan, len(tokens), len(slot.tokens)
        paths, leaves = _paths(plan)
        every = tuple(range(leaves + 1))
        for path in every[1:]:
            slot.context.share(0, path, 0, at)
        depths = _depths(plan)
        logits = self._decode(
            slot,
            (*tokens, *plan.tokens),
            (*range(at, at + n), *(at + n - 1 + d for d in depths)),
            [every] * n + paths,
            [False] * (n - 1) + [True] * (1 + len(plan.nodes)),
        )[:, : self.vocabulary.size]
        slot.tokens.extend(tokens)
        result = walk(work, at + n, lambda i: logits[i + 1])
        if isinstance(result, Walk):
            self._keep(slot, plan, paths, result.accepted)
        for path in every[1:]:
            slot.context.drop(path)
        return result

    def _decode(
        self,
        slot: Slot,
        tokens: Sequence[int],
        positions: Sequence[int],
        paths: Sequence[Sequence[int]],
        wanted: Sequence[bool],
    ) -> Logits:
        begin = self._clock()
        try:
            return slot.context.decode(tokens, positions, paths, wanted)
        finally:
            self.forward_seconds += self._clock() - begin

    def _keep(self, slot: Slot, plan: Plan, paths: list[tuple[int, ...]], accepted: Sequence[int]) -> None:
        """The accepted nodes whose cells follow the text without a gap become part of it."""
        kept = [node for i, node in enumerate(accepted) if node == i or not self._keep_order]
        if not kept:
            return
        at = len(slot.tokens)
        slot.context.share(paths[kept[-1]][0], 0, at, at + len(kept))
        slot.tokens.extend(plan.tokens[node] for node in kept)

    # ---- slots

    def _pick(self, tokens: Sequence[int]) -> Slot:
        """The idle slot that shares the longest prefix, if that is most of it; else an unused one, while there is one."""
        idle = [s for s in self._slots if not s.busy]
        best = max(idle, key=lambda s: (common_prefix(s.tokens, tokens), -s.used), default=None)
        if best is not None and 0 < len(best.tokens) <= 2 * common_prefix(best.tokens, tokens):
            return (
                best  # most of what it holds serves again: another chat's slot, that shares a system prompt, does not
            )
        if len(self._slots) < self._limit:
            cells = self.context + ROWS
            new = Slot(Context(self._model, cells, self.max_width + 1, threads=self._threads, batch=ROWS, exact=True))
            self._slots.append(new)
            return new
        if best is None:
            raise EngineError(f"all {self._limit} sequences of this engine are in use")
        return best

    def _rows_are_exact(self) -> bool:
        """Whether rows of this model on this machine have the same bits one by one and together with a side branch.

        True of Q4_0 and Q4_1 weights on the CPUs tried. For IQ4_NL and K-quants llama.cpp has one routine for a
        single row and another for several, which sum differently.
        """
        tokens = [(7 * i + 1) % self.vocabulary.size for i in range(PROBE_TOKENS)]
        context = Context(self._model, 8 * ROWS, 3, threads=self._threads, batch=ROWS, exact=True)
        alone = [context.decode([t], [i], [(0,)], [True])[0].copy() for i, t in enumerate(tokens)]
        context.clear()
        n, side = len(tokens), tokens[: len(tokens) // 2]
        half = n - len(side)
        rows = context.decode(
            [*tokens, *side],
            [*range(n), *range(half, half + len(side))],
            [(0, 1)] * half + [(0,)] * (n - half) + [(1,)] * len(side),
            [True] * n + [False] * len(side),
        )
        same = np.array_equal(alone, rows)
        context.close()
        return same

    def _measure(self) -> list[tuple[int, float]]:
        """(rows, seconds of a step) for a few widths: the best of three each."""
        context = Context(self._model, 2 * ROWS * len(PROBE_ROWS), 1, threads=self._threads, batch=ROWS, exact=True)
        table, at = [], 0
        for rows in PROBE_ROWS:
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                context.decode([0] * rows, range(at, at + rows), [(0,)] * rows, [True] * rows)
                times.append(time.perf_counter() - begin)
                at += rows
            table.append((rows, min(times)))
        context.close()
        return table


def _paths(plan: Plan) -> tuple[list[tuple[int, ...]], int]:
    """Per node, the sequence ids (1, 2, ...) of the leaves at or below it; and the number of leaves."""
    inner = set(plan.parents)
    ids: list[list[int]] = [[] for _ in plan.nodes]
    leaves = 0
    for leaf in range(len(plan.nodes)):
        if leaf in inner:
            continue
        leaves += 1
        node = leaf
        while node >= 0:
            ids[node].append(leaves)
            node = plan.parents[node]
    return [tuple(i) for i in ids], leaves


def _depths(plan: Plan) -> list[int]:
    depths: list[int] = []
    for parent in plan.parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return depths
