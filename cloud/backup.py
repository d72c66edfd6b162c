"""What the verifier drafts by itself where the edge's tree holds too little: from the text's own repeats, or with a model.

A backup follows a path one token at a time, or has several ideas for a place. Its nodes join the session's tree beside those
of the edge, which never hears of them, and the text cannot depend on them. How far to go is decided by rate: another token is
drafted while it adds more tokens a second than the step would make without it. With a draft model beside the target and no
edge at all this is classic speculative decoding in one place (`colo`).
"""

import math
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

import msgspec
from paceline.protocol.cloud_session import CloudSession
from paceline.protocol.ngrams import RIGHT, Ngrams
from paceline.protocol.sampling import History, Sampling

LONGEST = 16  # tokens drafted for a step, at most
BUSHY, FAINT = 40, 0.01  # the same of one that has several ideas for a place; what is reached less often is no idea
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
        return next(iter(self.ideas(tokens)), None)

    def ideas(self, tokens: Sequence[int]) -> list[tuple[int, float]]:
        """All that may come after `tokens`, each with its chance: what the text repeats first, then what is known."""
        found = [repeat] if (repeat := _repeated(tokens)) is not None else []
        for token, _, share in self._table.after(tokens) if self._table is not None else ():
            if not found or token != found[0][0]:
                found.append((token, RIGHT * share))
        return found


def _repeated(tokens: Sequence[int]) -> tuple[int, float] | None:
    """What followed the longest end of `tokens` that was there before, and the chance that it follows again."""
    text = tokens if isinstance(tokens, array) else array("i", tokens)
    data, size = text.tobytes(), text.itemsize
    for length in range(min(SUFFIX, len(text) - 1), SHORTEST - 1, -1):
        end, before = data[-length * size :], len(data) - size  # something has to follow
        while (at := data.rfind(end, 0, before)) >= 0:
            if at % size == 0:
                return text[at // size + length], REPEAT + (1 - REPEAT) * (length - SHORTEST) / SUFFIX
            before = at + len(end) - 1
    return None


class Grown(msgspec.Struct, frozen=True):
    """Nodes that were added here, for each what it hangs on and the chance it was given."""

    record: "Record"
    parents: tuple[int, ...]
    nodes: tuple[int, ...]
    chances: tuple[float, ...]

    def learn(self, root: int, verified: Collection[int], walked: Collection[int]) -> None:
        """What became of them: the target stood at `root`, walked these of the nodes that were verified."""
        told = zip(self.parents, self.nodes, self.chances, strict=True)
        asked = [(n in walked, c) for p, n, c in told if n in verified and (p == root or p in walked)]
        if asked:
            self.record.learn([taken for taken, _ in asked], [chance for _, chance in asked])


# A token, its log-probability, and the place before it that it follows; -1: the stub's tip.
Drafted = tuple[int, float, int]


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
        """Which of the tokens that the target was asked about were taken, and the chances given to them."""
        self._taken = DECAY * self._taken + sum(taken)
        self._asked = DECAY * self._asked + len(taken)
        self._promised = DECAY * self._promised + sum(chances)


class TopUp:
    """Grows a session's tree with a backup before a step. `length`: tokens to draft for a step; 0: as many as pay.

    `look` and `put` touch the session, `draft` does not: it may run on another thread meanwhile.
    """

    def __init__(self, backup: Backup, length: int = 0) -> None:
        self.backup, self.length, self.record = backup, length, Record()
        self._ideas: Callable[[Sequence[int]], list[tuple[int, float]]] | None = getattr(backup, "ideas", None)
        self._most = length or (LONGEST if self._ideas is None else BUSHY)

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

    def draft(self, stub: Stub, verify: float, stop_ids: Collection[int], sessions: int = 1) -> list[Drafted]:
        """What goes on from `stub`, parents first; a verification takes `verify` seconds.

        It is a chain, or a tree where the backup has several ideas for a place: then the likeliest place goes on next.
        `sessions` are in the step: what is drafted for one keeps all of them waiting.
        """
        out = list[Drafted]()
        gain, spent, least = stub.gain, 0.0, stub.least if self._ideas is None else max(stub.least, FAINT)
        heap = [(-stub.reach, -1, array("i", stub.tokens))]  # minus the chance to come by, place, text up to there
        while heap:
            minus, place, tokens = heappop(heap)
            reach = -minus
            if len(tokens) - len(stub.tokens) >= stub.room:
                continue
            if reach <= least or not self._pays(len(out), reach, sessions * gain, spent + verify):
                break
            found = self._after(stub, tokens)
            spent += self.backup.seconds
            for token, said in found:
                chance = min(max(self.record.trust * said, 1e-4), 0.999)
                if token in stop_ids or (reach * chance <= least and self._ideas is not None):
                    continue
                if len(out) == self._most:
                    return out
                gain += reach * chance
                heappush(heap, (-reach * chance, len(out), tokens + array("i", (token,))))
                out.append((token, math.log(chance), place))
        return out

    def _after(self, stub: Stub, tokens: "array[int]") -> list[tuple[int, float]]:
        if self._ideas is not None:
            return self._ideas(tokens)
        history = stub.history.after(tokens[len(stub.tokens) :]) if stub.history is not None else None
        found = self.backup.follow(tokens, stub.sampling, history)
        return [found] if found is not None else []

    def put(self, session: CloudSession, stub: Stub, drafted: Sequence[Drafted]) -> Grown | None:
        """Add it to the tree, to which the edge may have added meanwhile. Returns what is new of it."""
        tree, ids, new = session.tree, list[int | None](), list[tuple[int, int, float]]()
        for token, chance, place in drafted:
            parent = stub.tip if place < 0 else ids[place]
            child = tree.child(parent, token) if parent is not None else None
            if parent is not None and child is None and not self._drawn(session, parent):
                child = tree.add(parent, token, chance)
                new.append((parent, child, math.exp(chance)))
            ids.append(child)
        if not new:
            return None
        parents, nodes, chances = zip(*new, strict=True)
        return Grown(self.record, parents, nodes, chances)

    @staticmethod
    def _drawn(session: CloudSession, parent: int) -> bool:
        """What was drawn there goes first."""
        return any(child in session.intake.draws for child in session.tree.children(parent))

    def _pays(self, drafted: int, reach: float, gain: float, seconds: float) -> bool:
        if drafted >= self._most:
            return False
        return bool(self.length) or reach * self.record.acceptance * seconds > gain * self.backup.seconds
