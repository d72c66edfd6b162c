"""What an edge drafted where the target went another way, offered again where it may fit.

It costs no bytes and no draft's time, and stands in for nodes that are on their way. The edge's own drafts are all it knows
("token recycling", arXiv 2408.08696, keeps such a table for a draft model's candidates). The edge never hears of these nodes,
and the text cannot depend on them. They cost this side's time, for each session in each step: so none are made that
would not go along.
"""

import math

from paceline.cloud.backup import LONGEST, Grown, Record
from paceline.protocol.cloud_session import CloudSession

LEADS = (0.5, 0.2, 0.1)  # chances of what followed a token elsewhere, the nearest place first
GOES_ON = 0.6  # chance that what then followed there follows here too
FAINT = 0.006  # what is reached less often is not offered


class Recycling:
    def __init__(self) -> None:
        self.record = Record()

    def offer(self, session: CloudSession, least: float = 0.0) -> list[Grown]:
        """Lengthen the likeliest chain of the session's tree by what the edge has drafted after the same token elsewhere.

        The nearest places go first, each as a chain of its own. `least`: what is reached less often will not be verified.
        """
        followers, tree, text = session.intake.followers, session.tree, session.committed
        if not text or not followers:
            return []
        tip = tree.tip()
        reach, trust, least = math.exp(tree.reach(tip)), self.record.trust, max(least, FAINT)
        if reach * trust * LEADS[0] < least:
            return []
        position, last = tree.position(tip), session.max_tokens - 1  # the target's own token comes there
        ideas = followers.likely(position, tree.token(tip)) if position + 1 < last else ()
        goes_on = trust * GOES_ON
        offered = list[Grown]()
        for lead, idea in zip(LEADS, ideas, strict=False):
            nodes, chances = list[int](), list[float]()
            parent, at, chance, after = tip, position + 1, trust * lead, idea
            reached = reach * chance
            while reached >= least and after not in session.stop_ids and at < last and len(nodes) < LONGEST:
                nodes.append(parent := tree.add(parent, after, math.log(chance)))
                chances.append(chance)
                if (further := followers.likeliest(at, after)) is None:
                    break
                after, at, chance, reached = further, at + 1, goes_on, reached * goes_on
            if nodes:
                offered.append(Grown(self.record, tip, tuple(nodes), tuple(chances)))
        return offered
