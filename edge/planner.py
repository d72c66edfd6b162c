"""Which nodes to run next, which are worth their bytes, and when they have to leave.

Usefulness of a node = P(the target walks through it) x P(it arrives before the cloud has passed it). The first is the
product of the predictor's probabilities along the path. The second is worked out path by path: the edge knows what it
has sent and when that arrives, the cloud's pace, and when it last committed, so it can play the cloud's steps forward
on the assumption that the target follows just this path (no other case matters for the node). A node that would come
late may still lead to ones that do not; every further row on the way there costs `DETOUR` nats. Knows the tree, not the
network or the draft.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.protocol.cost import Patience
from paceline.protocol.tree import Tree

DETOUR = 0.4  # nats: a likely token is taken with about two chances in three
LEAST = 8e-3  # a node that is so useful is run
WORTH = 0.8  # and one that is by so much more useful than the share of a cloud's step that its row takes
RAREST = 1.3e-3  # nodes less useful than this are never run: where rows cost nothing, bytes still do
SENDING = 1.5  # times as useful must be what is sent
DRAWN = math.log(0.05)  # the same for draws: a family brings its q along, ten times the bytes of a node
PATIENT_NODES = 12  # nodes that the cloud is made to wait for, at most
PATIENT = 2.0  # by how much waiting must be better than stepping
LOW, HIGH = 0.03, 0.08  # tokens accepted a step below which drafting stops, above which it begins again
MEMORY, PAUSE, PROBE = 64, 160, 32  # steps
IDLE = 1.0  # seconds after which a row is run though none is useful: what a row costs may have changed
THRIFTY_IDLE = 10.0  # the same seconds where energy is short
MARGIN = 0.002  # seconds before a step of the cloud by which nodes should be there


@dataclass(frozen=True)
class Bar:
    """Log-usefulness below which nodes are not run, and not sent."""

    run: float
    send: float


def bar(more: float, step: float) -> Bar:
    """The bar where a further row takes `more` seconds and the cloud's step `step`, 0 while that is unknown.

    Measured: where a row takes a 600th of a step, six times as many nodes as at `LEAST` gain 4 to 13 % for twice the bytes;
    where it takes a 60th they gain nothing.
    """
    least = min(max(WORTH * more / step, RAREST), LEAST) if step > 0 else LEAST
    return Bar(math.log(least), math.log(SENDING * least))


@dataclass
class Horizon:
    """What is known of the cloud's clock, in the edge's: when its step at hand began and how long steps take.

    `arrives` says for every node that was sent when it reaches the cloud.
    """

    begun: float = 0.0
    step: float = 0.0
    patience: Patience = field(default_factory=Patience)
    alone: float = 1.0  # tokens of a step that begins without a node; more than one where the cloud drafts by itself
    missed: float = 0.0  # when it was left without a node
    since: int = 0  # tokens committed since
    arrives: dict[int, float] = field(default_factory=dict)

    def observe(self, made: float, seconds: float, tokens: int, held: int = 1) -> None:
        """The cloud committed `tokens` at time `made`, after a step of so many seconds, and may begin the next step."""
        self.begun = made
        if seconds > 0 and not held:
            self.alone += 0.1 * (tokens - self.alone)
        self.since += tokens
        if seconds > 0:
            self.step = 0.8 * self.step + 0.2 * seconds if 0 < self.step < 2 * seconds else seconds

    def sent(self, nodes: Iterable[int], arrival: float) -> None:
        for node in nodes:
            self.arrives[node] = arrival

    def keep(self, tree: Tree) -> None:
        """Forget nodes that are gone."""
        root, held = tree.root, bool(self.arrives)
        self.arrives = {n: t for n, t in self.arrives.items() if n > root and tree.state(n) == 0}
        if held and not self.arrives:
            self.missed, self.since = self.begun, 0

    def _alone(self, at: float) -> tuple[float, int]:
        """When the first step begins at or after `at` where the cloud holds nothing, and the tokens committed by then."""
        now, steps = self.begun, 0
        while (start := self.patience.start(now, self.missed, self.since + round(steps * self.alone))) < at:
            now, steps = start + self.step, steps + 1
        return start, round(steps * self.alone)

    def starts_between(self, early: float, late: float) -> bool:
        """Does a step of the cloud begin within (early, late]?"""
        if self.step <= 0 or late - early >= self.step:
            return True
        if not self.arrives:
            return self._alone(early)[0] <= late
        return math.floor((late - self.begun) / self.step) > math.floor((early - self.begun) / self.step)

    def passed(self, tree: Tree, node: int, at: float) -> int:
        """Tokens below the root committed when the first step begins at or after time `at`, if the target walks to `node`.

        `node` was sent, or is the root.
        """
        times: list[float] = []
        while node != tree.root:
            times.append(self.arrives[node])
            node = tree.parent(node)
        times.reverse()
        if not self.arrives:
            return self._alone(at)[1]
        now, depth, n = self.begun, 0, len(times)
        while now < at:
            while depth < n and times[depth] <= now:
                depth += 1
            depth += 1
            now += self.step
            if depth > n:  # nothing is held there
                return depth + round(self.alone * max(0, math.ceil((at - now) / self.step)))
        return depth


def patience(round_trip: float, row: float, acceptance: float, rate: float) -> Patience:
    """For how long the cloud had better wait for nodes where it holds none.

    `rate`: tokens a second made otherwise; `acceptance` a of a node whose parent was taken. After one plain step the k-th
    node adds a^(k+1) tokens for a row's time: k is the largest for which that beats the rate, and the wait may be as long
    as what all k add would otherwise take.
    """
    nodes = 0
    while nodes < PATIENT_NODES and acceptance ** (nodes + 2) > rate * row:
        nodes += 1
    gain = sum(acceptance ** (k + 1) for k in range(1, nodes + 1))
    return Patience(gain / (PATIENT * rate), round_trip + nodes * row + MARGIN, row) if nodes else Patience()


@dataclass
class Switch:
    """Is drafting worth its energy? Off where it gains less than `low`, on again where a probe gains more than `high`.

    The gain is what the cloud accepted, a step; it is averaged over about `MEMORY` steps. While off, every `PAUSE` steps
    there are `PROBE` steps of drafting. The gap between the two bounds keeps it from wavering.
    """

    on: bool = True
    gain: float = 1.0
    steps: int = 0  # since it was switched
    low: float = LOW
    high: float = HIGH

    def observe(self, accepted: int) -> None:
        """A step of the cloud has ended."""
        self.steps += 1
        if self.drafting:
            self.gain += (accepted - self.gain) / (MEMORY if self.on else self.steps % PAUSE + 1)
        if self.on and self.steps >= MEMORY and self.gain < self.low:
            self.on, self.steps, self.gain = False, PROBE, 0.0  # a pause comes first
        elif not self.on and self.drafting and self.steps % PAUSE == PROBE - 1:
            if self.gain > self.high:
                self.on, self.steps = True, 0
            else:
                self.gain = 0.0

    @property
    def drafting(self) -> bool:
        return self.on or self.steps % PAUSE < PROBE


def late(horizon: Horizon, tree: Tree, node: int, at: float, cache: dict[int, int]) -> int:
    """By how many tokens a child of `node` that arrives at time `at` comes too late; 0 or less: it is in time."""
    if horizon.step <= 0:
        return 0
    depth, held = tree.position(node) - tree.position(tree.root), node
    while held != tree.root and held not in horizon.arrives:
        held = tree.parent(held)
    if held not in cache:
        cache[held] = horizon.passed(tree, held, at)
    return cache[held] - depth


def usefulness(reach: float, late: int, catching_up: float) -> float:
    """Log-usefulness of a node that comes `late` tokens late where the edge gains `catching_up` tokens a row on the cloud."""
    if late <= 0:
        return reach
    return reach - DETOUR * late / catching_up if catching_up > 0 else -math.inf


def to_run(
    tree: Tree, horizon: Horizon, frontier: Iterable[int], at: float, step: float, count: int, least: float
) -> list[tuple[float, int]]:
    """(log-usefulness, node) of the `count` nodes whose children are most useful, best first; none less useful than `least`.

    The children reach the cloud at time `at`; a draft step takes `step` seconds.
    """
    gain = 1.0 - step / horizon.step if horizon.step > 0 else 1.0
    cache: dict[int, int] = {}
    best: list[tuple[float, int]] = []  # a heap, the worst first
    for reach, node in sorted(((tree.reach(n), n) for n in frontier), reverse=True):
        beaten = best[0][0] if len(best) == count else least
        if reach <= beaten:
            break
        useful = usefulness(reach, late(horizon, tree, node, at, cache), gain)
        if useful > beaten:
            heapq.heappushpop(best, (useful, node)) if len(best) == count else heapq.heappush(best, (useful, node))
    return sorted(best, reverse=True)


def to_send(tree: Tree, horizon: Horizon, nodes: Sequence[int], at: float, least: float) -> list[int]:
    """Those of `nodes` that are at least so useful if they arrive at time `at`, likeliest first: parents before children."""
    cache: dict[int, int] = {}
    useful = []
    for n in nodes:
        reach = tree.reach(n)
        if reach > least and usefulness(reach, late(horizon, tree, tree.parent(n), at, cache), 1.0) > least:
            useful.append((-reach, n))
    return [n for _, n in sorted(useful)]
