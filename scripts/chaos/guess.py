"""A draft for the toy target: the target's own logits, disturbed, so that it is right about as often as a real one."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from paceline.cloud.engines.toy import ToyEngine
from paceline.edge.candidates import candidates
from paceline.edge.draft import Extended, Row


@dataclass
class _Text:
    tokens: list[int]
    nodes: dict[int, list[int]] = field(default_factory=dict)  # node that was run -> its whole sequence


class GuessingDraft:
    """`noise` is the standard deviation of what is added to the logits; 0 is always right."""

    def __init__(self, target: ToyEngine, noise: float = 2.0) -> None:
        self.name, self.vocabulary = "guess", target.vocabulary
        self.step_cost: Sequence[tuple[int, float]] = [(1, 0.02), (2, 0.022), (8, 0.034)]
        self._target, self._noise = target, noise
        self._texts: dict[int, _Text] = {}
        self._opened = 0

    def open(self, prompt: Sequence[int]) -> int:
        self._opened += 1
        self._texts[self._opened] = _Text([*prompt])
        return self._opened

    def commit(self, handle: int, tokens: Sequence[int], walked: Sequence[int], live: Collection[int]) -> None:
        text = self._texts[handle]
        text.tokens.extend(tokens)
        text.nodes = {n: sequence for n, sequence in text.nodes.items() if n in live}

    def extend(self, rows: Sequence[Row]) -> Extended:
        found = []
        for row in rows:
            text = self._texts[row.handle]
            sequence = [*text.tokens] if row.parent < 0 else [*text.nodes[row.parent], row.token]
            text.nodes[row.node] = sequence
            rng = np.random.default_rng([9, *(t + 1 for t in sequence[-5:])])
            logits = self._target.logits(sequence) + self._noise * rng.standard_normal(self.vocabulary.size)
            found.append(candidates(logits.astype(np.float32), row.position + 1, row.choice))
        return Extended(found, len(rows), 0.0)

    def close(self, handle: int) -> None:
        del self._texts[handle]
