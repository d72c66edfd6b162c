"""A target small enough to reason about: logits from a hash of the last tokens, in float64, exact whatever the batch.

For tests of everything around an engine. It answers from the sequence it was given, never from the caller's books, so
wrong bookkeeping shows as wrong text.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from paceline.cloud.engine import Logits, Work, walk
from paceline.protocol.cloud_session import Walk
from paceline.protocol.errors import EngineError
from paceline.protocol.vocabulary import Vocabulary

ORDER = 3  # tokens that the next one depends on
ROWS = 8192  # rows that are kept; the toy vocabulary's are 1,885


class ToyEngine:
    masks = True  # its choice is made on the host, where a grammar can be laid over the logits
    rejects = True  # and where draws can be accepted or refused

    def __init__(self, vocabulary_size: int = 12, context: int = 4096, seed: int = 0, sharpness: float = 3.0) -> None:
        self.name = "toy"
        self.vocabulary = Vocabulary.of("toy", toy_tokens(vocabulary_size))
        self.context = context
        self.max_width = self.free_width = 64
        self.chunk = 256
        self.step_cost = [(1, 1e-4)]
        self._seed, self._sharpness = seed, sharpness
        self._sequences: dict[int, list[int]] = {}
        self._next = 0

    def open(self, tokens: Sequence[int]) -> int:
        self._next += 1
        self._sequences[self._next] = []
        return self._next

    def length(self, handle: int) -> int:
        return len(self._sequences[handle])

    def verify(self, batch: Sequence[Work]) -> list[Walk | EngineError | None]:
        return [self._verify(work) for work in batch]

    def close(self, handle: int) -> None:
        del self._sequences[handle]

    def logits(self, sequence: Sequence[int]) -> Logits:
        """Logits [V] after `sequence`: a pure function of its last ORDER tokens."""
        return _row(self._seed, self._sharpness, self.vocabulary.size, tuple(sequence[-ORDER:]))

    def _verify(self, work: Work) -> Walk | EngineError | None:
        sequence = self._sequences[work.handle]
        sequence.extend(work.tokens)
        if not work.choose:
            return None
        paths: list[list[int]] = []
        for parent, token in zip(work.plan.parents, work.plan.tokens, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else ()), token])
        result = walk(work, len(sequence), lambda i: self.logits(sequence + (paths[i] if i >= 0 else [])))
        if isinstance(result, Walk):
            sequence.extend(work.plan.tokens[i] for i in result.accepted)
        return result


@lru_cache(ROWS)
def _row(seed: int, sharpness: float, size: int, end: tuple[int, ...]) -> Logits:
    """Logits [size] after `end`. All engines of a process share them: each for itself would go on meeting new ends for hours."""
    rng = np.random.default_rng([seed, *(t + 1 for t in end)])
    logits = (rng.standard_normal(size) * sharpness).astype(np.float32)
    logits.flags.writeable = False
    return logits


def toy_tokens(size: int) -> list[str]:
    """Spellings of the toy vocabulary."""
    return [chr(ord("a") + i % 26) * (1 + i // 26) for i in range(size)]
