"""What `forest` is for a GGUF draft, for an ONNX one: a known text on a trunk, and paths that leave it.

The trunk's cells come first in the cache. What leaves it has a cell a token, kept until they run out and then all given up.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from paceline.kernels.onnx_session import Cache, OnnxModel
from paceline.kernels.threads import default_threads
from paceline.kernels.token_map import TokenMap
from paceline.protocol.errors import EngineError
from paceline.protocol.tokens import common_prefix
from paceline.protocol.vocabulary import Vocabulary

BATCH = 128
GROUP = 16  # paths run together
BESIDE = 512  # cells beside the trunk
Logits = npt.NDArray[np.float32]  # [V] in the target's ids
Key = tuple[int, ...]  # where a path leaves the trunk, and its tokens from there


class OnnxForest:
    def __init__(self, path: Path, vocabulary: Vocabulary, *, threads: int | None = None) -> None:
        """Raises EngineError if the draft was not made for the vocabulary."""
        self._model = OnnxModel(path, threads=threads or default_threads())
        self._map = TokenMap.of_file(self._model.file, vocabulary)
        self._cache = Cache(self._model, BESIDE)
        self._trunk: list[int] = []
        self._held: dict[Key, int] = {}  # -> the cell of its last token

    def stands(self, tokens: Sequence[int]) -> bool:
        """Is this the text on the trunk?"""
        return self._trunk == list(tokens)

    def plant(self, tokens: Sequence[int], wanted_from: int) -> Iterator[tuple[int, Logits]]:
        """Begin with a new trunk. Yields (index, logits after the token there) for indices from `wanted_from` on."""
        self._trunk, self._held = list(tokens), {}
        self._cache.rearrange(np.zeros(0, np.intp), len(tokens) + BESIDE)
        for start in range(0, len(tokens), BATCH):
            part = range(start, min(start + BATCH, len(tokens)))
            rows, seen = [self._map.row(tokens[i]) for i in part], [np.arange(i + 1) for i in part]
            logits = self._cache.step(rows, part, part, seen, [i >= wanted_from for i in part])
            for i, row in zip((i for i in part if i >= wanted_from), logits, strict=True):
                yield i, self._map.to_target(row)

    def run(self, paths: Sequence[Sequence[int]]) -> list[Logits]:
        """Logits after each of `paths`, whole sequences of tokens that leave the trunk somewhere."""
        out: list[Logits] = []
        for start in range(0, len(paths), GROUP):
            out.extend(self._run(paths[start : start + GROUP]))
        return out

    def close(self) -> None:
        del self._cache, self._model

    def _run(self, paths: Sequence[Sequence[int]]) -> list[Logits]:
        forks = [min(common_prefix(self._trunk, path), len(path) - 1) for path in paths]
        if len(self._held) + sum(len(p) - f for p, f in zip(paths, forks, strict=True)) > BESIDE:
            self._held = {}
        rows: dict[Key, int] = {}  # in the order of the batch
        ends = [self._lay(path, fork, rows) for path, fork in zip(paths, forks, strict=True)]
        if len(self._held) > BESIDE:
            self._held = {}
            raise EngineError(f"paths of more than {BESIDE} tokens beside the text do not fit")
        wanted = set(ends)
        logits = self._cache.step(
            [self._map.row(key[-1]) for key in rows],
            [key[0] + len(key) - 2 for key in rows],
            list(rows.values()),
            [self._seen(key) for key in rows],
            [key in wanted for key in rows],
        )
        found = dict(zip((key for key in rows if key in wanted), logits, strict=True))
        return [self._map.to_target(found[key]).copy() for key in ends]

    def _lay(self, path: Sequence[int], fork: int, rows: dict[Key, int]) -> Key:
        """Add to `rows` what of a path has no cell yet, and its last token in any case, whose logits are not kept."""
        for end in range(fork + 1, len(path) + 1):
            key = (fork, *path[fork:end])
            if key not in self._held:
                self._held[key] = rows[key] = len(self._trunk) + len(self._held)
        rows.setdefault(key, self._held[key])
        return key

    def _seen(self, key: Key) -> npt.NDArray[np.intp]:
        """The trunk up to where the path leaves it, then the path's own cells."""
        own = [self._held[key[: n + 1]] for n in range(1, len(key))]
        return np.append(np.arange(key[0]), own).astype(np.intp)
