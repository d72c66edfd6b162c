"""What an edge drafted where the target went another way, offered again where it may fit.

It costs no bytes and no draft's time, and stands in for nodes that are on their way. The edge's own drafts are all it knows
("token recycling", arXiv 2408.08696, keeps such a table for a draft model's candidates). The edge never hears of these nodes,
and the text cannot depend on them. They cost this side's time, for each session in each step: so `selection` thinks of those
alone that go along. The nearest places go first, each as a chain of its own.
"""

from collections.abc import Container, Sequence
from itertools import accumulate

from paceline.protocol.odds import Odds

LEADS = (0.5, 0.2, 0.1)  # chances of what followed a token elsewhere, the nearest place first, before any was seen
GOES_ON = 0.6  # the same that what then followed there follows here too
WEIGHT, MEMORY = 8.0, 0.995  # how many outcomes these stand for; what an outcome leaves of the earlier ones
FAINT = 0.006  # what is reached less often is not offered
NODE = 3e-5  # seconds that a node offered takes of everybody's time on a slow core, about, whatever becomes of it
LEAST, MOST = 1e-4, 0.95  # of a chance


class Recycling:
    """How likely what was drafted elsewhere fits: learnt from what became of the nodes that were offered."""

    def __init__(self) -> None:
        self._leads, self._on = [Odds(chance, WEIGHT, MEMORY) for chance in LEADS], Odds(GOES_ON, WEIGHT, MEMORY)

    @property
    def chances(self) -> list[float]:
        """Of what followed a token elsewhere, the nearest place first; falling."""
        return list(accumulate(map(_chance, self._leads), min))

    @property
    def goes_on(self) -> float:
        """The chance that what followed there follows here too."""
        return _chance(self._on)

    def least(self, tokens: float, seconds: float) -> float:
        """What is reached less often is not offered in a step of `seconds` that brings `tokens` anyway: it would not pay."""
        return max(FAINT, NODE * tokens / seconds)

    def learn(self, chains: Sequence[Sequence[int]], parents: Sequence[int], walked: Container[int]) -> None:
        """What became of a session's chains (the place of each node), the nearest place's first, in a plan with these `parents`.

        walked: places that the target walked.
        """
        for lead, chain in zip(self._leads, chains, strict=False):
            if not chain or ((above := parents[chain[0]]) >= 0 and above not in walked):
                continue  # nobody asked it
            lead.learn(taken := chain[0] in walked)
            for place in chain[1:]:
                if not taken:
                    break
                self._on.learn(taken := place in walked)


def _chance(odds: Odds) -> float:
    return min(max(odds.ratio, LEAST), MOST)
