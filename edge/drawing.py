"""From a draft's logits to siblings drawn at random, for the rule `rejection`, and to guesses beside them.

What is drawn from are whole counts over a few of the likeliest tokens, and exactly these go to the verifier ("sparsify,
quantise, sample", arXiv 2510.09942). Nothing that decides whether a draw is sent, or how it is ranked, may look at which token
it is: the confidence of the j-th draw is the j-th largest probability, whatever was drawn. Guesses are no draws. They
are what a round's verdict may be, and stay on the device.

Saguaro sampling (arXiv 2603.03251): the likeliest F tokens are drawn less often, by a constant factor, so that where the draw
is refused the verifier's own choice falls on them the likelier; they are the ones whose continuations are prepared.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import structs
from paceline.edge.draft import Candidates, Choice
from paceline.protocol.philox import Floats, Ids
from paceline.protocol.proposal import MAX_PROPOSAL
from paceline.protocol.rejection import distribution
from paceline.protocol.sampling import largest

FAN_OUT = 8  # candidates kept of each row
TOTAL = 255  # of the counts: each fits a byte

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Drawing:
    """How many siblings to draw and how many guesses to offer beside them; the `favoured` likeliest are drawn `factor` as often.

    `random` is seen by nobody else: draws must be independent of the noise by which they are then accepted.
    """

    random: np.random.Generator
    draws: int
    guesses: int = 0
    favoured: int = 0
    factor: float = 1.0


def drawn(logits: npt.NDArray[np.float32], choice: Choice, drawing: Drawing) -> Candidates:
    """Siblings and guesses after a row with `logits` [V], in the target's ids; the draws come first."""
    return drawn_from(*shortlist(logits, choice), drawing)


def shortlist(logits: npt.NDArray[np.float32], choice: Choice) -> tuple[Ids, Floats]:
    """The likeliest tokens [M] that may follow, and their probabilities [M] among each other, falling."""
    sampling = choice.sampling
    if not 0 < sampling.top_k <= MAX_PROPOSAL:
        sampling = structs.replace(sampling, top_k=MAX_PROPOSAL)
    p = distribution(logits, sampling, choice.history)
    ids = largest(p, MAX_PROPOSAL)  # ties at the edge of top-k may leave more than fit
    ids = ids[np.argsort(-p[ids], kind="stable")]
    ids = ids[p[ids] > 0]
    return ids, p[ids]


def drawn_from(ids: Ids, q: Floats, drawing: Drawing) -> Candidates:
    """What `drawn` makes of a shortlist."""
    counts = quantised(favouring(q, drawing.favoured, drawing.factor))
    picked = _draw(counts, drawing)
    others = [i for i in range(len(ids)) if i not in picked][: drawing.guesses]
    confidence = np.concatenate((q[: len(picked)], q[others]))
    support = np.flatnonzero(counts)
    return Candidates(
        ids[[*picked, *others]],
        np.minimum.accumulate(confidence),
        tuple(ids[support].tolist()) if picked else (),
        bytes(counts[support].tolist()) if picked else b"",
        len(picked),
    )


def favouring(q: Floats, favoured: int, factor: float) -> Floats:
    """Weights [M] of probabilities in falling order, the first `favoured` of them times `factor`."""
    weight = q.copy()
    weight[:favoured] *= factor
    return weight if weight.sum() > 0 else q


def quantised(weight: Floats) -> Counts:
    """Whole counts [M] that sum to TOTAL, nearest to `weight` by largest remainders; the least may become 0."""
    exact = weight / weight.sum() * TOTAL
    counts: Counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: TOTAL - int(counts.sum())]] += 1
    return counts


def _draw(counts: Counts, drawing: Drawing) -> list[int]:
    """Indices drawn one after the other, without replacement, each in proportion to its count."""
    left = counts.copy()
    picked: list[int] = []
    while len(picked) < drawing.draws and (total := int(left.sum())):
        i = int(np.searchsorted(np.cumsum(left), drawing.random.integers(total), side="right"))
        picked.append(i)
        left[i] = 0
    return picked
