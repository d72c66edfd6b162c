"""From a draft's logits to its ranked candidates, with the very function by which the target chooses.

Under greedy choice the confidence of a candidate is its softmax probability. Under seeded choice candidates are
ranked by log q + G, with the noise G that the target will use (Gumbel coupling, arXiv 2408.07978), and q itself says
little: once the noise is known, what is uncertain is by how much the two models' logits differ, so the confidence is
the softmax of the perturbed logits. Both are features for the predictor, which learns how often each is really taken.
"""

import numpy as np
import numpy.typing as npt
from msgspec import structs
from paceline.edge.draft import Candidates, Choice
from paceline.edge.drawing import FAN_OUT as FAN_OUT
from paceline.edge.drawing import drawn
from paceline.protocol.sampling import rank

LIKELIEST = 256  # tokens that are given noise where no filter limits them


def candidates(logits: npt.NDArray[np.float32], position: int, choice: Choice, count: int = FAN_OUT) -> Candidates:
    """The `count` best continuations of a row with `logits` [V] (in the target's ids), chosen for absolute `position`."""
    sampling = choice.sampling
    if choice.drawing is not None:
        return drawn(logits, choice, choice.drawing)
    if (
        not sampling.greedy and sampling.top_k == 0
    ):  # noise for the likeliest alone: a candidate beyond them is a surprise anyway
        sampling = structs.replace(sampling, top_k=LIKELIEST)
    ids, scores = rank(logits, sampling, position, choice.history, count)
    if sampling.greedy:
        top = float(scores[0])
        total = float(np.exp(logits - np.float32(top)).sum(dtype=np.float64))
        return Candidates(ids, np.exp(scores - top) / max(total, 1.0))
    perturbed = sampling.temperature * (scores - scores[0])
    weight = np.exp(perturbed)
    return Candidates(ids, weight / weight.sum())
