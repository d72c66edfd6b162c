"""Choice of tokens and the walk down each tree, in torch: the reference, and what runs without a GPU.

    token(row) = argmax over v of  log p_v + G(seed, position, v)

by the rules of `paceline.protocol.sampling` (the order of filters, ties kept, the same Philox words), in float64. The walk
starts at each session's root row and follows the child whose token is the one chosen; it ends where there is none. Only rows on
the path are scored here. Agreement with the NumPy code: the random words are equal; log and exp of the two libraries differ by
one unit in the last place of float64, so a choice can differ only where the two best scores are within 1e-14 of each other.
"""

from dataclasses import dataclass

import numpy as np
import torch
from paceline.kernels.philox import gumbel, minus_all_gumbel
from paceline.protocol.sampling import Sampling
from torch import Tensor

_ROWS_AT_ONCE = 4
_TOP_P_HEAD = 1024  # top-p looks among this many likeliest tokens before it sorts the whole vocabulary


@dataclass(frozen=True)
class Forest:
    """The trees of a step over its N rows of logits: a session's root row, then its nodes, parents first."""

    roots: Tensor  # [S] row of each session's root
    sessions: Tensor  # [N] session of each row
    parents: Tensor  # [N] row of the parent; -1 for roots
    tokens: Tensor  # [N] drafted token of a node; -1 for roots
    positions: Tensor  # [N] absolute position of the token that the row chooses
    deepest: int  # depth of the deepest node


@dataclass(frozen=True)
class Adjustment:
    """Bias and penalties as a list of entries, at most one for a (row, token): x = penalise(x + bias) - subtract."""

    rows: Tensor  # [A]
    tokens: Tensor  # [A]
    bias: Tensor  # [A] float64
    repetition: Tensor  # [A] float64; 1 where the token was not seen
    subtract: Tensor  # [A] float64


@dataclass(frozen=True)
class Choices:
    """Each session's parameters [S], and the step's adjustments if there are any."""

    params: tuple[Sampling, ...]
    adjustment: Adjustment | None = None


@dataclass(frozen=True)
class Paths:
    """Where the walks went. `rows[s, :count[s]]` are the rows walked through, the root first; `token[s]` ends them.

    `finite[s]` is False where a row on the way held no usable maximum; the rest of that session's result means nothing.
    """

    rows: Tensor  # [S, 1 + deepest]
    count: Tensor  # [S]
    token: Tensor  # [S]
    finite: Tensor  # [S]


def walk(logits: Tensor, forest: Forest, choices: Choices) -> Paths:
    """logits [N, V] -> paths."""
    sessions = len(forest.roots)
    here, live = forest.roots.clone(), torch.arange(sessions, device=logits.device)
    rows = forest.roots.new_full((sessions, 1 + forest.deepest), -1)
    count, token = torch.zeros_like(here), torch.full_like(here, -1)
    finite = torch.ones_like(here, dtype=torch.bool)
    for depth in range(1 + forest.deepest):
        rows[live, depth] = here[live]
        count[live] += 1
        token[live], finite[live] = choose(logits, here[live], forest, choices)
        below = _child(forest, here[live], token[live])
        live, below = live[below >= 0], below[below >= 0]
        if not len(live):
            break
        here[live] = below
    return Paths(rows, count, token, finite)


def _child(forest: Forest, rows: Tensor, tokens: Tensor) -> Tensor:
    """The first child [n] of each of `rows` [n] that holds the token, -1 where there is none."""
    match = (forest.parents == rows[:, None]) & (forest.tokens == tokens[:, None])  # [n, N]
    return torch.where(match.any(-1), match.int().argmax(-1), -1)


def choose(logits: Tensor, rows: Tensor, forest: Forest, choices: Choices) -> tuple[Tensor, Tensor]:
    """The tokens [n] that `rows` [n] choose, and whether each row's best adjusted logit is finite [n]."""
    params = [choices.params[s] for s in forest.sessions[rows].tolist()]
    if choices.adjustment is None and all(p.greedy for p in params):
        best, tokens = logits[rows].max(-1)
        return tokens, best.isfinite()
    x = logits[rows]
    if choices.adjustment is not None or any(map(_filters, params)):
        x = adjusted(x.double(), rows, choices.adjustment)
    best, tokens = x.max(-1)
    finite = best.isfinite()
    scored = finite.tolist()
    for draw, kind in ((_draw_filtered, True), (_draw_from_all, False)):
        own = [i for i, p in enumerate(params) if scored[i] and not p.greedy and _filters(p) is kind]
        if own:
            mine = x if len(own) == len(x) else x[own]
            tokens[own] = draw(mine, best[own], [params[i] for i in own], forest.positions[rows[own]])
    return tokens, finite


def adjusted(x: Tensor, rows: Tensor, adjustment: Adjustment | None) -> Tensor:
    """Logits [n, V] of `rows` [n] after bias and penalties, in place."""
    if adjustment is None:
        return x
    at, entry = (adjustment.rows == rows[:, None]).nonzero(as_tuple=True)  # [a] each
    token = adjustment.tokens[entry]
    value = x[at, token] + adjustment.bias[entry].to(x.dtype)
    factor = adjustment.repetition[entry].to(x.dtype)
    value = torch.where(value > 0, value / factor, value * factor)
    x[at, token] = value - adjustment.subtract[entry].to(x.dtype)
    return x


def _filters(p: Sampling) -> bool:
    return not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)


def _draw_from_all(x: Tensor, high: Tensor, params: list[Sampling], positions: Tensor) -> Tensor:
    """Sampled tokens [n] from adjusted logits [n, V] and their maxima [n], for rows without filters.

    All scores in float32, then the few near the best in float64; a few rows at a time, so that they stay in the cache.
    """
    seeds, temperature = _seeds_and_temperatures(params, x.device)
    doubt = 1e-4 + 1e-6 * (high / temperature).abs()  # more than float32 errs near the best
    out = []
    for some in (slice(i, i + _ROWS_AT_ONCE) for i in range(0, len(x), _ROWS_AT_ONCE)):
        rough = x[some].float() / temperature[some, None].float()
        rough -= minus_all_gumbel(seeds[some], positions[some], x.shape[1])
        best, first = rough.max(-1)
        near = rough >= (best - doubt[some]).float()[:, None]
        for i in (near.sum(-1) > 1).nonzero()[:, 0].tolist():
            ids, row = near[i].nonzero()[:, 0], some.start + i
            score = x[row, ids].double() / temperature[row] + gumbel(seeds[row], positions[row], ids)
            first[i] = ids[score.argmax()]  # equal scores: the lowest id
        out.append(first)
    return torch.cat(out)


def _draw_filtered(x: Tensor, high: Tensor, params: list[Sampling], positions: Tensor) -> Tensor:
    """As `_draw_from_all`, for rows with filters: only what they leave is scored."""
    seeds, temperature = _seeds_and_temperatures(params, x.device)
    row, token = (x >= thresholds(x, params)[:, None]).nonzero(as_tuple=True)
    score = x[row, token].double() / temperature[row] + gumbel(seeds[row], positions[row], token)
    best = torch.full_like(temperature, -torch.inf).scatter_reduce_(0, row, score, "amax")
    winners = torch.where(score == best[row], token, x.shape[1])  # equal scores: the lowest id
    return torch.full_like(seeds, x.shape[1]).scatter_reduce_(0, row, winners, "amin")


def _seeds_and_temperatures(params: list[Sampling], device: torch.device) -> tuple[Tensor, Tensor]:
    seeds = torch.tensor([p.seed for p in params], device=device)
    return seeds, torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)


def thresholds(x: Tensor, params: list[Sampling]) -> Tensor:
    """The smallest logit [n] that top-k, top-p and min-p leave in each row of adjusted logits [n, V]; -inf if all."""
    out = torch.full_like(x[:, 0], -torch.inf)
    for i, p in enumerate(params):
        if _filters(p):
            out[i] = _threshold(x[i], p)
    return out


def _threshold(x: Tensor, p: Sampling) -> Tensor:
    """As NumPy's `_survivors`, for one row [V]: every filter keeps what reaches a value, so the last value decides."""
    scale = 1.0 if p.temperature_last else p.temperature
    least = x.new_tensor(-torch.inf)
    if 0 < p.top_k < len(x):
        least = x.topk(p.top_k).values[-1]
    if p.top_p < 1:
        edge = _top_p_edge(x[x >= least] / scale, p.top_p)
        least = x[x / scale >= edge].min()
    if p.min_p > 0:
        floor = x.max() / scale + float(np.log(p.min_p))
        least = torch.maximum(least, x[x / scale >= floor].min())
    return least


def _top_p_edge(x: Tensor, top_p: float) -> Tensor:
    """The smallest logit of the smallest set of likeliest ones [n] whose probability reaches `top_p`; -inf if none does."""
    high = x.max()
    total = (x - high).exp().sum()
    for head in (min(_TOP_P_HEAD, len(x)), len(x)):  # mostly, a few suffice
        top = x.topk(head).values
        reached = (top - high).exp().cumsum(0) >= top_p * total
        if reached.any():
            return top[int(reached.int().argmax())]
    return x.new_tensor(-torch.inf)
