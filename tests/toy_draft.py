"""A draft small enough to reason about: the toy target's own logits, disturbed by noise of a chosen size.

It is strict about its caller: a row whose parent it was never given, or that stands at the wrong position, fails.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from paceline.cloud.engines.toy import ToyEngine
from paceline.edge.candidates import candidates
from paceline.edge.draft import Extended, Row
from paceline.protocol.errors import EngineError


@dataclass
class Text:
    tokens: list[int]
    nodes: dict[int, list[int]] = field(default_factory=dict)  # node that was run -> its whole sequence


class ToyDraft:
    """`noise` 0 guesses every token; large ones guess like anybody. `room` is how many generations fit."""

    name = "toy draft"

    def __init__(self, target: ToyEngine, noise: float = 0.0, *, room: int = 8) -> None:
        self.vocabulary = target.vocabulary
        self.step_cost = [(1, 0.005), (2, 0.0055), (8, 0.0085)]
        self.open_handles: dict[int, Text] = {}
        self.opened = 0
        self.fail_next = 0  # so many calls of `extend` find no room
        self._target, self._noise, self._room = target, noise, room

    def open(self, prompt: Sequence[int]) -> int:
        if len(self.open_handles) >= self._room:
            raise EngineError("the draft has no room for another generation")
        self.opened += 1
        self.open_handles[self.opened] = Text([*prompt])
        return self.opened

    def commit(self, handle: int, tokens: Sequence[int], walked: Sequence[int], live: Collection[int]) -> None:
        text = self.open_handles[handle]
        text.tokens.extend(tokens)
        text.nodes = {n: sequence for n, sequence in text.nodes.items() if n in live}
        for sequence in text.nodes.values():
            assert sequence[: len(text.tokens)] == text.tokens, "a node is said to live, but the text went another way"

    def extend(self, rows: Sequence[Row]) -> Extended:
        if self.fail_next:
            self.fail_next -= 1
            raise EngineError("full")
        found = []
        for row in rows:
            text = self.open_handles[row.handle]
            sequence = [*text.tokens] if row.parent < 0 else [*text.nodes[row.parent], row.token]
            assert (sequence[-1], len(sequence) - 1) == (row.token, row.position), "the books do not agree"
            text.nodes[row.node] = sequence
            rng = np.random.default_rng([9, *(t + 1 for t in sequence[-5:])])
            logits = self._target.logits(sequence) + self._noise * rng.standard_normal(self.vocabulary.size)
            found.append(candidates(logits.astype(np.float32), row.position + 1, row.choice))
        return Extended(found, len(rows), 0.0)

    def close(self, handle: int) -> None:
        del self.open_handles[handle]
