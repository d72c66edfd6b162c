"""Which token an edge has drafted after which, and where: of all its nodes, those too that were dropped or came too late.

What was drafted for a place that the target has left may be right at another: a draft that misses a word often has the
words after it. So this is kept where the tree forgets.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

Place = tuple[int, int]  # position in the text, token
Follower = tuple[int, float, int]  # minus the position, minus the log-probability, token
RECENT = 12  # followers of one token that are kept, those furthest on in the text
MOST = 2048  # nodes after which what lies behind the text is let go of


class Followers:
    def __init__(self) -> None:
        self._places: dict[int, Place] = {}  # of nodes, by the edge's numbers
        self._after: dict[int, list[Follower]] = {}  # by the token before; rising: the one furthest on is the first
        self._noted = 0  # since the last letting go

    def __len__(self) -> int:
        """Tokens after which something was drafted."""
        return len(self._after)

    def note(self, number: int, parent: Place | None, token: int, log_probability: float) -> None:
        """Node `number` holds `token`; `parent` is the place of what it follows, None: that is not known any more."""
        if parent is None:
            return
        position, before = parent
        self._places[number] = position + 1, token
        found = self._after.setdefault(before, [])
        insort(found, (~position, -log_probability, token))
        if len(found) > RECENT:
            del found[-1]
        self._noted += 1

    def place(self, number: int) -> Place | None:
        """Of a node; None if it was never noted, or let go of."""
        return self._places.get(number)

    def likely(self, position: int, token: int, most: int = RECENT) -> list[int]:
        """What was drafted after `token`: nearest to where `token` is now, `position`, first, of equals the likeliest."""
        found, here = self._after.get(token, []), ~position
        if found and found[0][0] < here:  # else all of it stands before, and the first one is the nearest
            found = sorted(found, key=lambda f: (abs(f[0] - here), f[1], f[2]))
        return list(dict.fromkeys(token for _, _, token in found))[:most]

    def chain(self, position: int, token: int, most: int, stops: AbstractSet[int] = frozenset()) -> list[int]:
        """The likeliest after `token`, which is at `position`, the likeliest after that, ...: `most`, or up to one of `stops`."""
        chain: list[int] = []
        after = self._after
        for here in range(~position, ~position - most, -1):
            if not (found := after.get(token)):
                break
            nearest = found[0]
            token = nearest[2] if nearest[0] >= here else _nearest(found, here)
            chain.append(token)
        if not stops.isdisjoint(chain):
            del chain[next(i for i, token in enumerate(chain) if token in stops) :]
        return chain

    def number_anew(self) -> None:
        """The edge begins to count again."""
        self._places = {}

    def let_go(self, position: int) -> None:
        """Now and then, of nodes that stand before `position`, and of all if they are still too many."""
        if self._noted < MOST:
            return
        self._noted = 0
        self._places = {n: place for n, place in self._places.items() if place[0] >= position}
        if len(self._places) > MOST:
            self._places = {}
        if len(self._after) > MOST:
            self._after = {}


def _nearest(found: Sequence[Follower], here: int) -> int:
    """The token that was drafted nearest to a position, of equals the likeliest, where some was drafted further on.

    `here`: minus the position.
    """
    at = bisect_left(found, (here, -math.inf))
    behind = found[bisect_left(found, (found[at - 1][0], -math.inf))]  # the nearest further on
    if at == len(found):
        return behind[2]
    before = found[at]
    return behind[2] if (here - behind[0], *behind[1:]) < (before[0] - here, *before[1:]) else before[2]
