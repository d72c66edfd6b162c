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

from paceline.cloud.backup import LONGEST
from paceline.cloud.recycling import Recycling
from paceline.protocol.cloud_session import CloudSession, Plan
from paceline.protocol.tree import depth_first

NOWHERE = -1  # the id of a node that is in no tree
LEAD = 1 << 60  # no id: the first idea of what comes behind a chain's end; the others follow
NONE_LEFT = math.inf  # minus the log of what nothing counts
UNBROKEN = tuple(range(-1, 4095))  # parents of nodes that hang one on the other

# Minus the log of what it counts, number of its part, id; no two have the same of these three. What follows is the kind's own.
Entry = tuple[Any, ...]


class Chain:
    """What is offered again behind one node: tokens, each after the one before it."""

    __slots__ = ("above", "faintest", "followers", "position", "room", "stops", "tokens", "upcoming")

    def __init__(self, part: "Part", above: int, position: int, token: int) -> None:
        """It may begin with `token` at `position`, below the node at the place `above` of the part."""
        self.above, self.position, self.upcoming = above, position, token
        self.tokens: list[int] = []
        self.faintest = -part.faintest
        self.followers, self.stops = part.followers, part.stops
        self.room = min(LONGEST, part.deepest - position)  # tokens

    def go_on(self, further: float) -> bool:
        """Take the upcoming token; False if none follows. `further`: minus the log of what that would count."""
        tokens, token = self.tokens, self.upcoming
        tokens.append(token)
        if further > self.faintest or (length := len(tokens)) >= self.room:
            return False
        after = self.followers.likeliest(self.position + length - 1, token)
        if after is None or after in self.stops:
            return False
        self.upcoming = after
        return True


class Part:
    """What one session has of the step: nodes in the order in which they were taken, the likeliest first."""

    def __init__(
        self, session: CloudSession, counts: float = 0.0, least: float = -math.inf, others: Container[int] = ()
    ) -> None:
        """`counts`: log of what a sure node counts; `least`: log of the reach below which nothing is drafted here.

        `others`: nodes of the tree that the edge did not send.
        """
        self.session, self.counts, self.others = session, counts, others
        self.faintest = counts + least
        self.nodes: list[int] = []
        self.tokens: list[int] = []
        self.parents: list[int] = []  # places in these lists; -1: the root
        self.gain = 0.0  # what the edge's nodes count, together
        self.chains: list[Chain] = []  # what is offered again, the nearest place's first
        self.recycled: list[Sequence[int]] = []  # in the plan: the places of their nodes
        self.main = -1  # place of the last node on the likeliest chain
        self.deepest, self.stops, self.followers = session.deepest, session.stop_ids, session.intake.followers
        self.first, self.token, self.position, self.weight, self.children = session.tree.columns()
        self.zero = counts - self.weight[session.tree.root - self.first]

    def plan(self) -> Plan:
        """The plan with these nodes: depth first, the likeliest child first."""
        session, draws = self.session, self.session.intake.draws
        if self.nodes or len(self.chains) > 1:
            self._lay_out()
            nodes, tokens, parents = tuple(self.nodes), tuple(self.tokens), tuple(self.parents)
        elif self.chains:  # mostly
            tokens = tuple(self.chains[0].tokens)
            nodes, parents = (NOWHERE,) * len(tokens), UNBROKEN[: len(tokens)]
            self.recycled = [range(len(tokens))]
        else:
            nodes = tokens = parents = ()
        drawn = tuple(map(draws.get, nodes)) if draws else ()
        return Plan(nodes, tokens, parents, len(session.committed), len(session.tree), drawn)

    @property
    def promised(self) -> float:
        """How many nodes the target should walk, by what the edge says of those that it sent."""
        return self.gain * math.exp(-self.counts)

    def _lay_out(self) -> None:
        """Add the chains, and put all into the plan's order."""
        nodes, tokens, parents, recycled = self.nodes, self.tokens, self.parents, list[Sequence[int]]()
        for chain in self.chains:
            begin, end = len(nodes), len(nodes) + len(chain.tokens)
            nodes += [NOWHERE] * (end - begin)
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
        self.nodes, self.tokens, self.parents, self.recycled = nodes, tokens, parents, recycled


def choose(
    parts: Sequence[Part], seconds: Sequence[float], base_gain: float, recycling: Recycling | None = None
) -> float:
    """Give the parts their nodes. Log of what the least one counts if others were left out; minus infinity otherwise.

    `seconds` [n + 1] are those of a step that takes 0, 1, ... n nodes along, n at most; without a node it is worth `base_gain`.
    """
    selection = _Selection(parts, recycling)
    heap, queue, log_on, exp = selection.heap, selection.queue, selection.log_on, math.exp
    total, taken, least = base_gain, 0, -math.inf
    seconds = [*seconds, math.inf]  # more nodes take for ever
    while True:
        minus, waiting = heap[0][0], queue[0][0] if queue else NONE_LEFT
        if going := waiting < minus:
            minus = waiting
        elif minus == NONE_LEFT:
            return -math.inf
        gain = exp(-minus)
        if (total + gain) * seconds[taken] <= total * seconds[taken + 1]:
            return least if taken else -float(minus)
        if going:
            chain = queue.popleft()[1]
            if chain.go_on(further := minus - log_on):
                queue.append((further, chain))
        elif not selection.take(heappop(heap), gain):
            continue
        total, taken, least = total + gain, taken + 1, -minus


class _Selection:
    """What may be taken next, in a heap and a queue, and how what was taken opens the way to more."""

    def __init__(self, parts: Sequence[Part], recycling: Recycling | None) -> None:
        self.parts = parts
        self.heap: list[Entry] = [(NONE_LEFT,)]
        self.queue: deque[tuple[float, Chain]] = deque()  # as in the heap; rising
        self._leads = [math.log(chance) for chance in recycling.chances] if recycling is not None else []
        self.log_on = math.log(recycling.goes_on) if recycling is not None else 0.0
        for number, part in enumerate(parts):
            root = part.session.tree.root
            if not (below := part.children[root - part.first]):
                if (lead := self._lead(number, part, part.counts, root, -1)) is not None:
                    self.heap.append(lead)
            elif part.position[below[0] - part.first] < part.deepest:
                self.heap.append((-part.zero - part.weight[below[0] - part.first], number, below[0], 0, below, -1))
        heapify(self.heap)

    def take(self, entry: Entry, gain: float) -> bool:
        """False if there was nothing behind it."""
        if entry[2] >= LEAD:
            return self._recycle(entry)
        self._take(entry, gain)
        return True

    def _take(self, entry: Entry, gain: float) -> None:
        """A node of a tree. In its entry: its place among its siblings, they, and its parent's place in the part."""
        minus, number, node, place, siblings, above = entry
        part = self.parts[number]
        first, at = part.first, len(part.nodes)
        part.nodes.append(node)
        part.tokens.append(part.token[node - first])
        part.parents.append(above)
        if node not in part.others:
            part.gain += gain
        main = place == 0 and above == part.main
        if main:
            part.main = at
        if (place := place + 1) < len(siblings):
            after = siblings[place]
            heappush(self.heap, (-part.zero - part.weight[after - first], number, after, place, siblings, above))
        if below := part.children[node - first]:
            if part.position[below[0] - first] < part.deepest:
                heappush(self.heap, (-part.zero - part.weight[below[0] - first], number, below[0], 0, below, at))
        elif main and (lead := self._lead(number, part, -minus, node, at)) is not None:
            heappush(self.heap, lead)

    def _lead(self, number: int, part: Part, counts: float, tip: int, above: int) -> Entry | None:
        """Behind the end of the likeliest chain stands what was drafted elsewhere, if that is worth a thought."""
        if not self._leads or (first := counts + self._leads[0]) < part.faintest or not part.followers:
            return None
        at = tip - part.first
        if (position := part.position[at] + 1) >= part.deepest:
            return None
        return -first, number, LEAD, part.token[at], position, above, None, counts

    def _recycle(self, entry: Entry) -> bool:
        """The first word of what was drafted elsewhere; False if nothing was.

        In its entry: the token before it, its position, its parent's place in the part, all ideas of what comes there (None:
        not thought of yet), what its parent counts.
        """
        minus, number, key, token, position, above, ideas, counts = entry
        part = self.parts[number]
        if ideas is None:
            ideas = self._ideas(part, position - 1, token, counts)
            if not ideas:
                return False
        lead = key - LEAD
        if lead + 1 < len(ideas):
            further = counts + self._leads[lead + 1]
            heappush(self.heap, (-further, number, key + 1, token, position, above, ideas, counts))
        chain = Chain(part, above, position, ideas[lead])
        part.chains.append(chain)
        if chain.go_on(further := minus - self.log_on):
            self.queue.append((further, chain))
        return True

    def _ideas(self, part: Part, position: int, token: int, counts: float) -> list[int]:
        """Of what was drafted elsewhere after `token`, as much as is worth it."""
        leads, stops, worth = self._leads, part.stops, 1
        while worth < len(leads) and counts + leads[worth] >= part.faintest:
            worth += 1
        if worth > 1:
            return [t for t in part.followers.likely(position, token, worth) if t not in stops]
        found = part.followers.likeliest(position, token)
        return [found] if found is not None and found not in stops else []
