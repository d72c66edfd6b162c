"""What the verifier drafts by itself where the edge's tree holds too little: from the text's own repeats, or with a model.

A backup follows a path one token at a time, or has several ideas for a place. Its nodes join the session's tree beside those
of the edge, which never hears of them, and the text cannot depend on them. How far to go is decided by rate: another token is
drafted while it adds more tokens a second than the step would make without it. With a draft model beside the target and no
edge at all this is classic speculative decoding in one place (`colo`).
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol
from weakref import WeakKeyDictionary

import msgspec
from paceline.protocol.cloud_session import CloudSession
from paceline.protocol.guesses import Guesses
from paceline.protocol.ngrams import Ngrams, Trust
from paceline.protocol.odds import Odds
from paceline.protocol.sampling import History, Sampling

LONGEST = 16  # tokens drafted for a step, at most
BUSHY, FAINT = 40, 0.01  # the same of one that has several ideas for a place; what is reached less often is no idea
DECAY = 0.98
TRIAL = 100  # steps after which a thought that did not pay is tried again
LOOKED_AT = 8192  # last tokens of a prompt that are looked at for repeats: a long one takes its time


# The likeliest token after some (prompt, text, path), and its probability; None: no idea.
Follow = Callable[[Sequence[int], Sampling, History | None], tuple[int, float] | None]


class Follower(Protocol):
    """What a backup knows of one text."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The text grew by these, which the target chose."""
        ...

    def after(self, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        """What is likely to come after the text and then `path`, each with its probability; the likeliest first."""
        ...


class Backup(Protocol):
    """A drafter beside the target. What may take long, `after`, comes from the engine's thread unless `seconds` is 0."""

    @property
    def seconds(self) -> float:
        """What one more token costs. Where it is 0, there may be several ideas for a place."""
        ...

    def begin(self, prompt: Sequence[int], sampling: Sampling, history: History | None) -> Follower:
        """A text that begins after `prompt`. `history`, where the penalties need it, is kept up to date by its owner."""
        ...


class Ngram:
    """Looks the end of a text up in what came before it, and in what the target is known to write; costs next to nothing."""

    seconds = 0.0

    def __init__(self, table: Ngrams | None = None) -> None:
        self._table, self._trust = table, Trust()

    def begin(self, prompt: Sequence[int], sampling: Sampling, history: History | None) -> Follower:
        return Guesses(prompt[-LOOKED_AT:], self._table, self._trust)


class Whole:
    """A follower that asks for one token after the whole of its text at a time."""

    def __init__(self, follow: Follow, prompt: Sequence[int], sampling: Sampling, history: History | None) -> None:
        self._follow, self._tokens, self._sampling, self._history = follow, [*prompt], sampling, history

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def after(self, path: Sequence[int]) -> Sequence[tuple[int, float]]:
        history = self._history.after(path) if self._history is not None else None
        found = self._follow([*self._tokens, *path], self._sampling, history)
        return [found] if found is not None else []


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

    text: Follower
    path: tuple[int, ...]  # tokens from the end of the text to the tip
    tip: int
    reach: float  # probability that the target walks to the tip
    gain: float
    room: int
    least: float = 0.0  # what is reached less often would not go along


class Record:
    """How often the tokens that one source drafts are taken, lately, and how often it said they would be."""

    def __init__(self) -> None:
        # Those taken, of those that the target was asked about, and of those that were promised.
        self._asked, self._promised = Odds(0.8, 5.0, DECAY), Odds(1.0, 4.0, DECAY)
        self._won, self._thought, self._passed = 4.0, 0.0, 0  # tokens, seconds, times in a row that it was not asked

    @property
    def acceptance(self) -> float:
        """The chance that its next token is taken."""
        return self._asked.ratio

    @property
    def trust(self) -> float:
        """How far its chances are good: 1 for one that is right as often as it says, or more often."""
        return min(self._promised.ratio, 1.0)

    def learn(self, taken: Sequence[bool], chances: Sequence[float]) -> None:
        """Which of the tokens that the target was asked about were taken, and the chances given to them."""
        right = sum(taken)
        self._asked.learn(right, len(taken))
        self._promised.learn(right, sum(chances))
        self._won += right

    def thought(self, seconds: float) -> None:
        """It was thought about for so long, and everybody waited."""
        self._won, self._thought, self._passed = DECAY * self._won, DECAY * self._thought + seconds, 0

    def pays(self, rate: float) -> bool:
        """Does it bring more tokens a second than the `rate` at which all who wait for it get theirs? Tried now and then."""
        if self._won >= rate * self._thought or self._passed >= TRIAL:
            return True
        self._passed += 1
        return False


class TopUp:
    """Grows a session's tree with a backup before a step. `length`: tokens to draft for a step; 0: as many as pay.

    `look` and `put` touch the session, `draft` does not: it may run on another thread meanwhile.
    """

    def __init__(self, backup: Backup, length: int = 0) -> None:
        self.backup, self.length, self.record = backup, length, Record()
        self.free = backup.seconds == 0  # then it has several ideas for a place, and is asked on the event loop
        self._most = length or (BUSHY if self.free else LONGEST)
        # What it knows of each session's text, and how long that was.
        self._texts: WeakKeyDictionary[CloudSession, tuple[Follower, int]] = WeakKeyDictionary()

    def look(self, session: CloudSession, width: int, least: float = 0.0) -> list[Stub]:
        """Where to go on: after the likeliest chain, and where that costs nothing beside it from the text's end too.

        least: a node that is reached less often will not be verified in this step, as far as is known.
        """
        tree, text = session.tree, self._text(session)
        root, tip = tree.root, tree.tip()
        gain = 1.0
        if not self.free:  # else nobody asks whether it pays
            gain += sum(map(math.exp, tree.reaches(tree.likeliest(width))))
        room = session.max_tokens - len(session.committed) - 1
        stubs = []
        for node in (tip, root) if self.free and tip != root else (tip,):
            path = tuple(tree.tokens(tree.path(node)))
            stubs.append(Stub(text, path, node, math.exp(tree.reach(node)), gain, room - len(path), least))
        return stubs

    def _text(self, session: CloudSession) -> Follower:
        """What the backup knows of the session's text, all of it by now."""
        committed = session.committed
        if (found := self._texts.get(session)) is None:
            text, known = self.backup.begin(session.prompt, session.sampling, session.history), 0
        else:
            text, known = found
        if known < len(committed):
            text.extend(committed[known:])
        self._texts[session] = text, len(committed)
        return text

    def draft(self, stub: Stub, verify: float, stop_ids: Collection[int], sessions: int = 1) -> list[Drafted]:
        """What goes on from `stub`, parents first; a verification takes `verify` seconds.

        It is a chain, or a tree where the backup has several ideas for a place: then the likeliest place goes on next.
        `sessions` are in the step: what is drafted for one keeps all of them waiting.
        """
        out: list[Drafted] = []
        gain, spent, least = stub.gain, 0.0, max(stub.least, FAINT) if self.free else stub.least
        trust, seconds = self.record.trust, self.backup.seconds
        heap = [(-stub.reach, -1, stub.path)]  # minus the chance to come by, place, path to there
        while heap:
            minus, place, path = heappop(heap)
            reach = -minus
            if len(path) - len(stub.path) >= stub.room:
                continue
            if reach <= least or not self._pays(len(out), reach, sessions * gain, spent + verify):
                break
            spent += seconds
            for token, said in stub.text.after(path):
                chance = min(max(trust * said, 1e-4), 0.999)
                there = reach * chance
                if token in stop_ids or (there <= least and self.free):
                    continue
                if len(out) == self._most:
                    return out
                gain += there
                heappush(heap, (-there, len(out), (*path, token)))
                out.append((token, math.log(chance), place))
        return out

    def put(self, session: CloudSession, stub: Stub, drafted: Sequence[Drafted]) -> Grown | None:
        """Add it to the tree, to which the edge may have added meanwhile. Returns what is new of it."""
        tree = session.tree
        ids: list[int | None] = []
        new: list[tuple[int, int, float]] = []
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
