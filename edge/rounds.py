"""Speculation in rounds, as the edge plays it: a chain is drafted, sent whole, and its verdict awaited.

Two policies of the literature are this. `sync`: nothing is drafted while the round is on its way. `ssd` (arXiv
2603.03251): the outcomes of the round (how much of the chain is accepted, and which token follows) are guessed and
their own chains drafted meanwhile, so that after a hit the next round leaves at once. Both wait for the link in every
round; `stream` does not. They are here to be compared with, on the same tree, draft and session.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
from paceline.edge.drawing import FAN_OUT, Drawing
from paceline.protocol.tree import Tree

PATIENCE = 2.0  # seconds for which the cloud waits for a round's chain
DRAWN_PATIENCE = 10.0  # the same for one that was drawn: if it expires may depend on what was drawn, so it is never to
LONGEST = 16  # chain of an adaptive round
NEXT_CHANCE = 0.8  # that a draft's first choice is taken, before its confidence is known


def fan_out(length: int, budget: int, acceptance: float, exponent: float = 1.0) -> list[int]:
    """Outcomes to prepare after 0, 1, ..., `length` accepted tokens, `budget` in all: geometric, more at the end.

    F_k = F_0 a^(k/(1+r)), F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r)), with a the acceptance and 1 - F^-r the chance that F
    guesses hold the outcome (theorem 12 of arXiv 2603.03251). Rounded by largest remainders.
    """
    a, r = min(max(acceptance, 0.01), 0.99), exponent
    share = [a ** (k / (1 + r)) for k in range(length + 1)]
    share[length] *= (1 - a) ** (-1 / (1 + r))
    exact = [budget * s / sum(share) for s in share]
    whole = [math.floor(e) for e in exact]
    order = sorted(range(length + 1), key=lambda k: (whole[k] - exact[k], k))
    for k in order[: budget - sum(whole)]:
        whole[k] += 1
    return whole


def chain_below(tree: Tree, top: int, length: int) -> list[int]:
    """The likeliest child of `top`, its likeliest child, and so on, at most `length` nodes."""
    chain: list[int] = []
    node = top
    while len(chain) < length and (below := tree.children(node)):
        chain.append(node := below[0])
    return chain


@dataclass
class Rounds:
    """`length`: tokens of a round; 0: as many as pay. `outcomes`: how many are prepared while a round is on its way.

    `favour`: under the rule `rejection`, by what factor less often the tokens of prepared outcomes are drawn.
    """

    length: int
    outcomes: int = 0
    favour: float = 1.0
    acceptance: float = NEXT_CHANCE
    sent: bool = False  # this round's chain is on its way

    def rows(self, tree: Tree, runnable: Container[int], overhead: float, step: float) -> list[int]:
        """Nodes to run next, all as one batch. `overhead`: a round's seconds beside drafting, `step` those of a row."""
        if self.sent:
            return self._outcome_rows(tree, runnable) if self.outcomes else []
        chain = chain_below(tree, tree.root, self.length or LONGEST)
        tip = chain[-1] if chain else tree.root
        if tip not in runnable or not self._longer(tree, chain, overhead, step):
            return []
        return [tip]

    def _longer(self, tree: Tree, chain: Sequence[int], overhead: float, step: float) -> bool:
        """Is one more token in this round worth its step? While it adds more tokens a second than the round has so far."""
        if len(chain) >= (self.length or LONGEST):
            return False
        if self.length or not chain:
            return True
        gain = 1 + sum(math.exp(tree.reach(n)) for n in chain)
        more = math.exp(tree.reach(chain[-1])) * self.acceptance
        return more * (len(chain) * step + overhead) > gain * step

    def _outcome_rows(self, tree: Tree, runnable: Container[int]) -> list[int]:
        """The last node of the chain, whose candidates are outcomes too, and the tips of the outcomes' own chains."""
        length = self.length or LONGEST
        chain = chain_below(tree, tree.root, length)
        chain = chain[: next((i for i, n in enumerate(chain) if n in runnable), len(chain) - 1) + 1]
        rows = [n for n in chain[-1:] if n in runnable]
        for k, count in enumerate(fan_out(len(chain), self.outcomes, self.acceptance)):
            node = chain[k - 1] if k else tree.root
            ahead = chain[k] if k < len(chain) else None
            guesses = [c for c in tree.children(node) if c != ahead]
            for guess in guesses[:count]:
                branch = [guess, *chain_below(tree, guess, length)]
                if len(branch) <= length and branch[-1] in runnable:
                    rows.append(branch[-1])
        return rows

    def drawing(self, tree: Tree, node: int, random: np.random.Generator) -> Drawing:
        """How to draw what follows `node`: one token of the chain, none where the chain is full, and guesses beside it.

        Saguaro sampling (arXiv 2603.03251, section 4.2): the draw avoids the tokens of the outcomes that are prepared at its
        place in the round, as many as theorem 12 gives it.
        """
        place, length = self._place(tree, node), self.length or LONGEST
        favoured = fan_out(length, self.outcomes, self.acceptance)[min(place, length)] if self.outcomes else 0
        return Drawing(random, int(place < length), FAN_OUT - 1, favoured, self.favour)

    def _place(self, tree: Tree, node: int) -> int:
        """Nodes of its own round above or at `node`: of the round at hand, or of the one that an outcome would begin."""
        chain = [tree.root, *self.chain(tree)]
        if node in chain:
            return chain.index(node)
        above = node
        while tree.parent(above) not in chain:
            above = tree.parent(above)
        return tree.position(node) - tree.position(above)

    def chain(self, tree: Tree) -> list[int]:
        return chain_below(tree, tree.root, self.length or LONGEST)
