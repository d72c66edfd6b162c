"""One generation on the device: the session's books, the draft's candidates, and what was measured on the way."""

import asyncio
import heapq
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from paceline.edge.draft import Candidates, Choice, Row
from paceline.edge.drawing import FAN_OUT, Drawing
from paceline.edge.planner import (
    DRAWN,
    IDLE,
    MARGIN,
    THRIFTY_IDLE,
    Bar,
    Horizon,
    Switch,
    bar,
    patience,
    to_run,
    to_send,
)
from paceline.edge.predictor import Predictor
from paceline.edge.rounds import DRAWN_PATIENCE, NEXT_CHANCE, PATIENCE, Rounds
from paceline.protocol.cost import Patience
from paceline.protocol.edge_session import Committed, EdgeSession
from paceline.protocol.errors import PacelineError
from paceline.protocol.guesses import Guesses
from paceline.protocol.messages import REJECTION, Message
from paceline.protocol.philox import Floats
from paceline.protocol.tree import State

ENOUGH = 0.98  # candidates of a row become nodes until they hold the target's choice with this probability
STREAMED = 2.5  # tokens a step to reckon with before any were seen
REPEATED = 12  # tokens of a repeat that join the tree at once
SURE = 3  # tokens of agreement that a repeat needs beside the draft's nodes
GUESSED = 32  # places from which guesses go on where nothing was drafted
NODES_LEFT = 64  # room in the tree below which nothing more is drafted


@dataclass
class Figures:
    """What one generation did; times in seconds since it was asked for."""

    steps: int = 0
    hits: int = 0  # steps that began with at least one node held
    accepted: int = 0
    drafted: int = 0  # nodes sent
    stale: int = 0
    rows: int = 0  # rows the draft ran
    offered: int = 0  # steps whose last token fell where the draft had candidates
    matched: int = 0  # of those, how often it was among them
    first_token: float | None = None
    last_token: float = 0.0
    step_seconds: float = 0.0


@dataclass(eq=False)
class Generation:
    """A generation of `agent`; see there for who calls what. `live_limit` is how many nodes the cloud holds for a session."""

    session: EdgeSession
    predictor: Predictor
    begun: float
    handle: int | None = None  # in the draft; None: nothing is drafted for this one
    live_limit: int = 1024
    events: "asyncio.Queue[Committed | PacelineError | None]" = field(default_factory=asyncio.Queue)
    figures: Figures = field(default_factory=Figures)
    horizon: Horizon = field(default_factory=Horizon)
    one_way: Callable[[], float] = lambda: 0.0  # seconds that a message takes to the cloud
    row_seconds: Callable[[], float] = lambda: 0.0  # seconds of a draft step over one row
    more_seconds: Callable[[], float] = lambda: math.inf  # seconds that a further row adds to it
    rounds: Rounds | None = None
    fan_out: int = 8  # candidates of a row that become nodes, at most
    thrift: float = 0.0  # chance to become text that a row must have to be run; 0: any that helps
    random: np.random.Generator = field(default_factory=np.random.default_rng)  # for draws, and nothing else
    rate: float = 0.0  # tokens a second that the agent has made lately
    guesses: Guesses | None = None
    switch: Switch = field(default_factory=Switch)
    ran_at: float = 0.0  # when a row was last run
    frontier: set[int] = field(default_factory=set)
    found: dict[int, Candidates] = field(default_factory=dict)  # by node that was run
    unsent: set[int] = field(default_factory=set)
    in_flight: frozenset[int] = frozenset()
    acknowledged: int = 0
    retries: int = 0
    left: bool = False  # nobody waits for its events any more
    _last_root: int = 0

    def __post_init__(self) -> None:
        self._last_root = self.session.tree.root
        self.frontier.add(self._last_root)
        if self.thrift:
            self.switch = Switch(low=self.thrift, high=1.5 * self.thrift)

    def prepare(self, waits: bool, now: float) -> None:
        """Before the session is opened: how long shall the cloud wait for nodes where it holds none?"""
        most = DRAWN_PATIENCE if self.draws else PATIENCE
        found = Patience(most, most) if self.rounds is not None else Patience()
        if waits and self.rounds is None and self.horizon.step > 0:
            rate = self.rate or STREAMED / self.horizon.step
            found = patience(2 * self.one_way(), self.row_seconds(), NEXT_CHANCE, rate)
        self.session.patience = self.horizon.patience = found
        self.horizon.begun = self.horizon.missed = now + self.one_way()
        self.horizon.since = 0

    @property
    def draws(self) -> bool:
        """Whether candidates are drawn at random; a greedy target needs no draws."""
        return self.session.rule == REJECTION and self.seeded

    @property
    def seeded(self) -> bool:
        return not self.session.sampling.greedy

    # ---- what the cloud says

    def committed(self, event: Committed, now: float) -> None:
        """The text grew: learn from it and move on to what is left of the tree."""
        f, commit = self.figures, event.commit
        if f.first_token is None:
            f.first_token = now - self.begun
        f.last_token = now - self.begun
        self.horizon.observe(now - self.one_way(), commit.step, len(event.tokens), commit.held)
        if commit.step:
            f.steps, f.hits = f.steps + 1, f.hits + (commit.held > 0)
            f.accepted, f.stale = f.accepted + commit.accepted, f.stale + commit.stale
            f.step_seconds += commit.step
            self.switch.observe(commit.accepted if commit.held else 0)  # else it was the cloud's own
        if self.rounds is not None:
            self.rounds.sent = False
        self._learn(event)
        if self.guesses is not None:
            self.guesses.extend(event.tokens)
        tree = self.session.tree
        alive = {n for n in self.frontier if tree.state(n) is State.LIVE}
        if tree.root not in self.found:
            alive.add(tree.root)
        self.frontier = alive
        self.unsent = {n for n in self.unsent if tree.state(n) is State.LIVE and n != tree.root}
        self.found = {n: c for n, c in self.found.items() if tree.state(n) is State.LIVE}
        self.horizon.keep(tree)
        if self.guesses is not None and tree.root not in self.found:  # where rows are dear, none may ever be run
            self._guess(tree.root, self.guesses)

    def _learn(self, event: Committed) -> None:
        """Compare what the draft offered along the committed path with what the target took."""
        node: int | None = self._last_root
        for token, walked in zip(event.tokens, [*event.walked, *[None] * len(event.tokens)], strict=False):
            found = self.found.get(node) if node is not None else None
            if found is not None:
                self.predictor.learn(found, token, seeded=self.seeded)
            node = walked
        last = [self._last_root, *event.walked][len(event.tokens) - 1 :]  # where the target chose by itself
        if last and last[0] in self.found:
            self.figures.offered, self.figures.matched = self.figures.offered + 1, self.figures.matched + len(last) - 1
        self._last_root = self.session.tree.root

    # ---- what the draft says

    @property
    def bar(self) -> Bar:
        """How useful a node must be to be run, and to be sent."""
        return bar(self.more_seconds(), self.horizon.step)

    def rows(self, count: int, now: float) -> list[tuple[float, int]]:
        """(log-usefulness, node) of the nodes to run next, best first."""
        if len(self.session.tree) + NODES_LEFT > self.live_limit:
            return []
        if self.rounds is not None:
            return [(0.0, node) for node in self._round_rows(self.rounds)]
        if not self.switch.drafting or not self.frontier:
            return []
        tree, step = self.session.tree, self.row_seconds()
        frontier: Collection[int] = self.frontier
        if self.thrift:
            frontier = [n for n in frontier if tree.reach(n) >= math.log(self.thrift)]
        least = self.bar.run
        found = to_run(tree, self.horizon, frontier, now + step + self.one_way(), step, count, least)
        if not found and now - self.ran_at > (THRIFTY_IDLE if self.thrift else IDLE):
            found = [(least, max(self.frontier, key=lambda n: (tree.reach(n), -n)))]
        if found:
            self.ran_at = now
        return found

    def _round_rows(self, rounds: Rounds) -> list[int]:
        overhead = 2 * self.one_way() + self.horizon.step
        return rounds.rows(self.session.tree, self.frontier, overhead, self.row_seconds())

    def row(self, node: int) -> Row:
        tree, session = self.session.tree, self.session
        assert self.handle is not None
        root = node == tree.root
        history = session.history
        if history is not None and not root:
            history = history.after([tree.token(n) for n in tree.path(node)])
        position = len(session.prompt) + tree.position(node)
        choice = Choice(session.sampling, history, self._drawing(node) if self.draws else None)
        return Row(self.handle, node, -1 if root else tree.parent(node), tree.token(node), position, choice)

    def _drawing(self, node: int) -> Drawing:
        if self.rounds is not None:
            return self.rounds.drawing(self.session.tree, node, self.random)
        return Drawing(self.random, min(self.fan_out, FAN_OUT))

    def ran(self, node: int, found: Candidates) -> None:
        """A row came back: its candidates become nodes, unless the target has gone another way meanwhile."""
        self.figures.rows += 1
        tree = self.session.tree
        if tree.state(node) is not State.LIVE:
            return
        self.frontier.discard(node)
        self.found[node] = found
        chances = self._chances(found)
        room = tree.position(node) + 2 < self.session.max_tokens  # the cloud chooses the last token by itself
        count = 1 + int(np.searchsorted(np.cumsum(chances), ENOUGH))
        if found.drawn and self.rounds is None:  # of a family all are sent, so it holds none that is not worth it
            count = min(count, 1 + int((tree.reach(node) + np.log(chances[1:]) > DRAWN).sum()))
        children: list[int] = []
        for token, chance in zip(found.tokens[: min(count, self.fan_out)], chances, strict=False) if room else ():
            child = tree.child(node, int(token))  # a repeat may have offered it before
            if child is None:
                child = tree.add(node, int(token), math.log(chance))
                self.unsent.add(child)
            elif tree.weight(child) - tree.weight(node) < math.log(chance):
                tree.reweigh(child, math.log(chance))
            children.append(child)
            if int(token) not in self.session.stop_ids:
                self.frontier.add(child)
        if found.drawn and children:
            self.session.drew(children[: found.drawn], found.support, found.counts)
        if self.guesses is not None:
            self._repeat(node, self.guesses)

    def _chances(self, found: Candidates) -> Floats:
        """Of candidates, how likely each is taken. Those of draws are their own alone: guesses depend on what was drawn."""
        chances = self.predictor.probabilities(found, seeded=self.seeded)
        if not found.drawn:
            return chances
        draws = replace(found, tokens=found.tokens[: found.drawn], confidence=found.confidence[: found.drawn])
        own = self.predictor.probabilities(draws, seeded=self.seeded)
        return np.minimum.accumulate(np.concatenate((own, chances[found.drawn :])))  # earlier ones go first

    def _repeat(self, node: int, guesses: Guesses) -> None:
        """Where the text repeats itself after `node`, its next tokens join the tree without having been run."""
        tree = self.session.tree
        path, least = [tree.token(n) for n in tree.path(node)], self.bar.send
        for _ in range(REPEATED):
            found = guesses.repeat(path, SURE)
            if found is None or tree.position(node) + 2 >= self.session.max_tokens:
                return
            token, chance = found
            child = tree.child(node, token)
            if child is None:
                if node in self.found:
                    return  # the draft knows better: it was run, and this is not among its candidates
                child = tree.add(node, token, math.log(chance))
                self.unsent.add(child)
            if token in self.session.stop_ids or tree.reach(child) < least:
                return
            node = child
            path.append(token)

    def _guess(self, node: int, guesses: Guesses) -> None:
        """What may follow `node`, where no row was run, joins the tree: the likeliest first, as far as it is worth its bytes."""
        tree, least = self.session.tree, self.bar.send
        heap = [(-tree.reach(node), node, [tree.token(n) for n in tree.path(node)])]
        for _ in range(GUESSED):
            if not heap:
                return
            minus, node, path = heapq.heappop(heap)
            if node in self.found or tree.position(node) + 2 >= self.session.max_tokens:
                continue  # the draft knows better; or the cloud chooses the last token by itself
            for token, chance in guesses.after(path):
                if math.log(chance) - minus < least:
                    break
                child = tree.child(node, token)
                if child is None:
                    child = tree.add(node, token, math.log(chance))
                    self.unsent.add(child)
                if token not in self.session.stop_ids:
                    heapq.heappush(heap, (-tree.reach(child), child, [*path, token]))

    def send(self, now: float, wait: float = 0.0) -> Sequence[Message]:
        """Messages with the nodes that have become worth their bytes.

        None yet, if a message sent `wait` seconds later reaches the cloud before its next step all the same. Draws leave at
        once: how long the next rows take may depend on them.
        """
        if self.rounds is not None:
            return self._send_round(self.rounds)
        arrival = now + self.one_way()
        if wait and not self.draws and not self.horizon.starts_between(arrival - MARGIN, arrival + wait + MARGIN):
            return []
        tree = self.session.tree
        ready: dict[int, None] = {}
        least = DRAWN if self.draws else self.bar.send
        for node in to_send(tree, self.horizon, sorted(self.unsent), arrival, least):
            chain = tree.path(node)  # a late ancestor is sent for the sake of what hangs on it
            ready.update(dict.fromkeys(n for n in chain if n in self.unsent))
        return self._send(self.session.whole(ready), arrival)

    def _send(self, nodes: Collection[int], arrival: float) -> Sequence[Message]:
        self.unsent -= set(nodes)
        self.horizon.sent(nodes, arrival)
        self.figures.drafted += len(nodes)
        return self.session.send(nodes)

    def _send_round(self, rounds: Rounds) -> Sequence[Message]:
        """The whole chain, once it is long enough; an ack where there is none, for which the cloud would wait."""
        if rounds.sent or self._round_rows(rounds):
            return []
        rounds.sent = True
        chain = rounds.chain(self.session.tree)
        return self._send(chain, 0.0) if chain else [self.session.ack()]

    def reopened(self) -> None:
        """The cloud holds nothing of this tree: all of it is to be sent again."""
        tree = self.session.tree
        self.unsent = {n for n in tree.subtree(tree.root) if n != tree.root}
        self.horizon.arrives.clear()
        if self.rounds is not None:
            self.rounds.sent = False

    def placed(self) -> frozenset[int]:
        """Nodes that were run, or are being run, and are still wanted."""
        live = {n for n in self.in_flight if self.session.tree.state(n) is State.LIVE}
        return frozenset(self.found.keys() | live)


Report = Callable[[Generation], None]  # is told of a generation when it begins


def share(generations: Sequence[Generation], count: int, now: float) -> list[tuple[float, Generation, int]]:
    """(log-usefulness, generation, node): the most useful rows of all generations, best first."""
    rows = [(u, i, node) for i, g in enumerate(generations) for u, node in g.rows(count, now)]
    rows.sort(key=lambda r: (-r[0], r[1], r[2]))
    return [(u, generations[i], node) for u, i, node in rows[:count]]
