"""What a draft has room for: cells of its cache, and the sequence ids that are free. It begins small and grows once.

llama.cpp writes to every cell when it makes a cache, and to a row of logits for every sequence id, so room that nobody
needs yet costs real memory. Most chats end in the small room.
"""

import time
from collections.abc import Iterable

from paceline.edge.draft import PROBE_ROWS
from paceline.kernels.llama import MAX_SEQUENCES, Context, Model
from paceline.protocol.errors import EngineError

FIRST_CELLS, FIRST_SEQUENCES = 1024, 64


class Room:
    """A context of at most `limit` cells, and the ids in it that belong to nobody."""

    def __init__(self, model: Model, limit: int, *, threads: int, batch: int) -> None:
        self._model, self.limit, self._threads, self._batch = model, limit, threads, batch
        self._largest = MAX_SEQUENCES
        self.free = list[int]()
        self.short = False  # something was wanted that only the whole room has
        self._make(min(limit, FIRST_CELLS), FIRST_SEQUENCES)

    def holds(self, cells: int) -> bool:
        """False if only the whole room has so many cells."""
        return cells <= self.context.cells or self.context.cells >= self.limit

    def full(self) -> None:
        """No cell was free."""
        self.short = self.short or self.context.cells < self.limit

    def take(self) -> int | None:
        self.short = self.short or (not self.free and self.context.sequences < self._largest)
        return self.free.pop() if self.free else None

    def give(self, sequence: int) -> None:
        """Free an id, with the cells that are its alone."""
        self.context.drop(sequence)
        self.free.append(sequence)

    def grow(self, kept: Iterable[int]) -> set[int]:
        """The whole room. Of what is cached only the sequences `kept` come along; returns those that did.

        Where there is no memory for it, it stays small for good.
        """
        self.short = False
        saved = {sequence: self.context.saved(sequence) for sequence in kept}
        small = (self.context.cells, self.context.sequences)
        self.context.close()
        try:
            self._make(self.limit, self._largest)
        except EngineError:
            self._make(*small)
            self.limit, self._largest = small
        self.free = [s for s in self.free if s not in saved]
        return {sequence for sequence, state in saved.items() if self.context.restore(sequence, state)}

    def step_cost(self) -> list[tuple[int, float]]:
        """(rows, seconds of a step) for a few widths: the best of three each. Nothing is cached before or afterwards."""
        table = []
        for rows in PROBE_ROWS:
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                self.context.decode([0] * rows, range(rows), [(0,)] * rows, [True] * rows)
                times.append(time.perf_counter() - begin)
                self.context.clear()
            table.append((rows, min(times)))
        return table

    def close(self) -> None:
        self.context.close()

    def _make(self, cells: int, sequences: int) -> None:
        self.context = Context(self._model, cells, sequences, threads=self._threads, batch=self._batch)
        self.free = list(range(sequences))
