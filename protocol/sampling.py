"""The choice of a token: one pure function of (logits, parameters, absolute position, text so far), the same on both ends.

    token = argmax over v of  log p_v + G(seed, position, v)

with G Gumbel noise (`philox`) and p the softmax of the logits after, in this order: logit bias, repetition, presence
and frequency penalties, temperature, top-k, top-p, min-p. That is the order of vLLM and of the OpenAI API; llama.cpp
applies the temperature last, which `temperature_last` asks for. Temperature 0 (below 1e-5) is the plain argmax of the
adjusted logits. Because the noise is tied to the position, the target's text is a function of (prompt, parameters):
it cannot depend on what was drafted, and a device that knows the seed ranks its own logits by the very same noise
("Gumbel coupling", Daliri, Musco and Suresh, arXiv 2408.07978; DESIGN and tests call it the coupled rule).

Filters keep ties, so that the set kept does not depend on a sort's whims. Arithmetic is float64 over float32 logits.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from paceline.protocol.philox import GUMBEL_MAX, Floats, Ids, gumbel

GREEDY_BELOW = 1e-5  # temperatures below this are greedy: dividing by them would overflow
_HEAD = 64  # candidates scored exactly first, to bound how far down the list a winner can lie
_TOP_P_HEAD = 1024  # top-p looks among this many likeliest tokens before it sorts the whole vocabulary

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen. Ranges are checked where a message or a user's input is read (`codec.convert`)."""

    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0  # 0: off
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0  # over prompt and text, as vLLM
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0  # over the text only, as OpenAI
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[
        tuple[tuple[TokenId, Annotated[float, Meta(ge=-100, le=100)]], ...], Meta(max_length=1024)
    ] = ()
    temperature_last: bool = False  # filters before the temperature, as llama.cpp

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class History:
    """Which tokens were seen, for the penalties: a prompt and a growing text. `after` adds a drafted path to a copy."""

    def __init__(self, prompt: Iterable[int], text: Iterable[int] = ()) -> None:
        self.prompt = frozenset(prompt)
        self.text = Counter(text)

    def extend(self, tokens: Iterable[int]) -> None:
        self.text.update(tokens)

    def after(self, tokens: Sequence[int]) -> "History":
        if not tokens:
            return self
        grown = History(())
        grown.prompt, grown.text = self.prompt, self.text.copy()
        grown.extend(tokens)
        return grown


def choose(logits: npt.NDArray[np.float32], params: Sampling, position: int, history: History | None = None) -> int:
    """The token at absolute `position` (index in prompt + text), from the target's `logits` [V] there.

    `history` may be None unless `params.penalised`. Raises FloatingPointError if the logits hold no usable maximum.
    """
    if params.greedy and not params.penalised and not params.logit_bias:
        best = int(np.argmax(logits))
        _demand_finite(float(logits[best]))
        return best
    return int(rank(logits, params, position, history, 1)[0][0])


def rank(
    logits: npt.NDArray[np.float32], params: Sampling, position: int, history: History | None, count: int
) -> tuple[Ids, Floats]:
    """The `count` best tokens in order, and their scores: the first is what `choose` returns, the rest are runners-up.

    The scores are log-probabilities up to a constant, plus noise where the temperature is not zero, on the scale of
    the distribution sampled from. Fewer come back where the filters leave fewer.
    """
    x = adjusted(logits, params, history)
    _demand_finite(float(x.max()))
    if params.greedy:
        ids: Ids = _largest(x, count)
        scores: Floats = x[ids]
    else:
        ids = _survivors(x, params)
        x = x[ids] / params.temperature
        ids, scores = _perturb(ids, x, params.seed, position, count)
    best = _order(ids, scores)[:count]
    return ids[best], scores[best]


def adjusted(logits: npt.NDArray[np.float32], params: Sampling, history: History | None) -> Floats:
    """Logits [V] in float64 after bias and penalties. Bias on ids beyond the vocabulary has no effect."""
    x = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        if token < len(x):
            x[token] += bias
    if params.penalised:
        assert history is not None, "penalties need the text so far"
        _penalise(x, params, history)
    return x


def log_softmax(logits: npt.NDArray[np.float32]) -> Floats:
    """Natural log-probabilities [V] of raw logits [V]: what `logprobs` reports, before bias, penalties and filters."""
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    return x


def _penalise(x: Floats, params: Sampling, history: History) -> None:
    size = len(x)
    seen = np.fromiter((t for t in history.prompt | history.text.keys() if t < size), dtype=np.intp)
    x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
    written = [(t, n) for t, n in history.text.items() if t < size]
    if written:
        ids, counts = np.array(written, dtype=np.intp).T
        x[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _survivors(x: Floats, params: Sampling) -> Ids:
    """Ids that top-k, top-p and min-p leave, ascending. `x` [V] are logits before the temperature."""
    ids: Ids = np.arange(len(x))
    if not params.temperature_last:
        x = x / params.temperature
    if 0 < params.top_k < len(x):
        kept = x >= np.partition(x, -params.top_k)[-params.top_k]
        ids, x = ids[kept], x[kept]
    if params.top_p < 1:
        kept = x >= _top_p_threshold(x, params.top_p)
        ids, x = ids[kept], x[kept]
    if params.min_p > 0:
        ids = ids[x >= x.max() + np.log(params.min_p)]
    return ids


def _top_p_threshold(x: Floats, top_p: float) -> float:
    """The smallest logit in the smallest set of likeliest tokens whose probability reaches `top_p`."""
    mass = np.exp(x - x.max())
    total = mass.sum()
    for head in (min(_TOP_P_HEAD, len(x)), len(x)):
        order = _order(ids := _largest(x, head), x[ids])
        reached = np.cumsum(mass[ids][order]) >= top_p * total
        if reached.any():
            return float(x[ids][order][int(np.argmax(reached))])
    return -np.inf  # rounding: top_p is 1 to within the last bit


def _perturb(ids: Ids, x: Floats, seed: int, position: int, count: int) -> tuple[Ids, Floats]:
    """Log-probabilities plus noise, for those tokens alone that can still be among the `count` best.

    No noise exceeds GUMBEL_MAX, so a token that lies further than that below the count-th best score of the likeliest
    few cannot win, and its noise need not be drawn. The result is exact; it only saves work.
    """
    head = max(_HEAD, count)
    if len(ids) > 4 * head:
        top = _largest(x, head)
        scores = x[top] + gumbel(seed, position, ids[top])
        bound = np.partition(scores, -count)[-count] - GUMBEL_MAX
        able = x >= bound
        ids, x = ids[able], x[able]
    return ids, x + gumbel(seed, position, ids)


def _largest(x: Floats, count: int) -> Ids:
    """Indices of the `count` largest values, in no particular order; among equals at the edge, the lowest indices."""
    if count >= len(x):
        return np.arange(len(x))
    if count == 1:
        return np.array([np.argmax(x)])
    edge = np.partition(x, -count)[-count]
    above = np.flatnonzero(x > edge)
    return np.concatenate((above, np.flatnonzero(x == edge)[: count - len(above)]))


def _order(ids: Ids, scores: Floats) -> Ids:
    """Indices that sort by score, best first; equal scores by id, lowest first."""
    return np.lexsort((ids, -scores))


def _demand_finite(value: float) -> None:
    if not np.isfinite(value):
        raise FloatingPointError("the model's logits are not finite")
