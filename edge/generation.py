"""One generation on the device: the session's books, the draft's candidates, and what was measured on the way."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from paceline.edge.draft import Candidates, Choice, Row
from paceline.edge.planner import Pace, to_run, to_send
from paceline.edge.predictor import Predictor
from paceline.protocol.edge_session import Committed, EdgeSession
from paceline.protocol.errors import PacelineError
from paceline.protocol.messages import Draft as DraftMessage
from paceline.protocol.tree import State

FAN_OUT = 4  # candidates of a row that become nodes
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
    first_token: float | None = None
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
    pace: Pace = field(default_factory=Pace)
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

    @property
    def seeded(self) -> bool:
        return not self.session.sampling.greedy

    # ---- what the cloud says

    def committed(self, event: Committed, now: float) -> None:
        """The text grew: learn from it and move on to what is left of the tree."""
        f, commit = self.figures, event.commit
        if f.first_token is None:
            f.first_token = now - self.begun
        self.pace.observe(now, len(event.tokens))
        if commit.step:
            f.steps, f.hits = f.steps + 1, f.hits + (commit.held > 0)
            f.accepted, f.stale = f.accepted + commit.accepted, f.stale + commit.stale
            f.step_seconds += commit.step
        self._learn(event)
        tree = self.session.tree
        alive = {n for n in self.frontier if tree.state(n) is State.LIVE}
        if tree.root not in self.found:
            alive.add(tree.root)
        self.frontier = alive
        self.unsent = {n for n in self.unsent if tree.state(n) is State.LIVE and n != tree.root}
        self.found = {n: c for n, c in self.found.items() if tree.state(n) is State.LIVE}

    def _learn(self, event: Committed) -> None:
        """Compare what the draft offered along the committed path with what the target took."""
        node: int | None = self._last_root
        for token, walked in zip(event.tokens, [*event.walked, *[None] * len(event.tokens)], strict=False):
            found = self.found.get(node) if node is not None else None
            if found is None:
                break
            self.predictor.learn(found, token, seeded=self.seeded)
            node = walked
        self._last_root = self.session.tree.root

    # ---- what the draft says

    def rows(self, count: int, ahead: float) -> list[tuple[float, int]]:
        """(log-usefulness, node) of the nodes to run next, best first."""
        if len(self.session.tree) + NODES_LEFT > self.live_limit:
            return []
        return to_run(self.session.tree, self.frontier, ahead, count)

    def row(self, node: int) -> Row:
        tree, session = self.session.tree, self.session
        assert self.handle is not None
        root = node == tree.root
        history = session.history
        if history is not None and not root:
            history = history.after([tree.token(n) for n in tree.path(node)])
        position = len(session.prompt) + tree.position(node)
        choice = Choice(session.sampling, history)
        return Row(self.handle, node, -1 if root else tree.parent(node), tree.token(node), position, choice)

    def ran(self, node: int, found: Candidates) -> None:
        """A row came back: its candidates become nodes, unless the target has gone another way meanwhile."""
        self.figures.rows += 1
        tree = self.session.tree
        if tree.state(node) is not State.LIVE:
            return
        self.frontier.discard(node)
        self.found[node] = found
        chances = np.log(self.predictor.probabilities(found, seeded=self.seeded))
        room = tree.position(node) + 2 < self.session.max_tokens  # the cloud chooses the last token by itself
        for token, chance in zip(found.tokens[:FAN_OUT], chances, strict=False) if room else ():
            child = tree.add(node, int(token), float(chance))
            self.unsent.add(child)
            if int(token) not in self.session.stop_ids:
                self.frontier.add(child)

    def send(self, ahead: float) -> list[DraftMessage]:
        """Messages with the nodes that have become worth their bytes."""
        ready: dict[int, None] = {}
        for node in to_send(self.session.tree, sorted(self.unsent), ahead):
            chain = self.session.tree.path(node)  # a late ancestor is sent for the sake of what hangs on it
            ready.update(dict.fromkeys(n for n in chain if n in self.unsent))
        self.unsent -= ready.keys()
        self.figures.drafted += len(ready)
        return self.session.send(ready)

    def reopened(self) -> None:
        """The cloud holds nothing of this tree: all of it is to be sent again."""
        tree = self.session.tree
        self.unsent = {n for n in tree.subtree(tree.root) if n != tree.root}

    def placed(self) -> frozenset[int]:
        """Nodes that were run, or are being run, and are still wanted."""
        live = {n for n in self.in_flight if self.session.tree.state(n) is State.LIVE}
        return frozenset(self.found.keys() | live)


def share(generations: Sequence[Generation], count: int, ahead: float) -> list[tuple[float, Generation, int]]:
    """(log-usefulness, generation, node): the most useful rows of all generations, best first."""
    rows = [(u, i, node) for i, g in enumerate(generations) for u, node in g.rows(count, ahead * g.pace.rate)]
    rows.sort(key=lambda r: (-r[0], r[1], r[2]))
    return [(u, generations[i], node) for u, i, node in rows[:count]]
