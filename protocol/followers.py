"""Which token an edge has drafted after which, and where: of all its nodes, those too that were dropped or came too late.

What was drafted for a place that the target has left may be right at another: a draft that misses a word often has the
words after it. So this is kept where the tree forgets.
"""

Place = tuple[int, int]  # position in the text, token
Follower = tuple[int, float, int]  # position, log-probability, token
RECENT = 12  # followers of one token that are kept, the last ones
MOST = 2048  # nodes after which what lies behind the text is let go of


class Followers:
    def __init__(self) -> None:
        self._places: dict[int, Place] = {}  # of nodes, by the edge's numbers
        self._after: dict[int, list[Follower]] = {}  # by the token before
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
        found.append((position + 1, log_probability, token))
        del found[:-RECENT]
        self._noted += 1

    def place(self, number: int) -> Place | None:
        """Of a node; None if it was never noted, or let go of."""
        return self._places.get(number)

    def likely(self, position: int, token: int) -> list[int]:
        """What was drafted after `token`: nearest to where `token` is now, `position`, first, of equals the likeliest."""
        return list(dict.fromkeys([after for _, _, after in sorted(self._by_nearness(position, token))]))

    def likeliest(self, position: int, token: int) -> int | None:
        """The first of `likely`; None: nothing was."""
        found = self._by_nearness(position, token)
        return min(found)[2] if found else None

    def _by_nearness(self, position: int, token: int) -> list[Follower]:
        """(distance, minus log-probability, token) of what was drafted after `token`: the least comes first."""
        return [(abs(at - position - 1), -p, after) for at, p, after in self._after.get(token, ())]

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
