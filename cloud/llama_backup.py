"""A draft model beside the target, through llama.cpp: the backup that knows the language.

It is asked for one token after a sequence at a time, by sequences and not by sessions: a few are kept in one cache, and
a question goes on along the one that agrees with it furthest. A prompt is read a chunk a question, so that a long one
keeps nobody waiting; nothing is offered before it is read. Knows token ids, nothing of trees, sessions or sockets.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from paceline.cloud.backup import Follower, Whole
from paceline.kernels.llama import Context, Model
from paceline.kernels.threads import default_threads
from paceline.kernels.token_map import TokenMap
from paceline.protocol.candidates import likeliest
from paceline.protocol.cost import StepCost
from paceline.protocol.errors import EngineError
from paceline.protocol.sampling import History, Sampling
from paceline.protocol.tokens import common_prefix
from paceline.protocol.vocabulary import Vocabulary

CHUNK = 128  # tokens of a prompt read at a time
KEPT = 16  # sequences in the cache, at most
GUESSED = 24  # tokens at the end of a sequence that may have been guesses the target refused
CANDIDATES = 8  # among which the first one's chance is reckoned


class DraftBackup:
    """As `paceline.cloud.backup.Backup` says."""

    def __init__(
        self,
        path: str | Path,
        vocabulary: Vocabulary,
        *,
        context: int = 4096,
        threads: int | None = None,
        gpu_layers: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`vocabulary` is the target's; `context`: tokens in the cache. Raises EngineError if the draft is for another."""
        self._model = Model(path, gpu_layers=gpu_layers)
        self._map, self._clock = TokenMap.of(self._model, vocabulary), clock
        self._context = Context(self._model, context, KEPT, threads=threads or default_threads(), batch=CHUNK)
        self._held: dict[int, list[int]] = {}  # sequence id -> its tokens, the least lately used first
        self._cost = StepCost([(1, min(self._measured() for _ in range(3)))])

    @property
    def seconds(self) -> float:
        return self._cost(1)

    def begin(self, prompt: Sequence[int], sampling: Sampling, history: History | None) -> Follower:
        return Whole(self.follow, prompt, sampling, history)

    def follow(self, tokens: Sequence[int], sampling: Sampling, history: History | None) -> tuple[int, float] | None:
        sequence, shared = self._place(list(tokens))
        part, begin = tokens[shared : shared + CHUNK], self._clock()
        logits = self._decode(sequence, part, shared)
        if logits is None:
            return None
        if len(part) == 1:
            self._cost.learn(1, self._clock() - begin)
        self._held[sequence] = list(tokens[: shared + len(part)])
        if shared + len(part) < len(tokens):
            return None
        ids, confidence = likeliest(self._map.to_target(logits), sampling, len(tokens), history, CANDIDATES)
        return int(ids[0]), float(confidence[0])

    def shut(self) -> None:
        """Free the model; the backup is not used afterwards."""
        self._context.close()
        self._model.close()

    def _place(self, tokens: list[int]) -> tuple[int, int]:
        """A sequence id whose cache holds the first `shared` of `tokens` and nothing else; fewer than all of them."""
        best, shared = -1, 0
        for sequence, held in reversed(self._held.items()):
            sure = max(len(held) - GUESSED, 0)
            if sure and tokens[:sure] == held[:sure]:
                best, shared = sequence, sure + common_prefix(held[sure:], tokens[sure:])
                break
            if (common := common_prefix(held, tokens)) > shared:
                best, shared = sequence, common
        shared = min(shared, len(tokens) - 1)
        if best < 0 or shared < len(self._held[best]) - GUESSED:
            best = self._branch(best, shared)
        held = self._held.pop(best)[:shared]
        self._context.drop(best, shared)
        self._held[best] = held
        return best, shared

    def _branch(self, source: int, shared: int) -> int:
        """A new sequence that begins as `source` does."""
        free = next((s for s in range(KEPT) if s not in self._held), None)
        if free is None:
            free = next(s for s in self._held if s != source)
            self._forget(free)
        if shared:
            self._context.share(source, free, 0, shared)
            self._held[source] = self._held.pop(source)  # its cells are wanted
        self._held[free] = self._held[source][:shared] if shared else []
        return free

    def _decode(self, sequence: int, tokens: Sequence[int], position: int) -> npt.NDArray[np.float32] | None:
        """Logits [V] after the last of `tokens`; None: they have no room even when nothing else is kept."""
        n = len(tokens)
        rows, positions = [self._map.row(t) for t in tokens], range(position, position + n)
        while position + n <= self._context.cells:
            try:
                wanted = [i == n - 1 for i in range(n)]
                found: npt.NDArray[np.float32] = self._context.decode(rows, positions, [(sequence,)] * n, wanted)[0]
                return found
            except EngineError:
                other = next((s for s in self._held if s != sequence), None)
                if other is None:
                    raise
                self._forget(other)
        return None

    def _forget(self, sequence: int) -> None:
        self._context.drop(sequence)
        del self._held[sequence]

    def _measured(self) -> float:
        """Seconds of one row."""
        begin = self._clock()
        self._context.decode([0], [0], [(0,)], [True])
        self._context.clear()
        return self._clock() - begin
