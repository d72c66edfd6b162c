"""A step of the target for one session: the nodes it is to look at, and where it walked."""

import msgspec
from paceline.protocol.proposal import Draw

Logprobs = tuple[tuple[int, float], ...]


class Plan(msgspec.Struct, frozen=True):
    """Nodes to verify: `tokens[i]` grows on node `parents[i]` of this plan, -1 being the last committed token.

    `base` is the length of the text that the plan was made for, `held` how many nodes there were to choose from. `draws[i]`
    says what node i was drawn from, None for one that was picked; of siblings that were drawn, a plan holds the first ones,
    in order. `draws` is empty where no node was drawn.
    """

    nodes: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    base: int | None = None
    held: int = 0
    draws: tuple[Draw | None, ...] = ()

    def drawn_below(self, node: int) -> list[Draw]:
        """The draws among the children of `node` (-1: of the last committed token), in order."""
        found = [d for d, parent in zip(self.draws, self.parents, strict=False) if d is not None and parent == node]
        assert [len(d.before) for d in found] == list(range(len(found))), "of drawn siblings, the first ones"
        return found


class Walk(msgspec.Struct, frozen=True):
    """The target's walk: which nodes of the plan it went through, and the token it chose at the end of them.

    `logprobs[k]`, if asked for, are (token, log-probability) pairs for the k-th token committed: the chosen one, then the top.
    """

    accepted: tuple[int, ...]
    token: int
    logprobs: tuple[Logprobs, ...] = ()
