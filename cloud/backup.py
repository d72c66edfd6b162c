"""What the verifier drafts by itself where the edge's tree holds too little: from the text's own repeats, or with a model.

A backup follows a path one token at a time. Its nodes join the session's tree beside the edge's; the edge never hears
of them, and the text cannot depend on them. How far to go is decided by rate: another token is drafted while it adds
more tokens a second than the step would make without it. With a draft model beside the target and no edge at all this
is classic speculative decoding in one place (`colo`).
"""

import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from paceline.protocol.cloud_session import CloudSession
from paceline.protocol.ngrams import RIGHT, SIZES, Ngrams
from paceline.protocol.sampling import History, Sampling

LONGEST = 16  # tokens drafted for a step, at most
DECAY = 0.98
SUFFIX, SHORTEST = 8, 2  # tokens of the text's end that are looked for in what came before
REPEAT = 0.6  # chance that a repeat goes on, before any was seen


class Backup(Protocol):
    """A drafter beside the target. Calls come from the engine's thread, or from the event loop where `seconds` is 0."""

    @property
    def seconds(self) -> float:
        """What one more token costs."""
        ...

    def follow(self, tokens: Sequence[int], sampling: Sampling, history: History | None) -> tuple[int, float] | None:
        """The token that is likeliest to come after `tokens` (prompt, text, path), and its probability; None: no idea."""
        ...


class Ngram:
    """Looks the end of the text up in what came before it, then in what the target is known to write; costs next to nothing."""

    seconds = 0.0

    def __init__(self, table: Ngrams | None = None) -> None:
        self._table = table

    def follow(self, tokens: Sequence[int], sampling: Sampling, history: History | None) -> tuple[int, float] | None:
        text = array("i", tokens)
        data, size = text.tobytes(), text.itemsize
        for length in range(min(SUFFIX, len(text) - 1), SHORTEST - 1, -1):
            end, before = data[-length * size :], len(data) - size  # something has to follow
            while (at := data.rfind(end, 0, before)) >= 0:
                if at % size == 0:
                    return text[at // size + length], REPEAT + (1 - REPEAT) * (length - SHORTEST) / SUFFIX
                before = at + len(end) - 1
        known = self._table.after(text[-SIZES[0] :]) if self._table is not None else []
        return (known[0][0], RIGHT * known[0][2]) if known else None


class Grown(msgspec.Struct, frozen=True):
    """A chain that was added here: its nodes, and for each the chance it was given; `parent` is what it hangs on."""

    record: "Record"
    parent: int
    nodes: tuple[int, ...]
    chances: tuple[float, ...]

    def learn(self, root: int, verified: Collection[int], walked: Collection[int]) -> None:
        """What became of it: the target stood at `root`, walked these of the nodes that were verified."""
        if self.parent == root or self.parent in walked:  # else nobody asked it
            asked = [(n in walked, c) for n, c in zip(self.nodes, self.chances, strict=True) if n in verified]
            self.record.learn([taken for taken, _ in asked], [chance for _, chance in asked])


@dataclass(frozen=True)
class Stub:
    """A path of a session's tree from which a backup goes on. `gain`: tokens the step is expected to make."""

    tokens: tuple[int, ...]  # prompt, text and path
    sampling: Sampling
    history: History | None
    tip: int
    reach: float  # probability that the target walks to the tip
    gain: float
    room: int
    least: float = 0.0  # what is reached less often would not go along


class Record:
    """How often the tokens that one source drafts are taken, lately, and how often it said they would be."""

    def __init__(self) -> None:
        # decayed: how many were asked about, how many taken, how many it had promised
        self._asked, self._taken, self._promised = 5.0, 4.0, 4.0

    @property
    def acceptance(self) -> float:
        """The chance that its next token is taken."""
        return self._taken / self._asked

    @property
    def trust(self) -> float:
        """How far its chances are good: 1 for one that is right as often as it says, or more often."""
        return min(self._taken / self._promised, 1.0)

    def learn(self, taken: Sequence[bool], chances: Sequence[float]) -> None:
        """Which of a chain's tokens were taken, and the chances given to them; those after a refused one were not asked."""
        asked = min(sum(taken) + 1, len(taken))
        self._taken = DECAY * self._taken + sum(taken)
        self._asked = DECAY * self._asked + asked
        self._promised = DECAY * self._promised + sum(chances[:asked])


class TopUp:
    """Grows a session's tree with a backup before a step. `length`: tokens to draft for a step; 0: as many as pay.

    `look` and `put` touch the session, `draft` does not: it may run on another thread meanwhile.
    """

    def __init__(self, backup: Backup, length: int = 0) -> None:
        self.backup, self.length, self.record = backup, length, Record()

    def look(self, session: CloudSession, width: int, least: float = 0.0) -> list[Stub]:
        """Where to go on: after the likeliest chain, and where that costs nothing beside it from the text's end too.

        least: a node that is reached less often will not be verified in this step, as far as is known.
        """
        tree = session.tree
        root, tip = tree.root, tree.tip()
        tips = (tip, root) if self.backup.seconds == 0 and tip != root else (tip,)
        gain = 1.0 + sum(map(math.exp, tree.reaches(tree.best(width))))
        text = session.sequence
        return [self._stub(session, text, gain, tip, least) for tip in tips]

    def _stub(self, session: CloudSession, text: Sequence[int], gain: float, tip: int, least: float) -> Stub:
        tree = session.tree
        path = [tree.token(n) for n in tree.path(tip)]
        history = session.history.after(path) if session.history is not None else None
        return Stub(
            (*text, *path),
            session.sampling,
            history,
            tip,
            math.exp(tree.reach(tip)),
            gain,
            session.max_tokens - len(session.committed) - 1 - len(path),
            least,
        )

    def draft(self, stub: Stub, verify: float, stop_ids: Collection[int], sessions: int = 1) -> list[tuple[int, float]]:
        """(token, log-probability) of a chain that goes on from `stub`; a verification takes `verify` seconds.

        `sessions` are in the step: what is drafted for one keeps all of them waiting.
        """
        out: list[tuple[int, float]] = []
        text = array("i", stub.tokens)
        reach, gain, spent = stub.reach, stub.gain, 0.0
        while (
            len(out) < stub.room and reach > stub.least and self._pays(len(out), reach, sessions * gain, spent + verify)
        ):
            history = stub.history.after([token for token, _ in out]) if stub.history is not None else None
            found = self.backup.follow(text, stub.sampling, history)
            spent += self.backup.seconds
            if found is None or found[0] in stop_ids:
                break
            chance = min(max(self.record.trust * found[1], 1e-4), 0.999)
            reach *= chance
            gain += reach
            out.append((found[0], math.log(chance)))
            text.append(found[0])
        return out

    def put(self, session: CloudSession, stub: Stub, drafted: Sequence[tuple[int, float]]) -> Grown | None:
        """Add the chain to the tree, to which the edge may have added meanwhile. Returns what is new of it."""
        tree, parent = session.tree, stub.tip
        at = 0
        while at < len(drafted) and (child := tree.child(parent, drafted[at][0])) is not None:
            parent, at = child, at + 1
        if any(child in session.intake.draws for child in tree.children(parent)):
            return None  # what was drawn there goes first
        nodes, tip = list[int](), parent
        for token, chance in drafted[at:]:
            nodes.append(tip := tree.add(tip, token, chance))
        return Grown(self.record, parent, tuple(nodes), tuple(math.exp(c) for _, c in drafted[at:])) if nodes else None

    def _pays(self, drafted: int, reach: float, gain: float, seconds: float) -> bool:
        if self.length:
            return drafted < self.length
        return drafted < LONGEST and reach * self.record.acceptance * seconds > gain * self.backup.seconds
