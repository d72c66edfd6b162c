"""Which drafted nodes a step takes along, of all its sessions: the likeliest first, as long as they pay for their rows.

One heap holds what may come next of each session: a node waits for its parent and for its likelier siblings, so what is not
taken is hardly looked at. Whether a node goes along depends on better ones alone, as drawn nodes need: the rate rises to one
peak and falls.

Where the likeliest chain that an edge has sent ends, what it drafted elsewhere goes on (see `recycling`). Those nodes are in
no tree: they are thought of when their turn has come, and forgotten after the step. Each of them goes on with the same chance,
so the one that was taken first goes on first: they wait in a queue.
"""

import math
from collections import deque
from collections.abc import Container, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from paceline.cloud.backup import LONGEST
from paceline.cloud.recycling import Recycling
from paceline.protocol.cloud_session import CloudSession, Plan
from paceline.protocol.cost import Floats
from paceline.protocol.tree import depth_first

NOWHERE = -1  # the id of a node that is in no tree
LEAD = 1 << 60  # no id: the first idea of what comes behind a chain's end; the others follow
NONE_LEFT = math.inf  # minus the log of what nothing counts
UNBROKEN = tuple(range(-1, 4095))  # parents of nodes that hang one on the other
OUTSIDE = (NOWHERE,) * LONGEST  # a chain's nodes

# Minus the log of what it counts, number of its part, id; no two have the same of these three. What follows is the kind's own.
Entry = tuple[Any, ...]


class Chain:
    """What may be offered again behind one node, that at the place `above` of its part: each token after the one before it."""

    __slots__ = ("above", "known", "taken")

    def __init__(self, above: int, known: Sequence[int]) -> None:
        """`known`: tokens; of them the first `taken` go along."""
        self.above, self.known, self.taken = above, known, len(known)

    @property
    def tokens(self) -> Sequence[int]:
        """Those that go along."""
        return self.known[: self.taken]


class Part:
    """What one session has of the step: nodes in the order in which they were taken, the likeliest first."""

    __slots__ = (
        "chains", "children", "counts", "deepest", "faintest", "first", "gain", "main", "nodes", "others", "parents",
        "position", "recycled", "root", "session", "token", "weight", "zero",
    )  # fmt: skip

    def __init__(
        self, session: CloudSession, counts: float = 0.0, least: float = -math.inf, others: Container[int] = ()
    ) -> None:
        """`counts`: log of what a sure node counts; `least`: log of the reach below which nothing is drafted here.

        `others`: nodes of the tree that the edge did not send.
        """
        self.session, self.counts, self.others = session, counts, others
        self.faintest = counts + least
        self.nodes: list[int] = []
        self.parents: list[int] = []  # places in these lists; -1: the root
        self.chains: list[Chain] = []  # what is offered again, the nearest place's first
        self.recycled: Sequence[Sequence[int]] = ()  # in the plan: the places of their nodes
        self.gain = 0.0  # what the edge's nodes count, together
        self.main = -1  # place of the last node on the likeliest chain
        self.deepest = session.deepest
        tree = session.tree
        self.root = root = tree.root
        self.first, self.token, self.position, self.weight, self.children = tree.columns()
        self.zero = counts - self.weight[root - self.first]  # log of what a node counts, less its weight

    def plan(self) -> Plan:
        """The plan with these nodes: depth first, the likeliest child first."""
        session, chains = self.session, self.chains
        nodes: tuple[int, ...] = ()
        tokens: tuple[int, ...] = ()
        parents: tuple[int, ...] = ()
        if self.nodes or len(chains) > 1:
            nodes, tokens, parents = self._lay_out()
        elif chains:  # mostly
            size = chains[0].taken
            nodes, tokens, parents = OUTSIDE[:size], tuple(chains[0].tokens), UNBROKEN[:size]
            self.recycled = (range(size),)
        drawn = tuple(map(draws.get, nodes)) if (draws := session.intake.draws) else ()
        return Plan(nodes, tokens, parents, len(session.committed), len(session.tree), drawn)

    @property
    def promised(self) -> float:
        """How many nodes the target should walk, by what the edge says of those that it sent."""
        return self.gain * math.exp(-self.counts)

    def _lay_out(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Nodes, tokens and parents of trees and chains, in the plan's order."""
        nodes, parents = [*self.nodes], [*self.parents]
        recycled: list[Sequence[int]] = []
        tokens = self.session.tree.tokens(nodes)
        for chain in self.chains:
            begin, end = len(nodes), len(nodes) + chain.taken
            nodes += OUTSIDE[: chain.taken]
            tokens += chain.tokens
            parents.append(chain.above)
            parents += range(begin, end - 1)
            recycled.append(range(begin, end))
        if tuple(parents) != UNBROKEN[: len(parents)]:
            order = depth_first(parents)
            place = [-1] * (len(order) + 1)  # of what was taken as the i-th; the root's stays
            for new, old in enumerate(order):
                place[old] = new
            nodes, tokens = [nodes[i] for i in order], [tokens[i] for i in order]
            parents = [place[parents[i]] for i in order]
            recycled = [[place[i] for i in chain] for chain in recycled]
        self.recycled = recycled
        return tuple(nodes), tuple(tokens), tuple(parents)


def choose(
    parts: Sequence[Part], seconds: Sequence[float] | Floats, base_gain: float, recycling: Recycling | None = None
) -> float:
    """Give the parts their nodes. Log of what the least one counts if others were left out; minus infinity otherwise.

    `seconds` [n + 1] are those of a step that takes 0, 1, ... n nodes along, n at most; without a node it is worth `base_gain`.
    """
    selection = _Selection(parts, recycling)
    rises = (np.diff(seconds) / np.asarray(seconds[:-1])).tolist()
    least = _fill(selection, [*rises, math.inf], base_gain)  # more nodes take for ever
    for _, _, left, chain in selection.queue:
        chain.taken -= left
    return least


def _fill(selection: "_Selection", rises: Sequence[float], total: float) -> float:
    """As `choose`; a node that is taken makes the step longer by the part `rises[i]`, i being how many were before it."""
    heap, queue, log_on, on, exp = selection.heap, selection.queue, selection.log_on, selection.on, math.exp
    taken, least = 0, -math.inf
    while True:
        minus = heap[0][0]
        while queue and queue[0][0] < minus:  # more of the chains, until something else counts more
            further, gain, left, chain = entry = queue.popleft()
            if gain <= total * rises[taken]:
                queue.append(entry)
                return least if taken else -further
            if left > 1:
                queue.append((further - log_on, gain * on, left - 1, chain))
            total += gain
            taken += 1
            least = -further
        if minus == NONE_LEFT:
            return -math.inf
        gain = exp(-minus)
        if gain <= total * rises[taken]:
            return least if taken else -float(minus)
        if selection.take(heappop(heap), gain):
            total += gain
            taken += 1
            least = -minus


class _Selection:
    """What may be taken next, in a heap and a queue, and how what was taken opens the way to more."""

    def __init__(self, parts: Sequence[Part], recycling: Recycling | None) -> None:
        self.parts = parts
        self.heap: list[Entry] = [(NONE_LEFT,)]
        # How the chains go on: minus the log of what the next node counts, what it counts, how many are left, the chain; rising.
        self.queue: deque[tuple[float, float, int, Chain]] = deque()
        self.on = recycling.goes_on if recycling is not None else 1.0
        self.log_on = math.log(self.on)
        self._leads = [math.log(chance) for chance in recycling.chances] if recycling is not None else [-math.inf]
        for number, part in enumerate(parts):
            root, first = part.root, part.first
            if not (below := part.children[root - first]):
                if (lead := self._lead(number, part, part.counts, root, -1)) is not None:
                    self.heap.append(lead)
            elif part.position[below[0] - first] < part.deepest:
                self.heap.append((-part.zero - part.weight[below[0] - first], number, below[0], 0, below, -1))
        heapify(self.heap)

    def take(self, entry: Entry, gain: float) -> bool:
        """False if there was nothing behind it."""
        if entry[2] >= LEAD:
            return self._recycle(entry, gain)
        minus, number, node, place, siblings, above = entry
        part, heap = self.parts[number], self.heap
        first, at = part.first, len(part.nodes)
        part.nodes.append(node)
        part.parents.append(above)
        if node not in part.others:
            part.gain += gain
        main = place == 0 and above == part.main
        if main:
            part.main = at
        if (place := place + 1) < len(siblings):
            after = siblings[place]
            heappush(heap, (-part.zero - part.weight[after - first], number, after, place, siblings, above))
        if below := part.children[node - first]:
            if part.position[below[0] - first] < part.deepest:
                heappush(heap, (-part.zero - part.weight[below[0] - first], number, below[0], 0, below, at))
        elif main and (behind := self._lead(number, part, -minus, node, at)) is not None:
            heappush(heap, behind)
        return True

    def _lead(self, number: int, part: Part, counts: float, tip: int, above: int) -> Entry | None:
        """Behind the end of the likeliest chain stands what was drafted elsewhere, if that is worth a thought."""
        first = counts + self._leads[0]
        if first <= part.faintest or not part.session.intake.followers:
            return None
        at = tip - part.first
        if (position := part.position[at] + 1) >= part.deepest:
            return None
        return -first, number, LEAD, part.token[at], position, above, None, counts

    def _recycle(self, entry: Entry, gain: float) -> bool:
        """What was drafted elsewhere, its first word now; False if nothing was.

        In its entry: the token before it, its position, its parent's place in the part, all ideas of what comes there (None:
        not thought of yet), what its parent counts.
        """
        minus, number, key, token, position, above, ideas, counts = entry
        part, leads = self.parts[number], self._leads
        session = part.session
        followers, stops = session.intake.followers, session.stop_ids
        most = room if (room := part.deepest - position) < LONGEST else LONGEST
        if (worth := 1 + (part.faintest + minus) / self.log_on) < most:  # tokens, before they are too faint
            most = int(worth)
        if ideas is None and counts + leads[1] < part.faintest:  # mostly: one is worth a thought
            known = followers.chain(position - 1, token, most, stops)
        else:
            if ideas is None:
                worth = sum(counts + lead >= part.faintest for lead in leads)
                ideas = [idea for idea in followers.likely(position - 1, token, worth) if idea not in stops]
            this, after = ideas[key - LEAD : key - LEAD + 1], key - LEAD + 1
            known = this and this + followers.chain(position, this[0], most - 1, stops)
            if after < len(ideas):
                lead = -counts - leads[after]
                heappush(self.heap, (lead, number, key + 1, token, position, above, ideas, counts))
        if not known:
            return False
        chain = Chain(above, known)
        part.chains.append(chain)
        if left := len(known) - 1:
            self.queue.append((minus - self.log_on, gain * self.on, left, chain))
        return True
