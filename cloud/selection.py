"""Which drafted nodes a step takes along, of all its sessions: the likeliest first, as long as they pay for their rows.

One heap holds what may come next of each session: a node waits for its parent and for its likelier siblings, so what is not
taken is hardly looked at. Whether a node goes along depends on better ones alone, as drawn nodes need: the rate rises to one
peak and falls.

Where the likeliest chain that an edge has sent ends, what it drafted elsewhere goes on (see `recycling`). Those nodes are in
no tree: they are thought of when their turn has come, and forgotten after the step.
"""

import math
from collections.abc import Container, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from paceline.cloud.backup import LONGEST
from paceline.cloud.recycling import LEADS, Recycling
from paceline.protocol.cloud_session import CloudSession, Plan
from paceline.protocol.followers import Followers
from paceline.protocol.tree import depth_first

NOWHERE = -1  # the id of a node that is in no tree
LEAD = 1 << 60  # no id: the first idea of what comes behind a chain's end; the others follow
ON = LEAD + len(LEADS)  # what continues the first idea, and the others
CHAIN = list(range(-1, 4095))  # parents of nodes that hang one on the other

# Minus the log of what it counts, number of its part, id; no two have the same of these three. What follows is the kind's own.
Entry = tuple[Any, ...]


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
        self.recycled: list[list[int]] = []  # places of chains that were drafted here, the nearest place's first
        self.main = -1  # place of the last node on the likeliest chain
        self.deepest = session.deepest
        self.first, self.token, self.position, self.weight, self.children = session.tree.columns()
        self.zero = counts - self.weight[session.tree.root - self.first]

    def plan(self) -> Plan:
        """The plan with these nodes: depth first, the likeliest child first."""
        session, draws = self.session, self.session.intake.draws
        if self.parents != CHAIN[: len(self.parents)]:
            self._arrange(depth_first(self.parents))
        return Plan(
            tuple(self.nodes),
            tuple(self.tokens),
            tuple(self.parents),
            len(session.committed),
            len(session.tree),
            tuple(map(draws.get, self.nodes)) if draws else (),
        )

    @property
    def promised(self) -> float:
        """How many nodes the target should walk, by what the edge says of those that it sent."""
        return self.gain * math.exp(-self.counts)

    def _arrange(self, order: Sequence[int]) -> None:
        place = [-1] * (len(order) + 1)  # of what was taken as the i-th; the root's stays
        for new, old in enumerate(order):
            place[old] = new
        self.nodes, self.tokens = [self.nodes[i] for i in order], [self.tokens[i] for i in order]
        self.parents = [place[self.parents[i]] for i in order]
        self.recycled = [[place[i] for i in chain] for chain in self.recycled]


def choose(
    parts: Sequence[Part], seconds: Sequence[float], base_gain: float, recycling: Recycling | None = None
) -> float:
    """Give the parts their nodes. Log of what the least one counts if others were left out; minus infinity otherwise.

    `seconds` [n + 1] are those of a step that takes 0, 1, ... n nodes along, n at most; without a node it is worth `base_gain`.
    """
    selection = _Selection(parts, recycling)
    heap, total, taken, least = selection.heap, base_gain, 0, -math.inf
    seconds = [*seconds, math.inf]  # more nodes take for ever
    while heap:
        entry = heap[0]
        gain = math.exp(-entry[0])
        if (total + gain) * seconds[taken] <= total * seconds[taken + 1]:
            return least if taken else -float(entry[0])
        heappop(heap)
        if entry[2] < LEAD:
            selection.take(entry, gain)
        elif not selection.recycle(entry):
            continue
        total, taken, least = total + gain, taken + 1, -entry[0]
    return -math.inf


class _Selection:
    """What may be taken next, in a heap, and how what was taken opens the way to more."""

    def __init__(self, parts: Sequence[Part], recycling: Recycling | None) -> None:
        self.parts = parts
        self.heap: list[Entry] = []
        self._leads = [math.log(chance) for chance in recycling.chances] if recycling is not None else []
        self._log_on = math.log(recycling.goes_on) if recycling is not None else 0.0
        for number, part in enumerate(parts):
            root = part.session.tree.root
            if not (below := part.children[root - part.first]):
                self._lead(number, part, part.counts, root, -1)
            elif part.position[below[0] - part.first] < part.deepest:
                self.heap.append((-part.zero - part.weight[below[0] - part.first], number, below[0], 0, below, -1))
        heapify(self.heap)

    def take(self, entry: Entry, gain: float) -> None:
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
        elif main:
            self._lead(number, part, -minus, node, at)

    def _lead(self, number: int, part: Part, counts: float, tip: int, above: int) -> None:
        """Behind the end of the likeliest chain stands what was drafted elsewhere, if that is worth a thought."""
        if not self._leads or counts + self._leads[0] < part.faintest or not part.session.intake.followers:
            return
        position = part.position[tip - part.first] + 1
        if position < part.deepest:
            token = part.token[tip - part.first]
            heappush(self.heap, (-counts - self._leads[0], number, LEAD, token, position, above, None, counts))

    def recycle(self, entry: Entry) -> bool:
        """What was drafted elsewhere; False if nothing was.

        In the entry of a lead: the token before it, its position, its parent's place in the part, all ideas of what comes there
        (None: not thought of yet), what its parent counts. In that of what continues it: its own token, and what is taken of
        its chain.
        """
        minus, number, key, token, position, above, chain, counts = entry
        part = self.parts[number]
        session = part.session
        followers, stops = session.intake.followers, session.stop_ids
        if key < ON:
            if chain is None:
                chain = self._ideas(part, followers, position - 1, token, counts)
                if not chain:
                    return False
            lead, ideas = key - LEAD, chain
            if lead + 1 < len(ideas):
                further = counts + self._leads[lead + 1]
                heappush(self.heap, (-further, number, key + 1, token, position, above, ideas, counts))
            token, key, chain = ideas[lead], ON + lead, list[int]()
            part.recycled.append(chain)
        at = len(part.nodes)
        part.nodes.append(NOWHERE)
        part.tokens.append(token)
        part.parents.append(above)
        chain.append(at)
        if (
            (counts := self._log_on - minus) >= part.faintest
            and (position := position + 1) < part.deepest
            and len(chain) < LONGEST
            and (after := followers.likeliest(position - 1, token)) is not None
            and after not in stops
        ):
            heappush(self.heap, (-counts, number, key, after, position, at, chain, counts))
        return True

    def _ideas(self, part: Part, followers: Followers, position: int, token: int, counts: float) -> list[int]:
        """Of what was drafted elsewhere after `token`, as much as is worth it."""
        worth, stops = 1, part.session.stop_ids
        while worth < len(self._leads) and counts + self._leads[worth] >= part.faintest:
            worth += 1
        if worth > 1:
            return [t for t in followers.likely(position, token, worth) if t not in stops]
        found = followers.likeliest(position, token)
        return [found] if found is not None and found not in stops else []
