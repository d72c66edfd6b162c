"""The choice of a token where drafted ones were drawn at random: speculative sampling, with residuals.

The target's distribution p is to be sampled; siblings x_1, x_2, ... were drawn from q_1, q_2, ..., each q known exactly
(`proposal`). In order: x_i is accepted if u_i < p(x_i) / q_i(x_i), strictly, as otherwise a token that p rules out could
pass; if not, p becomes norm(max(p - q_i, 0)), what acceptance has not given out yet. After the last refusal the token is
drawn from what is left. Whatever the q, the result has distribution p (Leviathan, Kalman and Matias, arXiv 2211.17192; Chen
and others, arXiv 2302.01318; siblings without replacement: Jeon and others, arXiv 2402.14160). A node that was not drawn
needs no rule: the token is chosen first, and the node is walked through if it has that token.

The draws must not depend on the noise used here. u and the last choice's Gumbel noise come from (seed, position), in two
streams; the edge draws with randomness of its own.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from paceline.protocol.philox import Floats, gumbel, uniforms
from paceline.protocol.proposal import Draw
from paceline.protocol.sampling import History, Sampling, adjusted, choose, survivors


class Remainder:
    """What is left of the target's distribution p [V] as one draw after the other is refused. It owns `p`."""

    def __init__(self, p: Floats) -> None:
        self.p = p

    def chance(self, draw: Draw) -> float:
        """With which probability the draw is accepted."""
        ids, q = draw.distribution
        own = float(q[ids == draw.token][0])
        return min(1.0, float(self.p[draw.token]) / own)

    def refuse(self, draw: Draw) -> None:
        """The draw was not accepted: the rest is norm(max(p - q, 0)); p, if rounding leaves nothing of that."""
        ids, q = draw.distribution
        rest = self.p.copy()
        rest[ids] = np.maximum(rest[ids] - q, 0.0)
        total = rest.sum()
        if total > 0:
            self.p = rest / total


def choose_among(
    logits: npt.NDArray[np.float32],
    params: Sampling,
    position: int,
    history: History | None,
    draws: Sequence[Draw],
) -> int:
    """The token at absolute `position`, with the distribution of `choose`, and one of `draws` as likely as may be.

    Without draws, and where the choice is greedy, it is `choose`. Raises FloatingPointError as that does.
    """
    if not draws or params.greedy:
        return choose(logits, params, position, history)
    rest = Remainder(distribution(logits, params, history))
    for draw, u in zip(draws, uniforms(params.seed, position, len(draws)), strict=True):
        if u < rest.chance(draw):
            return draw.token
        rest.refuse(draw)
    ids = np.flatnonzero(rest.p)
    return int(ids[np.argmax(np.log(rest.p[ids]) + gumbel(params.seed, position, ids))])


def distribution(logits: npt.NDArray[np.float32], params: Sampling, history: History | None) -> Floats:
    """Probabilities [V] after bias, penalties, temperature and filters; `params` are not greedy."""
    x = adjusted(logits, params, history) if params.adjusts else logits.astype(np.float64)
    if not np.isfinite(x.max()):
        raise FloatingPointError("the model's logits are not finite")
    ids = survivors(x if params.adjusts else logits, params)
    y = x[ids] / params.temperature
    weight = np.exp(y - y.max())
    p = np.zeros(len(x))
    p[ids] = weight / weight.sum()
    return p
