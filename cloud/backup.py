"""What the verifier drafts by itself where the edge's tree holds too little: from the text's own repeats, or with a model.

A backup follows a path one token at a time. Its nodes join the session's tree beside the edge's; the edge never hears
of them, and the text cannot depend on them. How far to go is decided by rate: another token is drafted while it adds
more tokens a second than the step would make without it. With a draft model beside the target and no edge at all this
is classic speculative decoding in one place (`colo`).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.protocol.cloud_session import CloudSession
from paceline.protocol.sampling import History, Sampling

LONGEST = 16  # tokens drafted for a step, at most
DECAY = 0.98
SUFFIX, SHORTEST = 8, 2  # tokens of the text's end that are looked for in what came before
REPEAT = 0.6  # chance that a repeat goes on, before any was seen


class Backup(Protocol):
    """A drafter beside the target. Calls come from the engine's thread."""

    @property
    def seconds(self) -> float:
        """What one more token costs."""
        ...

    def follow(self, tokens: Sequence[int], sampling: Sampling, history: History | None) -> tuple[int, float] | None:
        """The token that is likeliest to come after `tokens` (prompt, text, path), and its probability; None: no idea."""
        ...


class Repeats:
    """Looks the end of the text up in what came before it; costs nothing worth counting."""

    seconds = 0.0

    def follow(self, tokens: Sequence[int], sampling: Sampling, history: History | None) -> tuple[int, float] | None:
        for length in range(min(SUFFIX, len(tokens) - 1), SHORTEST - 1, -1):
            end = list(tokens[-length:])
            for i in range(len(tokens) - length - 1, -1, -1):
                if tokens[i] == end[0] and list(tokens[i : i + length]) == end:
                    return tokens[i + length], REPEAT + (1 - REPEAT) * (length - SHORTEST) / SUFFIX
        return None


@dataclass(frozen=True)
class Stub:
    """The likeliest chain of a session's tree, from which a backup goes on. `gain`: tokens the step is expected to make."""

    tokens: tuple[int, ...]  # prompt, text and chain
    sampling: Sampling
    history: History | None
    tip: int
    reach: float  # probability that the target walks to the tip
    gain: float
    room: int


class TopUp:
    """Grows a session's tree with a backup before a step. `length`: tokens to draft for a step; 0: as many as pay.

    `look` and `put` touch the session, `draft` does not: it may run on another thread meanwhile.
    """

    def __init__(self, backup: Backup, length: int = 0) -> None:
        self.backup, self.length = backup, length
        self._taken, self._drafted = 4.0, 5.0  # of its tokens, decayed: the chance that the next one is taken

    @property
    def acceptance(self) -> float:
        return self._taken / self._drafted

    def learn(self, taken: int, drafted: int) -> None:
        self._taken = DECAY * self._taken + taken
        self._drafted = DECAY * self._drafted + min(drafted, taken + 1)  # those after a refused one were not asked

    def look(self, session: CloudSession, width: int) -> Stub:
        tree = session.tree
        tip, path = tree.root, list[int]()
        while below := tree.children(tip):
            tip = max(below, key=lambda c: (tree.weight(c), -c))
            path.append(tree.token(tip))
        history = session.history.after(path) if session.history is not None else None
        return Stub(
            (*session.sequence, *path),
            session.sampling,
            history,
            tip,
            math.exp(tree.reach(tip)),
            1.0 + sum(math.exp(tree.reach(n)) for n in tree.best(width)),
            session.max_tokens - len(session.committed) - 1 - len(path),
        )

    def draft(self, stub: Stub, verify: float, stop_ids: Collection[int]) -> list[tuple[int, float]]:
        """(token, log-probability) of a chain that goes on from `stub`; a verification takes `verify` seconds."""
        out: list[tuple[int, float]] = []
        reach, gain, spent = stub.reach, stub.gain, 0.0
        while len(out) < stub.room and self._pays(len(out), reach, gain, spent + verify):
            tokens = [token for token, _ in out]
            history = stub.history.after(tokens) if stub.history is not None else None
            found = self.backup.follow([*stub.tokens, *tokens], stub.sampling, history)
            spent += self.backup.seconds
            if found is None or found[0] in stop_ids:
                break
            chance = min(max(found[1], 1e-4), 0.999)
            reach *= chance
            gain += reach
            out.append((found[0], math.log(chance)))
        return out

    def put(self, session: CloudSession, stub: Stub, drafted: Sequence[tuple[int, float]]) -> list[int]:
        """Add the chain to the tree, to which the edge may have added meanwhile. Returns the nodes that are new."""
        tree, tip, added = session.tree, stub.tip, list[int]()
        for token, chance in drafted:
            child = tree.child(tip, token)
            if child is None:
                if any(c in session.intake.draws for c in tree.children(tip)):
                    break  # what was drawn there goes first
                child = tree.add(tip, token, chance)
                added.append(child)
            tip = child
        return added

    def _pays(self, drafted: int, reach: float, gain: float, seconds: float) -> bool:
        if self.length:
            return drafted < self.length
        return drafted < LONGEST and reach * self.acceptance * seconds > gain * self.backup.seconds
