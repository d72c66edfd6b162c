"""What an edge drafted where the target went another way, offered again where it may fit.

It costs no bytes and no draft's time, and stands in for nodes that are on their way. The edge's own drafts are all it knows
("token recycling", arXiv 2408.08696, keeps such a table for a draft model's candidates). The edge never hears of these nodes,
and the text cannot depend on them. They cost this side's time, for each session in each step: so `selection` thinks of those
alone that go along. The nearest places go first, each as a chain of its own.
"""

from collections.abc import Container, Sequence

from paceline.cloud.backup import Record

LEADS = (0.5, 0.2, 0.1)  # chances of what followed a token elsewhere, the nearest place first
GOES_ON = 0.6  # chance that what then followed there follows here too
FAINT = 0.006  # what is reached less often is not offered
NODE = 1e-5  # seconds that a node offered takes of everybody's time, about, whatever becomes of it
LITTLE = 1e-9  # the least trust, so that a chance has a logarithm


class Recycling:
    """How far it is believed: `record` holds what became of the nodes that were offered."""

    def __init__(self) -> None:
        self.record = Record()

    @property
    def chances(self) -> list[float]:
        """Of what followed a token elsewhere, the nearest place first."""
        trust = max(self.record.trust, LITTLE)
        return [trust * lead for lead in LEADS]

    @property
    def goes_on(self) -> float:
        """The chance that what followed there follows here too."""
        return max(self.record.trust, LITTLE) * GOES_ON

    def least(self, tokens: float, seconds: float) -> float:
        """What is reached less often is not offered in a step of `seconds` that brings `tokens` anyway: it would not pay."""
        return max(FAINT, NODE * tokens / seconds)

    def learn(
        self, chains: Sequence[Sequence[tuple[int, float]]], parents: Sequence[int], walked: Container[int]
    ) -> None:
        """What became of chains in a plan with these `parents`: (place, chance) of each node, and the places that were walked."""
        for chain in chains:
            if chain and ((above := parents[chain[0][0]]) < 0 or above in walked):  # else nobody asked it
                self.record.learn([place in walked for place, _ in chain], [chance for _, chance in chain])
