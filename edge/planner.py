"""Which nodes to run next, and which are worth their bytes.

Usefulness of a node = P(the target walks through it) x P(it arrives before the cloud has passed it). The first is the
product of the predictor's probabilities along the path. For the second: what is drafted now reaches the cloud after a
draft step and half a round trip, and what is known here of the cloud is half a round trip old, so by then it will
have moved on by about pace x (round trip + step) tokens; every token by which a node would come late costs `LATENESS`
nats. Knows the tree, not the network or the draft.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.protocol.tree import Tree

LATENESS = 0.5
LEAST = math.log(1e-3)  # nodes less useful than this are not run
SENT = math.log(0.02)  # nodes less useful than this are not sent


@dataclass
class Pace:
    """How fast the text grows, from the commits' arrival: tokens a second, averaged over about the last four commits."""

    rate: float = 0.0
    last: float | None = None

    def observe(self, now: float, tokens: int) -> None:
        if self.last is not None:
            seen = tokens / max(now - self.last, 1e-3)
            self.rate = 0.75 * self.rate + 0.25 * seen if self.rate else seen
        self.last = now

    def ahead(self, seconds: float) -> float:
        """Tokens by which the cloud moves on in that time."""
        return self.rate * seconds


def usefulness(tree: Tree, node: int, ahead: float) -> float:
    """Log-usefulness of having `node` at the cloud, which will have moved on by `ahead` tokens when it arrives."""
    depth = tree.position(node) - tree.position(tree.root)
    return tree.reach(node) - LATENESS * max(0.0, ahead - depth)


def to_run(tree: Tree, frontier: Iterable[int], ahead: float, count: int) -> list[tuple[float, int]]:
    """(log-usefulness, node) of the `count` nodes whose children are most useful, best first; the useless are left out."""
    scored = ((usefulness(tree, node, ahead - 1), node) for node in frontier)
    return heapq.nlargest(count, (s for s in scored if s[0] > LEAST))


def to_send(tree: Tree, nodes: Sequence[int], ahead: float) -> list[int]:
    """Those of `nodes` that are worth their bytes, likeliest first, so that parents come before their children."""
    useful = [n for n in nodes if usefulness(tree, n, ahead) > SENT]
    return sorted(useful, key=lambda n: (-tree.reach(n), n))
