"""The distribution that drafted siblings were drawn from, as it travels: a few tokens and whole counts.

The edge samples from exactly these numbers ("sparsify, quantise, sample", arXiv 2510.09942), so a verifier that computes
with them is exact, whatever was rounded away before. Knows nothing about models or trees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct
from paceline.protocol.philox import Floats, Ids
from paceline.protocol.sampling import TokenId

MAX_PROPOSAL = 32  # tokens in one proposal
MAX_SIBLINGS = 16  # nodes drawn from one


class Proposal(Struct, frozen=True, array_like=True):
    """`nodes` siblings were drawn, in this order and without replacement, from q(tokens[i]) = counts[i] / sum of counts.

    Without tokens it stands for `nodes` nodes that were not drawn but picked.
    """

    nodes: Annotated[int, Meta(ge=1, le=MAX_SIBLINGS)]
    tokens: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_PROPOSAL)] = ()
    counts: Annotated[bytes, Meta(max_length=MAX_PROPOSAL)] = b""

    def fault(self, drawn: Sequence[int]) -> str:
        """Why `drawn`, the tokens of its nodes, cannot have come from it; empty if they can."""
        if len(self.tokens) != len(self.counts):
            return f"{len(self.tokens)} tokens and {len(self.counts)} counts"
        if not self.tokens:
            return ""
        if len(set(self.tokens)) != len(self.tokens):
            return "a token stands there twice"
        if 0 in self.counts:
            return "a count is 0"
        if len(set(drawn)) != len(drawn):
            return "a token was drawn twice, but draws are without replacement"
        if not set(drawn) <= set(self.tokens):
            return "a node's token is not among its tokens"
        return ""


@dataclass(frozen=True)
class Draw:
    """A drafted token and what it was drawn from; `before` are its earlier siblings from the same proposal."""

    token: int
    proposal: Proposal
    before: tuple[int, ...] = ()

    @cached_property
    def distribution(self) -> tuple[Ids, Floats]:
        """Ids [M] and probabilities [M] of this draw: the proposal without what was drawn before, normalised."""
        ids = np.array(self.proposal.tokens, dtype=np.int64)
        q = np.frombuffer(self.proposal.counts, dtype=np.uint8).astype(np.float64)
        q[np.isin(ids, self.before)] = 0.0
        return ids, q / q.sum()


def draws(tokens: Sequence[int], proposal: Proposal) -> list[Draw]:
    """The siblings of one proposal as draws, in order."""
    return [Draw(token, proposal, tuple(tokens[:i])) for i, token in enumerate(tokens)]
