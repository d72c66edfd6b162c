"""Logits of a draft after any path, for a text that is known beforehand: what the lab's memo is filled from.

The known text runs once, in large batches, on a trunk. A path that leaves it shares the trunk's cells up to there and
has its own for the rest; those are kept until sequence ids run short. Knows token ids and llama.cpp, nothing of trees.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from paceline.kernels.llama import MAX_SEQUENCES, Context, Model
from paceline.kernels.threads import default_threads
from paceline.kernels.token_map import TokenMap
from paceline.protocol.errors import EngineError
from paceline.protocol.tokens import common_prefix
from paceline.protocol.vocabulary import Vocabulary

BATCH = 256
GROUP = 16  # paths run together
Logits = npt.NDArray[np.float32]  # [V] in the target's ids


class Forest:
    def __init__(self, path: Path, vocabulary: Vocabulary, *, cells: int = 8192, threads: int | None = None) -> None:
        """Raises EngineError if the draft was not made for the vocabulary."""
        self._model = Model(path)
        self._map = TokenMap.of(self._model, vocabulary)
        self._context = Context(self._model, cells, MAX_SEQUENCES, threads=threads or default_threads(), batch=BATCH)
        self._trunk: list[int] = []
        self._free: list[int] = []
        self._held: dict[tuple[int, ...], int] = {}  # (where a path leaves the trunk, tokens from there) -> sequence id
        self._tips: OrderedDict[int, tuple[int, ...]] = OrderedDict()  # sequence id -> the longest such, oldest first

    def stands(self, tokens: Sequence[int]) -> bool:
        """Is this the text on the trunk?"""
        return self._trunk == list(tokens)

    def plant(self, tokens: Sequence[int], wanted_from: int) -> Iterator[tuple[int, Logits]]:
        """Begin with a new trunk. Yields (index, logits after the token there) for indices from `wanted_from` on."""
        self._context.clear()
        self._trunk, self._free = list(tokens), list(range(1, MAX_SEQUENCES))
        self._held, self._tips = {}, OrderedDict()
        for start in range(0, len(tokens), BATCH):
            part = range(start, min(start + BATCH, len(tokens)))
            wanted = [i >= wanted_from for i in part]
            logits = self._context.decode([self._map.row(tokens[i]) for i in part], part, [(0,)] * len(part), wanted)
            for i, row in zip((i for i in part if i >= wanted_from), logits, strict=True):
                yield i, self._map.to_target(row)

    def run(self, paths: Sequence[Sequence[int]]) -> list[Logits]:
        """Logits after each of `paths`, whole sequences of tokens that leave the trunk somewhere."""
        out: list[Logits] = []
        for start in range(0, len(paths), GROUP):
            out.extend(self._run(paths[start : start + GROUP]))
        return out

    def close(self) -> None:
        self._context.close()
        self._model.close()

    def _run(self, paths: Sequence[Sequence[int]]) -> list[Logits]:
        tokens, positions, ids, wanted = list[int](), list[int](), list[tuple[int]](), list[bool]()
        placed = [self._place(path) for path in paths]
        for path, (at, sequence) in zip(paths, placed, strict=True):
            for i in range(at, len(path)):
                tokens.append(self._map.row(path[i]))
                positions.append(i)
                ids.append((sequence,))
                wanted.append(i == len(path) - 1)
        while True:
            try:
                logits = self._context.decode(tokens, positions, ids, wanted)
                break
            except EngineError:
                if not self._let_go():
                    raise
        for path, (at, sequence) in zip(paths, placed, strict=True):
            fork = self._tips[sequence][0]
            for n in range(at + 1, len(path) + 1):  # only now: nobody may share cells that are not there yet
                self._held[(fork, *path[fork:n])] = sequence
        return [self._map.to_target(row).copy() for row in logits]

    def _place(self, path: Sequence[int]) -> tuple[int, int]:
        """A sequence id that holds the cells of `path` up to an index, and that index; it will hold the rest as well."""
        fork = min(common_prefix(self._trunk, path), len(path) - 1)
        end, source = fork, 0
        for n in range(len(path) - 1, fork, -1):
            held = self._held.get((fork, *path[fork:n]))
            if held is not None:
                end, source = n, held
                break
        if source and self._tips[source] == (fork, *path[fork:end]):
            sequence = source  # nothing has gone on along it yet
            self._tips.move_to_end(source)
        else:
            if not self._free:
                self._let_go()
            sequence = self._free.pop()
            self._context.share(source, sequence, 0, end)
        self._tips[sequence] = (fork, *path[fork:])
        return end, sequence

    def _let_go(self) -> bool:
        """Give up the sequence that has not been used for longest."""
        if len(self._tips) <= 2 * GROUP:  # those of the batch at hand, and those they go on from
            return False
        sequence, _ = self._tips.popitem(last=False)
        self._held = {prefix: s for prefix, s in self._held.items() if s != sequence}
        self._context.drop(sequence)
        self._free.append(sequence)
        return True
