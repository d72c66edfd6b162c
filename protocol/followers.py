"""Which token an edge has drafted after which, and where: of all its nodes, those too that were dropped or came too late.

What was drafted for a place that the target has left may be right at another: a draft that misses a word often has the
words after it. So this is kept where the tree forgets.
"""

import math
from bisect import bisect, insort

Place = tuple[int, int]  # position in the text, token
Follower = tuple[int, float, int]  # position, log-probability, minus the token
RECENT = 12  # followers of one token that are kept, those furthest on in the text
MOST = 2048  # nodes after which what lies behind the text is let go of


class Followers:
    def __init__(self) -> None:
        self._places: dict[int, Place] = {}  # of nodes, by the edge's numbers
        self._after: dict[int, list[Follower]] = {}  # by the token before; rising
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
        insort(found, (position + 1, log_probability, -token))
        if len(found) > RECENT:
            del found[0]
        self._noted += 1

    def place(self, number: int) -> Place | None:
        """Of a node; None if it was never noted, or let go of."""
        return self._places.get(number)

    def likely(self, position: int, token: int, most: int = RECENT) -> list[int]:
        """What was drafted after `token`: nearest to where `token` is now, `position`, first, of equals the likeliest."""
        found = self._after.get(token)
        if not found:
            return []
        if found[-1][0] > position + 1:  # else all of it stands before, and the last one is the nearest
            found = sorted(found, key=lambda f: (-abs(f[0] - position - 1), f[1], f[2]))
        tokens = list[int]()
        for _, _, minus in reversed(found):
            if -minus not in tokens:
                tokens.append(-minus)
                if len(tokens) == most:
                    break
        return tokens

    def likeliest(self, position: int, token: int) -> int | None:
        """The first of `likely`; None: nothing was."""
        found = self._after.get(token)
        if not found:
            return None
        here, last = position + 1, found[-1]
        if last[0] <= here:
            return -last[2]
        at = bisect(found, (here, math.inf))  # the first one further on
        behind = found[bisect(found, (found[at][0], math.inf), at) - 1]  # the likeliest of those
        if at == 0:
            return -behind[2]
        before = found[at - 1]
        nearer = (here - before[0]) - (behind[0] - here)
        if nearer == 0:
            nearer = 1 if behind[1:] > before[1:] else -1
        return -(behind if nearer > 0 else before)[2]

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
