"""The choice of a token: one pure function of (logits, parameters, absolute position, text so far), the same on both ends.

    token = argmax over v of  log p_v + G(seed, position, v)

with G Gumbel noise (`philox`) and p the softmax of the logits after, in this order: logit bias, repetition, presence and
frequency penalties, temperature, top-k, top-p, min-p: penalties and temperature before the filters, as vLLM has it, and the
filters in llama.cpp's order. llama.cpp applies the temperature last, which `temperature_last` asks for. Temperature 0
(below 1e-5) is the plain argmax of the adjusted logits.
Because the noise is tied to the position, the target's text is a function of (prompt, parameters): it cannot depend on what
was drafted, and a device that knows the seed ranks its own logits by the very same noise ("Gumbel coupling", Daliri, Musco and
Suresh, arXiv 2408.07978; DESIGN and tests call it the coupled rule).

Filters keep ties, so that the set kept does not depend on a sort's whims. Arithmetic is float64 over float32 logits.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from paceline.protocol.philox import Floats, Ids, gumbel, words

Numbers = npt.NDArray[np.float32] | Floats

GREEDY_BELOW = 1e-5  # temperatures below this are greedy: dividing by them would overflow
_HEAD = 32  # likeliest tokens scored first, to bound how far down the list a winner can lie
_FEW = 2048  # so many are scored as they are
_CHUNK = 12288  # tokens whose noise is drawn at a time: more leave the cache, and cost pages
_PART = 64  # numbers in a part of `kth_largest`
_SLACK = 1e-4  # nats; rounding, in single precision as well, is far smaller

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
    def adjusts(self) -> bool:
        return self.penalised or bool(self.logit_bias)

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class History:
    """Which tokens were seen, for the penalties: a prompt and a growing text. `after` adds a drafted path to a copy."""

    def __init__(self, prompt: Iterable[int], text: Iterable[int] = ()) -> None:
        self._slot = {token: i for i, token in enumerate(dict.fromkeys(prompt))}  # token -> its place in the arrays
        self._ids = array("q", self._slot)
        self._counts = array("q", bytes(8 * len(self._ids)))  # in the text; 0: in the prompt only
        self.extend(text)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            slot = self._slot.setdefault(token, len(self._ids))
            if slot == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[slot] += 1

    def after(self, tokens: Sequence[int]) -> "History":
        if not tokens:
            return self
        grown = History(())
        grown._slot, grown._ids, grown._counts = self._slot.copy(), self._ids[:], self._counts[:]
        grown.extend(tokens)
        return grown

    def seen(self, size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Distinct tokens below `size` that were seen, and how often each is in the text (0: in the prompt only)."""
        ids, counts = np.array(self._ids, dtype=np.int64), np.array(self._counts, dtype=np.int64)
        real = ids < size
        return ids[real], counts[real]


def choose(logits: npt.NDArray[np.float32], params: Sampling, position: int, history: History | None = None) -> int:
    """The token at absolute `position` (index in prompt + text), from the target's `logits` [V] there.

    `history` may be None unless `params.penalised`. Raises FloatingPointError if the logits hold no usable maximum.
    """
    if params.greedy and not params.adjusts:
        best = int(np.argmax(logits))
        _demand_finite(float(logits[best]))
        return best
    return int(rank(logits, params, position, history, 1)[0][0])


def rank(
    logits: npt.NDArray[np.float32], params: Sampling, position: int, history: History | None, count: int
) -> tuple[Ids, Floats]:
    """The `count` best tokens in order, and their scores: the first is what `choose` returns, the rest are runners-up.

    The scores are log-probabilities up to a constant, plus noise where the temperature is not zero, on the scale of the
    distribution sampled from. Fewer come back where the filters, or logits of -inf, leave fewer. Raises as `choose` does.
    """
    x: Numbers = adjusted(logits, params, history) if params.adjusts else logits
    _demand_finite(float(x.max()))
    if params.greedy:
        ids = largest(x, count)
        scores: Floats = x[ids].astype(np.float64)
    else:
        ids, scores = _perturb(x, survivors(x, params), params, position, count)
    best = np.lexsort((ids, -scores))[:count]  # equal scores by id, lowest first
    best = best[scores[best] > -np.inf]
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


def survivors(x: Numbers, params: Sampling) -> Ids:
    """Ids that top-k, top-p and min-p leave, ascending. `x` [V] are logits before the temperature."""
    ids: Ids = np.arange(len(x), dtype=np.int32)
    if 0 < params.top_k < len(x):  # on either side of the temperature it keeps the same tokens
        ids = np.flatnonzero(x >= kth_largest(x, params.top_k))
    if params.top_p == 1 and params.min_p == 0:
        return ids
    y = (x if len(ids) == len(x) else x[ids]).astype(np.float64)
    if not params.temperature_last:
        y /= params.temperature
    if params.top_p < 1:
        kept = np.flatnonzero(y >= _top_p_threshold(y, params.top_p))
        ids, y = ids[kept], y[kept]
    if params.min_p > 0:
        ids = ids[np.flatnonzero(y >= y.max() + np.log(params.min_p))]
    return ids


def largest(x: Numbers, count: int) -> Ids:
    """Indices of the `count` largest of `x`, ascending; among equals at the edge, the lowest indices."""
    if count >= len(x):
        return np.arange(len(x))
    edge = kth_largest(x, count)
    found = np.flatnonzero(x >= edge)
    if len(found) == count:
        return found
    level = found[x[found] == edge]
    return np.sort(np.concatenate((found[x[found] > edge], level[: count - len(found)])))


def kth_largest(x: Numbers, k: int) -> float:
    """The k-th largest of `x`, 1 <= k <= len(x), which holds no NaN.

    The k-th largest of the maxima of disjoint parts is a floor: k values at least reach it. Few others do, and a
    vocabulary's partition is left to those (49,152 numbers: 30 microseconds instead of 300).
    """
    parts = len(x) // _PART
    if parts > 2 * k:
        maxima = x[: _PART * parts].reshape(_PART, parts).max(axis=0)
        x = x[x >= np.partition(maxima, -k)[-k]]
    return float(np.partition(x, -k)[-k])


def _penalise(x: Floats, params: Sampling, history: History) -> None:
    ids, counts = history.seen(len(x))
    values = x[ids]
    values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    x[ids] = values - (params.frequency_penalty * counts + params.presence_penalty * (counts > 0))


def _top_p_threshold(x: Floats, top_p: float) -> float:
    """The smallest logit in the smallest set of likeliest tokens whose probability reaches `top_p`.

    Tokens below (1 - top_p) / V in probability hold less than 1 - top_p together, so that set lies among the others.
    """
    mass = x - x.max()
    np.exp(mass, out=mass)
    total = mass.sum()
    likely = np.flatnonzero(mass >= (1 - top_p) * total / len(x))
    likely = likely[np.argsort(-x[likely])]
    reached = np.cumsum(mass[likely]) >= top_p * total
    return float(x[likely[int(np.argmax(reached))]]) if reached.any() else -np.inf  # rounding: top_p is all but 1


def _perturb(x: Numbers, ids: Ids, params: Sampling, position: int, count: int) -> tuple[Ids, Floats]:
    """Log-probabilities plus noise of `ids` [n], or of those of them that can still be among the `count` best.

    The count-th best score of the likeliest few is a bound g. A token at log-probability l needs G >= g - l, that is
    (word + 1/2) / 2^32 <= 1 - exp(-exp(l - g)), which is below exp(l - g): all others are spared the logarithms, and those
    whose exp(l - g) no word can meet are spared the word. The slack for rounding loses no winner.
    """
    every = len(ids) == len(x)
    bound = -np.inf
    if len(ids) > _FEW + count:
        head = ids[largest(x if every else x[ids], _HEAD + count)]
        bound = kth_largest(_score(x, head, params, position), count)
    if bound == -np.inf:
        return ids, _score(x, ids, params, position)
    found = []
    for start in range(0, len(ids), _CHUNK):
        part = ids[start : start + _CHUNK]
        y = (x[start : start + _CHUNK] if every else x[part]).astype(np.float64)
        y /= params.temperature
        y -= bound
        chance = np.exp(np.minimum(y, 0, out=y).astype(np.float32) + _SLACK) * np.float32(2**32)
        able = np.flatnonzero(chance >= 0.5)
        if 4 * len(able) < len(part):  # else whole blocks cost less
            part, chance = part[able], chance[able]
        found.append(part[np.flatnonzero(words(params.seed, position, part) <= chance)])
    ids = np.concatenate(found)
    return ids, _score(x, ids, params, position)


def _score(x: Numbers, ids: Ids, params: Sampling, position: int) -> Floats:
    score: Floats = x[ids].astype(np.float64) / params.temperature + gumbel(params.seed, position, ids)
    return score


def _demand_finite(value: float) -> None:
    if not np.isfinite(value):
        raise FloatingPointError("the model's logits are not finite")
