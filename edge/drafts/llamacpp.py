"""A GGUF draft through llama.cpp: one unified cache, one sequence id per path, many generations in one batch.

A generation has a trunk, the sequence id that holds its committed text. A node's cell lies on a path: the first child
that is run goes on along its parent's path, every further one takes a free id that shares the cells up to the parent
(metadata, no copy). When the text grows along nodes that were run, the trunk takes their cells over; paths on which
nobody is wanted any more are freed. A trunk outlives its generation, so that the next turn of a chat finds its
prefix. When the room grows, trunks come along, and what hung on them is run again.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from paceline.edge.candidates import candidates
from paceline.edge.draft import Candidates, Extended, Row
from paceline.edge.drafts.llama_room import FIRST_CELLS, Room
from paceline.kernels.llama import Model
from paceline.kernels.threads import default_threads
from paceline.kernels.token_map import TokenMap
from paceline.protocol.errors import EngineError
from paceline.protocol.tokens import common_prefix
from paceline.protocol.vocabulary import Vocabulary

BATCH = 256
TAIL = 8  # tokens of the text that may run together with the tree's rows
SPARE = 256  # cells a generation needs beside its prompt


@dataclass
class Generation:
    """`text` is prompt and committed tokens; the first `cached` of them have cells on `trunk`."""

    trunk: int
    text: list[int]
    cached: int = 0
    placed: dict[int, tuple[int, int]] = field(default_factory=dict)  # node that was run -> (path, absolute position)
    continued: set[int] = field(default_factory=set)  # nodes whose path a child has gone on along
    paths: set[int] = field(default_factory=set)
    closed: bool = False


@dataclass
class Batch:
    """Rows for the context, and what is true once they have run."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    paths: list[tuple[int]] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)
    placed: list[tuple[Generation, int, int, int]] = field(default_factory=list)  # generation, node, path, position

    def add(self, token: int, position: int, path: int, wanted: bool) -> None:
        self.tokens.append(token)
        self.positions.append(position)
        self.paths.append((path,))
        self.wanted.append(wanted)


class LlamaDraft:
    def __init__(
        self,
        path: str | Path,
        vocabulary: Vocabulary,
        *,
        cells: int = 4096,
        threads: int | None = None,
        gpu_layers: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`vocabulary` is the target's; `clock` times the forward; `cells` of the cache are there if they are needed.

        Raises EngineError if the draft was not made for this vocabulary.
        """
        self._model = Model(path, gpu_layers=gpu_layers)
        self.name = self._model.name
        self.vocabulary = vocabulary
        self._map = TokenMap.of(self._model, vocabulary)
        self._room = Room(self._model, cells, threads=threads or default_threads(), batch=BATCH)
        self._model.give_back()
        self._generations: dict[int, Generation] = {}
        self._opens = 0
        self._ran, self._forward, self._clock = 0, 0.0, clock
        self.step_cost = self._room.step_cost()

    @staticmethod
    def cost_of(path: str | Path, *, threads: int | None = None) -> list[tuple[int, float]]:
        """The step cost of the draft in a file, whatever target it was made for; nothing of it stays in memory."""
        model = Model(path)
        room = Room(model, FIRST_CELLS, threads=threads or default_threads(), batch=BATCH)
        found = room.step_cost()
        room.close()
        model.close()
        return found

    def open(self, prompt: Sequence[int]) -> int:
        if len(prompt) + SPARE > self._room.limit:
            raise EngineError(f"the prompt of {len(prompt)} tokens is longer than the draft's context")
        open_tokens = sum(len(g.text) + SPARE for g in self._generations.values() if not g.closed)
        if not self._room.holds(open_tokens + len(prompt) + SPARE):
            self._grow()
        generation = self._reused(prompt) or Generation(self._path_or_raise(), list(prompt))
        self._opens += 1
        self._generations[self._opens] = generation
        return self._opens

    def commit(self, handle: int, tokens: Sequence[int], walked: Sequence[int], live: Collection[int]) -> None:
        g = self._generations[handle]
        g.text.extend(tokens)
        run = [n for n in walked if n in g.placed]
        if run:
            path, position = g.placed[run[-1]]
            if position >= g.cached:
                self._room.context.share(path, g.trunk, g.cached, position + 1)
                g.cached = position + 1
        g.placed = {n: place for n, place in g.placed.items() if n in live}
        self._free_paths(g)

    def extend(self, rows: Sequence[Row]) -> Extended:
        """As the protocol says. Long stretches of text that are not cached yet run first, in batches of their own."""
        self._ran, self._forward = 0, 0.0
        if self._room.short:
            self._grow()
        batch = Batch()
        for handle in {row.handle for row in rows}:
            self._prefill(self._generations[handle])
        put = [self._put_root(batch, row) if row.parent < 0 else self._put_child(batch, row) for row in rows]
        if not batch.tokens:
            return Extended([None] * len(rows))
        logits = self._decode_placed(batch)
        which = iter(range(len(logits)))
        found = [self._candidates(logits[next(which)], row) if ok else None for row, ok in zip(rows, put, strict=True)]
        return Extended(found, self._ran, self._forward)

    def close(self, handle: int) -> None:
        g = self._generations[handle]
        g.placed, g.closed = {}, True
        self._free_paths(g)

    def shut(self) -> None:
        """Free the model; the draft is not used afterwards."""
        self._room.close()
        self._model.close()

    # ---- rows

    def _candidates(self, logits: npt.NDArray[np.float32], row: Row) -> Candidates:
        return candidates(self._map.to_target(logits), row.position + 1, row.choice)

    def _put_root(self, batch: Batch, row: Row) -> bool:
        """The last committed token, after whatever of the text before it is not cached, on the trunk."""
        g = self._generations[row.handle]
        last = len(g.text) - 1
        if g.cached > last:
            self._room.context.drop(g.trunk, last)
        for i in range(min(g.cached, last), last + 1):
            batch.add(self._map.row(g.text[i]), i, g.trunk, i == last)
        batch.placed.append((g, row.node, g.trunk, last))
        return True

    def _put_child(self, batch: Batch, row: Row) -> bool:
        g = self._generations[row.handle]
        place = g.placed.get(row.parent)
        if place is None and not (row.position == len(g.text) == g.cached):
            return False  # its parent could not be run
        path = place[0] if place else g.trunk
        if path == g.trunk or row.parent in g.continued:
            new = self._take_path()
            if new is None:
                return False
            self._room.context.share(path, new, 0, row.position)
            g.paths.add(new)
            path = new
        g.continued.add(row.parent)
        batch.add(self._map.row(row.token), row.position, path, True)
        batch.placed.append((g, row.node, path, row.position))
        return True

    def _decode_placed(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Run a batch of nodes. Only then are they placed: what did not run leaves no trace."""
        try:
            logits = self._decode(batch)
        except EngineError:
            for g in {id(g): g for g, *_ in batch.placed}.values():
                self._free_paths(g)
            raise
        for g, node, path, position in batch.placed:
            g.placed[node] = (path, position)
            if path == g.trunk:
                g.cached = position + 1
        return logits

    def _prefill(self, g: Generation) -> None:
        while len(g.text) - g.cached > TAIL:
            part = g.text[g.cached : min(g.cached + BATCH, len(g.text) - 1)]
            batch = Batch()
            for i, token in enumerate(part):
                batch.add(self._map.row(token), g.cached + i, g.trunk, False)
            self._decode(batch)
            g.cached += len(part)

    def _decode(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Run a batch; if the cache is full, forget generations that are over, the oldest first, and try again."""
        begin = self._clock()
        while True:
            try:
                logits = self._room.context.decode(batch.tokens, batch.positions, batch.paths, batch.wanted)
                self._ran += len(batch.tokens)
                return logits
            except EngineError:
                old = next((h for h, g in self._generations.items() if g.closed), None)
                if old is None:
                    self._room.full()
                    raise
                self._forget(old)
            finally:
                self._forward += self._clock() - begin

    # ---- room

    def _grow(self) -> None:
        """Take the whole room. Nodes that were run are forgotten: their children are run from the text again."""
        kept = self._room.grow([g.trunk for g in self._generations.values()])
        for g in self._generations.values():
            g.cached = g.cached if g.trunk in kept else 0
            g.placed, g.continued, g.paths = {}, set(), set()

    def _reused(self, prompt: Sequence[int]) -> Generation | None:
        """A generation that is over and shares a prefix with this prompt, made into a new one."""
        closed = [(h, common_prefix(g.text[: g.cached], prompt)) for h, g in self._generations.items() if g.closed]
        handle, shared = max(closed, key=lambda c: c[1], default=(0, 0))
        if shared == 0:
            return None
        g = self._generations.pop(handle)
        keep = min(shared, len(prompt) - 1)
        self._room.context.drop(g.trunk, keep)
        return Generation(g.trunk, list(prompt), keep)

    def _path_or_raise(self) -> int:
        path = self._take_path()
        if path is None:
            raise EngineError("the draft has no room for another generation")
        return path

    def _take_path(self) -> int | None:
        if not self._room.free:
            old = next((h for h, g in self._generations.items() if g.closed), None)
            if old is not None:
                self._forget(old)
        return self._room.take()

    def _free_paths(self, g: Generation) -> None:
        used = {path for path, _ in g.placed.values()}
        g.continued &= g.placed.keys()
        for path in g.paths - used:
            self._room.give(path)
        g.paths &= used

    def _forget(self, handle: int) -> None:
        g = self._generations.pop(handle)
        self._room.give(g.trunk)
