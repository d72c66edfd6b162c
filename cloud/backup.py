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

from paceline.protocol.cloud_session import CloudSession
from paceline.protocol.followers import Followers
from paceline.protocol.sampling import History, Sampling
from paceline.protocol.tree import Tree

LONGEST = 16  # tokens drafted for a step, at most
DECAY = 0.98
SUFFIX, SHORTEST = 8, 2  # tokens of the text's end that are looked for in what came before
LEADS = (0.5, 0.2, 0.1)  # chances of what followed a token elsewhere, the nearest place first
GOES_ON = 0.6  # chance that what then followed there follows here too
FAINT = 0.01  # what is reached less often is not offered again
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
    """Looks the end of the text up in what came before it; costs nothing worth counting."""

    seconds = 0.0

    def follow(self, tokens: Sequence[int], sampling: Sampling, history: History | None) -> tuple[int, float] | None:
        text = array("i", tokens)
        data, size = text.tobytes(), text.itemsize
        for length in range(min(SUFFIX, len(text) - 1), SHORTEST - 1, -1):
            end, before = data[-length * size :], len(data) - size  # something has to follow
            while (at := data.rfind(end, 0, before)) >= 0:
                if at % size == 0:
                    return text[at // size + length], REPEAT + (1 - REPEAT) * (length - SHORTEST) / SUFFIX
                before = at + len(end) - 1
        return None


@dataclass(frozen=True)
class Grown:
    """A chain that a top-up added: its nodes, and for each the chance it gave it; `parent` is what it hangs on."""

    top_up: "TopUp"
    parent: int
    nodes: tuple[int, ...]
    chances: tuple[float, ...]

    def learn(self, root: int, verified: Collection[int], walked: Collection[int]) -> None:
        """What became of it: the target stood at `root`, walked these of the nodes that were verified."""
        if self.parent == root or self.parent in walked:  # else nobody asked it
            asked = [(n in walked, c) for n, c in zip(self.nodes, self.chances, strict=True) if n in verified]
            self.top_up.learn([taken for taken, _ in asked], [chance for _, chance in asked])


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
    lead: int = 0  # of several ideas of what comes next, which one to follow


class TopUp:
    """Grows a session's tree with a backup before a step. `length`: tokens to draft for a step; 0: as many as pay.

    `look` and `put` touch the session, `draft` does not: it may run on another thread meanwhile.
    """

    def __init__(self, backup: Backup, length: int = 0) -> None:
        self.backup, self.length = backup, length
        # of its tokens, decayed: how many were asked about, how many taken, how many it had promised
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

    def look(self, session: CloudSession, width: int) -> list[Stub]:
        """Where to go on: after the likeliest chain, and where that costs nothing beside it from the text's end too."""
        tree = session.tree
        root, tip = tree.root, likeliest(tree)[-1]
        tips = (tip, root) if self.backup.seconds == 0 and tip != root else (tip,)
        gain = 1.0 + sum(math.exp(tree.reach(n)) for n in tree.best(width))
        text = session.sequence
        return [self._stub(session, text, gain, tip) for tip in tips]

    def _stub(self, session: CloudSession, text: Sequence[int], gain: float, tip: int) -> Stub:
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
        )

    def draft(self, stub: Stub, verify: float, stop_ids: Collection[int], sessions: int = 1) -> list[tuple[int, float]]:
        """(token, log-probability) of a chain that goes on from `stub`; a verification takes `verify` seconds.

        `sessions` are in the step: what is drafted for one keeps all of them waiting.
        """
        out: list[tuple[int, float]] = []
        text = array("i", stub.tokens)
        reach, gain, spent = stub.reach, stub.gain, 0.0
        while len(out) < stub.room and self._pays(len(out), reach, sessions * gain, spent + verify):
            history = stub.history.after([token for token, _ in out]) if stub.history is not None else None
            found = self.backup.follow(text, stub.sampling, history)
            spent += self.backup.seconds
            if found is None or found[0] in stop_ids:
                break
            chance = min(max(self.trust * found[1], 1e-4), 0.999)
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
        return Grown(self, parent, tuple(nodes), tuple(math.exp(c) for _, c in drafted[at:])) if nodes else None

    def _pays(self, drafted: int, reach: float, gain: float, seconds: float) -> bool:
        if self.length:
            return drafted < self.length
        return drafted < LONGEST and reach * self.acceptance * seconds > gain * self.backup.seconds


class Recycling(TopUp):
    """Offers what the edge drafted elsewhere, where the target left it: after the same token, nearest to its place first.

    It costs nothing, and stands in for nodes that are on their way. The edge's drafts are all it knows ("token recycling",
    arXiv 2408.08696, keeps such a table for a draft model's candidates).
    """

    seconds = 0.0

    def __init__(self) -> None:
        super().__init__(self)
        self._followers, self._length = Followers(), 0  # of the session at hand: its text's length, too

    def look(self, session: CloudSession, width: int) -> list[Stub]:
        """At the end of the likeliest chain, one stub for each idea that may be reached."""
        tree, text = session.tree, session.committed
        if not text or not session.intake.followers:
            return []
        *_, tip = chain = likeliest(tree)
        reach = math.exp(tree.reach(tip))
        if self.trust * reach * LEADS[0] < FAINT:
            return []
        self._followers, self._length = session.intake.followers, len(text)
        path = (text[-1], *(tree.token(n) for n in chain[1:]))
        room = session.max_tokens - len(text) - len(path)
        ideas = zip(LEADS, self._likely(path), strict=False)
        return [
            Stub(path, session.sampling, None, tip, reach, 1.0, room, lead)
            for lead, (chance, _) in enumerate(ideas)
            if self.trust * reach * chance >= FAINT
        ]

    def follow(self, tokens: Sequence[int], sampling: Sampling, history: History | None) -> tuple[int, float] | None:
        """`tokens`: the text's last one, and the path below it."""
        found = self._likely(tokens)
        return (found[0], GOES_ON) if found else None

    def draft(self, stub: Stub, verify: float, stop_ids: Collection[int], sessions: int = 1) -> list[tuple[int, float]]:
        found = self._likely(stub.tokens)
        if stub.room < 1 or stub.lead >= len(found) or found[stub.lead] in stop_ids:
            return []
        token, chance = found[stub.lead], max(self.trust * LEADS[stub.lead], 1e-4)
        reach = stub.reach * chance
        below = Stub((*stub.tokens, token), stub.sampling, None, stub.tip, reach, 1.0, stub.room - 1)
        return [(token, math.log(chance)), *super().draft(below, verify, stop_ids, sessions)]

    def _pays(self, drafted: int, reach: float, gain: float, seconds: float) -> bool:
        return drafted < LONGEST and reach >= FAINT

    def _likely(self, tokens: Sequence[int]) -> list[int]:
        return self._followers.likely(self._length + len(tokens) - 2, tokens[-1])


def likeliest(tree: Tree) -> list[int]:
    """The root, its likeliest child, that one's likeliest child, and so on."""
    chain = [tree.root]
    while below := tree.children(chain[-1]):
        chain.append(below[0])
    return chain
