"""An ONNX draft through ONNX Runtime: one cache of cells, each row told which are its own, many generations in one batch.

A generation has a trunk, the cells of its committed text in the order of positions. A node that was run has a cell of its
own and knows those between it and the trunk, so branches share what they have in common and nothing is copied. When the text
grows along nodes that were run, the trunk takes their cells over; the cells of nodes that are no longer wanted are free at
once, wherever they lie, since a row's bias and not the order of cells says what it attends to. A trunk outlives its
generation, so that the next turn of a chat finds its prefix.
"""

import heapq
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from paceline.edge.candidates import candidates
from paceline.edge.draft import PROBE_ROWS, Candidates, Extended, Row
from paceline.edge.drafts.cells import Generation, Line, place, renumber, seen
from paceline.kernels.onnx_session import Cache, OnnxModel
from paceline.kernels.threads import default_threads
from paceline.kernels.token_map import TokenMap
from paceline.protocol.errors import EngineError
from paceline.protocol.tokens import common_prefix
from paceline.protocol.vocabulary import Vocabulary

BATCH = 128
TAIL = 8  # tokens of the text that may run together with the tree's rows
SPARE = 256  # cells a generation needs beside its prompt
GRAIN = 64  # the cache grows and shrinks in multiples of so many cells: a step's cost follows its size
KEPT = 1024  # cells of ended generations, beside the last one's, that are kept for their prefixes


class OnnxDraft:
    def __init__(
        self,
        path: str | Path,
        vocabulary: Vocabulary,
        *,
        cells: int = 4096,
        threads: int | None = None,
        provider: str = "cpu",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`vocabulary` is the target's, `provider` one of `onnx_session.PROVIDERS`; `clock` times the forward.

        Raises EngineError if the draft was not made for the vocabulary, its file is not sound or the provider is not there.
        """
        self._model = OnnxModel(path, provider=provider, threads=threads or default_threads())
        self.name = self._model.file.name
        self.vocabulary = vocabulary
        self._map = TokenMap.of_file(self._model.file, vocabulary)
        self._most = min(cells, self._model.layout.context)
        self._cache = Cache(self._model, min(GRAIN, self._most))
        self._free = list(range(self._cache.cells))  # a heap: the lowest first, so that the cache stays short
        self._generations: dict[int, Generation] = {}
        self._opens = 0
        self._ran, self._forward, self._clock = 0, 0.0, clock
        self.step_cost = _step_cost(self._cache)

    @staticmethod
    def cost_of(path: str | Path, *, threads: int | None = None, provider: str = "cpu") -> list[tuple[int, float]]:
        """The step cost of the draft in a file, whatever target it was made for; nothing of it stays in memory."""
        return _step_cost(Cache(OnnxModel(path, provider=provider, threads=threads or default_threads()), GRAIN))

    def open(self, prompt: Sequence[int]) -> int:
        if len(prompt) + SPARE > self._most:
            raise EngineError(f"the prompt of {len(prompt)} tokens is longer than the draft's context")
        self._opens += 1
        self._generations[self._opens] = self._reused(prompt) or Generation(list(prompt))
        self._tidy()
        return self._opens

    def commit(self, handle: int, tokens: Sequence[int], walked: Sequence[int], live: Collection[int]) -> None:
        g = self._generations[handle]
        g.text.extend(tokens)
        run = [n for n in walked if n in g.placed]
        if run:
            end = g.placed[run[-1]]
            for cell in end.path[len(g.trunk) - end.base :]:
                g.trunk.append(cell)
                g.branches.discard(cell)
        g.placed = {n: at for n, at in g.placed.items() if n in live}
        self._free_branches(g)

    def extend(self, rows: Sequence[Row]) -> Extended:
        """As the protocol says. Long stretches of text that are not cached yet run first, in batches of their own."""
        self._ran, self._forward = 0, 0.0
        for handle in {row.handle for row in rows}:
            self._prefill(self._generations[handle])
        lines: list[Line] = []
        put = [self._put_root(lines, row) if row.parent < 0 else self._put_child(lines, row) for row in rows]
        if not lines:
            return Extended([None] * len(rows))
        logits = iter(self._run(lines))
        found = [self._candidates(next(logits), row) if ok else None for row, ok in zip(rows, put, strict=True)]
        return Extended(found, self._ran, self._forward)

    def close(self, handle: int) -> None:
        g = self._generations.pop(handle)
        g.placed, g.closed = {}, True
        self._free_branches(g)
        self._generations[handle] = g  # the last to be forgotten

    def shut(self) -> None:
        """Free the model; the draft is not used afterwards."""
        del self._cache, self._model

    # ---- rows

    def _candidates(self, logits: npt.NDArray[np.float32], row: Row) -> Candidates:
        return candidates(self._map.to_target(logits), row.position + 1, row.choice)

    def _put_root(self, lines: list[Line], row: Row) -> bool:
        """The last committed token, after whatever of the text before it is not cached, on the trunk."""
        g = self._generations[row.handle]
        last = len(g.text) - 1
        for i in range(min(len(g.trunk), last), last):
            lines.append(Line(g, self._map.row(g.text[i]), i, False))
        lines.append(Line(g, self._map.row(g.text[last]), last, True, row.node))
        return True

    def _put_child(self, lines: list[Line], row: Row) -> bool:
        g = self._generations[row.handle]
        if row.parent not in g.placed and not (row.position == len(g.text) == len(g.trunk)):
            return False  # its parent could not be run
        lines.append(Line(g, self._map.row(row.token), row.position, True, row.node, row.parent))
        return True

    def _prefill(self, g: Generation) -> None:
        while len(g.text) - len(g.trunk) > TAIL:
            at = len(g.trunk)
            part = g.text[at : min(at + BATCH, len(g.text) - 1)]
            self._run([Line(g, self._map.row(token), at + i, False) for i, token in enumerate(part)])

    def _run(self, lines: list[Line]) -> npt.NDArray[np.float32]:
        """Run a batch; the logits [wanted, rows]. Only then are its rows placed: what did not run leaves no trace."""
        begin = self._clock()
        cells = self._take(sum(not line.runs_again for line in lines))  # may give all cells other numbers
        fresh = iter(cells)
        for line in lines:
            line.cell = line.generation.trunk[line.position] if line.runs_again else next(fresh)
        try:
            logits = self._cache.step(
                [line.token for line in lines],
                [line.position for line in lines],
                [line.cell for line in lines],
                seen(lines),
                [line.wanted for line in lines],
            )
        except EngineError:
            self._give(cells)
            raise
        finally:
            self._forward += self._clock() - begin
        self._ran += len(lines)
        for line in lines:
            place(line)
        return logits

    # ---- generations that are over

    def _reused(self, prompt: Sequence[int]) -> Generation | None:
        """A generation that is over and shares a prefix with this prompt, made into a new one."""
        closed = [(h, common_prefix(g.text[: len(g.trunk)], prompt)) for h, g in self._generations.items() if g.closed]
        handle, shared = max(closed, key=lambda c: c[1], default=(0, 0))
        if shared == 0:
            return None
        g = self._generations.pop(handle)
        keep = min(shared, len(prompt) - 1)
        self._give(g.trunk[keep:])
        return Generation(list(prompt), g.trunk[:keep])

    def _forget(self) -> bool:
        """Give up the generation that has been over for longest."""
        old = next((h for h, g in self._generations.items() if g.closed), None)
        if old is not None:
            self._give(self._generations.pop(old).trunk)
        return old is not None

    def _tidy(self) -> None:
        """Forget prefixes beyond what is kept, and shorten a cache that is mostly free."""
        over = [len(g.trunk) for g in self._generations.values() if g.closed][:-1]
        while over and sum(over) > KEPT:
            self._forget()
            over.pop(0)
        used = self._cache.cells - len(self._free)
        if self._cache.cells > 2 * used + SPARE:
            self._resize(used + GRAIN)

    # ---- cells

    def _take(self, count: int) -> list[int]:
        """The lowest free cells. Raises EngineError if there are too few, even with all forgotten that may be."""
        while count > len(self._free) + self._most - self._cache.cells:
            if not self._forget():
                raise EngineError(f"the draft's context of {self._most} tokens is full")
        if count > len(self._free):
            used = self._cache.cells - len(self._free)
            self._resize(max(used + count, self._cache.cells * 5 // 4))
        return [heapq.heappop(self._free) for _ in range(count)]

    def _give(self, cells: Collection[int]) -> None:
        for cell in cells:
            heapq.heappush(self._free, cell)

    def _free_branches(self, g: Generation) -> None:
        used = {cell for at in g.placed.values() for cell in at.path}
        self._give(g.branches - used)
        g.branches &= used

    def _resize(self, cells: int) -> None:
        """Go on with about so many cells, those in use at the front."""
        cells = min(-(-cells // GRAIN) * GRAIN, self._most)
        used = np.setdiff1d(np.arange(self._cache.cells), self._free)
        self._cache.rearrange(used, cells)
        new = {int(old): i for i, old in enumerate(used)}
        for g in self._generations.values():
            renumber(g, new)
        self._free = list(range(len(used), cells))


def _step_cost(cache: Cache) -> list[tuple[int, float]]:
    """(rows, seconds of a step) for a few widths: the best of three each. What the first cells hold is written over."""
    table = []
    for rows in PROBE_ROWS:
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            chain = [np.arange(i + 1) for i in range(rows)]
            cache.step([0] * rows, range(rows), range(rows), chain, [True] * rows)
            times.append(time.perf_counter() - begin)
        table.append((rows, min(times)))
    return table
