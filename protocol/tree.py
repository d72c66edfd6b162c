"""The speculation tree: an arena of parallel lists that grows at its leaves and is eaten at its root.

The root stands for the last committed token. `add` appends a child, `advance` moves the root along tokens that were
committed and drops what disagrees, `best` picks a connected subtree for verification. Ids are handed out once and
never reused, parents always come before children. Knows nothing about messages, models or who is at which end.
"""

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from heapq import heappop, heappush

SPARE = 64  # nodes that are kept before any are let go of, and between one time and the next


class State(IntEnum):
    LIVE = 0  # below the root, or the root itself
    COMMITTED = 1  # on the committed path, above the root
    DEAD = 2  # the target went another way


LIVE, COMMITTED, DEAD = State  # a global is found faster than an attribute of an Enum


class Tree:
    """Nodes by id. `position` of a node is the index of its token in the generated text; the root of an empty text has -1."""

    def __init__(self, root_token: int, root_position: int = -1) -> None:
        self._first = 0  # id of the first node still kept
        self._full = SPARE  # nodes kept, from which on it pays to look for some to let go of
        self._parent: list[int] = []
        self._token: list[int] = []
        self._position: list[int] = []
        self._weight: list[float] = []
        self._state: list[State] = []
        self._children: list[list[int] | None] = []  # likeliest first, of equal ones the oldest; None: no list is kept
        self.root = self._append(-1, root_token, root_position, 0.0)
        self._live = 1

    def __len__(self) -> int:
        """Number of live nodes below the root."""
        return self._live - 1

    @property
    def next_id(self) -> int:
        return self._first + len(self._parent)

    def token(self, node: int) -> int:
        return self._token[node - self._first]

    def position(self, node: int) -> int:
        return self._position[node - self._first]

    def parent(self, node: int) -> int:
        return self._parent[node - self._first]

    def tokens(self, nodes: Iterable[int]) -> list[int]:
        first, tokens = self._first, self._token
        return [tokens[node - first] for node in nodes]

    def parents(self, nodes: Iterable[int]) -> list[int]:
        first, parents = self._first, self._parent
        return [parents[node - first] for node in nodes]

    def weight(self, node: int) -> float:
        """Log-probability that the target walks from the root's start of counting to this node (see `reach`)."""
        return self._weight[node - self._first]

    def children(self, node: int) -> Sequence[int]:
        """The likeliest first; of equally likely ones the oldest."""
        return self._children[node - self._first] or ()

    def state(self, node: int) -> State:
        """State of a node; those so old that they were let go are DEAD."""
        return self._state[node - self._first] if node >= self._first else DEAD

    def child(self, node: int, token: int) -> int | None:
        first, tokens = self._first, self._token
        for c in self._children[node - first] or ():
            if tokens[c - first] == token:
                return c
        return None

    def reach(self, node: int) -> float:
        """Log-probability that the target walks through `node`, given that it stands at the root."""
        return self.weight(node) - self.weight(self.root)

    def reaches(self, nodes: Iterable[int]) -> list[float]:
        """`reach` of each node."""
        first, weights = self._first, self._weight
        at_root = weights[self.root - first]
        return [weights[node - first] - at_root for node in nodes]

    def tip(self) -> int:
        """The end of the likeliest chain: from the root to its likeliest child, that one's likeliest child, and so on."""
        first, children, node = self._first, self._children, self.root
        while below := children[node - first]:
            node = below[0]
        return node

    def alive(self, nodes: Iterable[int]) -> set[int]:
        """Those of them that are live, below the root."""
        first, states = self._first, self._state
        return {n for n in nodes if n >= first and n != self.root and states[n - first] is LIVE}

    def add(self, parent: int, token: int, log_probability: float = 0.0) -> int:
        """A new child of a live node; `log_probability` is that of taking it once its parent was taken."""
        first, weights = self._first, self._weight
        at = parent - first
        assert at >= 0, "children grow on live nodes only"
        assert self._state[at] is LIVE, "children grow on live nodes only"
        assert log_probability > -math.inf, "a weight of -inf would make every sum below it meaningless"
        weight = weights[at] + min(log_probability, 0.0)
        node = self._append(parent, token, self._position[at] + 1, weight)
        siblings = self._children[at]
        if siblings is None:
            self._children[at] = [node]
        elif weight <= weights[siblings[-1] - first]:
            siblings.append(node)
        else:
            insort(siblings, node, key=lambda c: -weights[c - first])
        self._live += 1
        return node

    def reweigh(self, node: int, log_probability: float) -> None:
        """Another opinion of taking `node` once its parent was taken; what hangs below it moves along."""
        first, weights = self._first, self._weight
        parent = self.parent(node)
        shift = self.weight(parent) + min(log_probability, 0.0) - self.weight(node)
        for below in self.subtree(node):
            weights[below - first] += shift
        siblings = self._children[parent - first]
        assert siblings, "a node is a child of its parent"
        siblings.sort(key=lambda c: (-weights[c - first], c))

    def advance(self, tokens: Sequence[int]) -> list[int]:
        """Move the root along committed `tokens`. Returns the nodes that were walked through, in order.

        If the tokens leave the tree, everything in it is dropped and the new root is a fresh node.
        """
        first, all_tokens, children, states = self._first, self._token, self._children, self._state
        node = self.root
        walked: list[int] = []
        for token in tokens:
            for child in children[node - first] or ():
                if all_tokens[child - first] == token:
                    break
            else:
                self._leave(walked, tokens)
                return walked
            walked.append(node := child)
        above, self.root = self.root, node
        for follower in walked:
            states[above - first] = COMMITTED
            siblings = children[above - first]
            if siblings is not None and len(siblings) > 1:
                self._kill([c for c in siblings if c != follower])
            above = follower
        self._live -= len(walked)
        return walked

    def subtree(self, node: int) -> Iterator[int]:
        """`node` and everything below it, parents first."""
        stack = [node]
        while stack:
            yield (node := stack.pop())
            stack.extend(self.children(node))

    def path(self, node: int) -> list[int]:
        """Nodes from just below the root down to `node`, which is live."""
        assert self.state(node) is LIVE
        out = []
        while node != self.root:
            out.append(node)
            node = self.parent(node)
        return out[::-1]

    def best(self, limit: int, exclude_from: int | None = None) -> list[int]:
        """The connected subtree of at most `limit` nodes below the root with the largest summed probability.

        Nodes at text positions from `exclude_from` on are left out. The order is depth first, likeliest child first: the
        likeliest chain comes first, in one piece.
        """
        chosen = self.likeliest(limit, exclude_from)
        place = {node: i for i, node in enumerate(chosen)}
        return [chosen[i] for i in depth_first([place.get(parent, -1) for parent in self.parents(chosen)])]

    def likeliest(self, limit: int, exclude_from: int | None = None) -> list[int]:
        """The nodes of `best`, the likeliest first; as many of the first ones as one likes are connected, too.

        Weights never rise along a path, so best-first search finds them. A child waits for its likelier siblings: what a node
        has of children that are not taken costs nothing.
        """
        first, weights, positions, children = self._first, self._weight, self._position, self._children
        chosen: list[int] = []
        heap: list[tuple[float, int, Sequence[int], int]] = [(0.0, self.root, (self.root,), 0)]
        while heap and len(chosen) <= limit:
            _, node, siblings, place = heappop(heap)  # its place among its siblings
            chosen.append(node)
            if (place := place + 1) < len(siblings):
                after = siblings[place]
                heappush(heap, (-weights[after - first], after, siblings, place))
            below = children[node - first]
            if below and (exclude_from is None or positions[node - first] + 1 < exclude_from):
                heappush(heap, (-weights[below[0] - first], below[0], below, 0))
        return chosen[1:]

    def columns(self) -> tuple[int, Sequence[int], Sequence[int], Sequence[float], Sequence[Sequence[int] | None]]:
        """For who looks at many nodes, until the tree changes: an id, and of the node with it and those after it tokens,
        positions, weights and children (as `children` has them; None for none)."""
        return self._first, self._token, self._position, self._weight, self._children

    def _append(self, parent: int, token: int, position: int, weight: float) -> int:
        self._parent.append(parent)
        self._token.append(token)
        self._position.append(position)
        self._weight.append(weight)
        self._state.append(LIVE)
        self._children.append(None)
        return self._first + len(self._parent) - 1

    def _leave(self, walked: Sequence[int], tokens: Sequence[int]) -> None:
        """The tokens leave the tree behind the nodes that were walked: all that lived is committed now, or dead.

        What lives comes after the root, and nothing there was committed before.
        """
        first, states = self._first, self._state
        at, size = self.root - first, len(states)
        if (after := at + 1) < size:
            states[after:] = [DEAD] * (size - after)
            for node in walked:
                states[node - first] = COMMITTED
        states[at] = COMMITTED
        self.root = self._append(-1, tokens[-1], self._position[at] + len(tokens), 0.0)
        self._live = 1

    def _kill(self, tops: list[int]) -> None:
        """These, of which the list is used up, and all below them."""
        first, states, children, stack = self._first, self._state, self._children, tops
        count = 0
        while stack:
            at = stack.pop() - first
            states[at] = DEAD
            count += 1
            if (below := children[at]) is not None:
                stack += below
        self._live -= count

    def forget(self, before_position: int) -> None:
        """Let go of the leading nodes that are not live and whose position lies before `before_position`; now and then."""
        if len(self._state) < self._full:
            return
        n = len(self._state)
        for i, state in enumerate(self._state):
            if state is not DEAD and (state is LIVE or self._position[i] >= before_position):
                n = i
                break
        self._full = len(self._state) - n + SPARE
        if not n:
            return
        for column in (self._parent, self._token, self._position, self._weight, self._state, self._children):
            del column[:n]
        self._first += n


def depth_first(parents: Sequence[int]) -> list[int]:
    """The order of a connected subtree, depth first, the likeliest child first. Nodes are numbered as they are given, the
    likeliest first, by their `parents`, which come before them; -1: the root."""
    below: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node in range(len(parents) - 1, -1, -1):  # unlikely ones first: the stack turns them round
        below[parents[node]].append(node)
    order: list[int] = []
    stack = below[-1]
    while stack:
        order.append(node := stack.pop())
        stack.extend(below[node])
    return order
