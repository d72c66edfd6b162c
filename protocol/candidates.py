"""From a draft's logits to the tokens that the target is likeliest to choose, with the very function by which it chooses.

Under greedy choice the confidence of a candidate is its softmax probability. Under seeded choice candidates are
ranked by log q + G, with the noise G that the target will use (Gumbel coupling, arXiv 2408.07978), and q itself says
little: once the noise is known, what is uncertain is by how much the two models' logits differ, so the confidence is
the softmax of the perturbed logits. Both ends draft by this: the edge its tree, the cloud where it holds too little.
"""

import numpy as np
import numpy.typing as npt
from msgspec import structs
from paceline.protocol.sampling import History, Sampling, rank

LIKELIEST = 256  # tokens that are given noise where no filter limits them


def likeliest(
    logits: npt.NDArray[np.float32], sampling: Sampling, position: int, history: History | None, count: int
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.float64]]:
    """The `count` best continuations of a row with `logits` [V] at absolute `position`: tokens [F], confidences [F]."""
    if not sampling.greedy and sampling.top_k == 0:  # a candidate beyond the likeliest is a surprise anyway
        sampling = structs.replace(sampling, top_k=LIKELIEST)
    ids, scores = rank(logits, sampling, position, history, count)
    if sampling.greedy:
        top = float(scores[0])
        total = float(np.exp(logits - np.float32(top)).sum(dtype=np.float64))
        return ids, np.exp(scores - top) / max(total, 1.0)
    perturbed = sampling.temperature * (scores - scores[0])
    weight = np.exp(perturbed)
    return ids, weight / weight.sum()
