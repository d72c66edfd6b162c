"""Choice of tokens and the walk down each tree, in Triton: logits stay where they are, only paths come out.

Three launches. `_threshold`, only where somebody filters: for every row the smallest logit that top-k, top-p and min-p leave,
found by bisection over the bit patterns of floats, so that ties are kept and nothing is sorted. `_choose`: Philox-Gumbel noise
and argmax over pieces of the vocabulary. `_walk`: join the pieces of a row, follow the child that holds the token, again until
there is none.

The rules are those of `paceline.protocol.sampling`, the random words are equal; scores here are float32, so a choice can differ
from NumPy's where the two best scores lie within about 1e-5 of each other.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from paceline.kernels.choice import Adjustment, Choices, Forest, Paths
from torch import Tensor

PIECE = 16_384  # vocabulary a program of `_choose` takes
BLOCK = 1024


def walk(logits: Tensor, forest: Forest, choices: Choices) -> Paths:
    """logits [N, V] -> paths."""
    return walk_with(adjusted(logits, choices.adjustment), forest, parameters(choices, logits.device))


@dataclass(frozen=True)
class Parameters:
    """Each session's, on the device. Filters are (scale, top-k, top-p, ln min-p); those that are off are 0, 1 and -inf."""

    temperature: Tensor  # [S], 0 for greedy
    seeds: Tensor  # [S]
    filters: Tensor | None  # [S, 4]; None where nobody filters


def walk_with(logits: Tensor, forest: Forest, parameters: Parameters) -> Paths:
    """Adjusted logits [N, V] -> paths: kernels alone, nothing from the host."""
    p = parameters
    least = thresholds(logits, forest, p.filters) if p.filters is not None else None
    best, token, sound = _best(logits, forest, p.temperature, p.seeds, least)
    sessions, pieces = len(forest.roots), best.shape[1]
    rows = forest.roots.new_full((sessions, 1 + forest.deepest), -1)
    count, chosen, finite = (torch.empty_like(forest.roots) for _ in range(3))
    _walk[(sessions,)](
        best, token, sound, forest.roots, forest.parents, forest.tokens, rows, count, chosen, finite,
        len(forest.parents), rows.shape[1], PIECES=pieces, PP=triton.next_power_of_2(pieces), BLOCK=64,
    )  # fmt: skip
    return Paths(rows, count, chosen, finite.bool())


def adjusted(logits: Tensor, adjustment: Adjustment | None) -> Tensor:
    """Logits after bias and penalties: a copy where there are any, as the raw ones are still wanted for log-probabilities."""
    if adjustment is None:
        return logits
    x, at = logits.clone(), (adjustment.rows, adjustment.tokens)
    value, factor = x[at] + adjustment.bias.to(x.dtype), adjustment.repetition.to(x.dtype)
    value = torch.where(value > 0, value / factor, value * factor)
    x[at] = value - adjustment.subtract.to(x.dtype)
    return x


def parameters(choices: Choices, device: torch.device) -> Parameters:
    rows, filtered = [], False
    for p in choices.params:
        on = not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        filtered = filtered or on
        scale = 1.0 if p.temperature_last or not on else p.temperature
        floor = math.log(p.min_p) if on and p.min_p else -math.inf
        kept = (scale, float(p.top_k), p.top_p, floor) if on else (scale, 0.0, 1.0, floor)
        rows.append((0.0 if p.greedy else p.temperature, *kept))
    table = torch.tensor(rows, dtype=torch.float32).to(device)
    seeds = torch.tensor([p.seed for p in choices.params], dtype=torch.int64).to(device)
    return Parameters(table[:, 0].contiguous(), seeds, table[:, 1:].contiguous() if filtered else None)


def thresholds(logits: Tensor, forest: Forest, filters: Tensor) -> Tensor:
    """The smallest logit [N] that each row's filters leave."""
    n, v = logits.shape
    least = logits.new_empty(n, dtype=torch.float32)
    _threshold[(n,)](
        logits, forest.sessions, filters, least, logits.stride(0), v, BLOCK=min(8192, triton.next_power_of_2(v))
    )
    return least


def _best(
    logits: Tensor, forest: Forest, temperature: Tensor, seeds: Tensor, least: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Best score, its token, and whether all was finite, of each row's pieces of the vocabulary [N, pieces]."""
    n, v = logits.shape
    pieces = triton.cdiv(v, PIECE)
    best = logits.new_empty((n, pieces), dtype=torch.float32)
    token = torch.empty((n, pieces), dtype=torch.int32, device=logits.device)
    sound = torch.empty_like(best)
    _choose[(n, pieces)](
        logits, forest.sessions, forest.positions, temperature, seeds, logits if least is None else least,
        best, token, sound, logits.stride(0), v, FILTERED=least is not None, PIECE=PIECE, BLOCK=BLOCK,
    )  # fmt: skip
    return best, token, sound


@triton.jit
def _choose(
    logits, sessions, positions, temperatures, seeds, least, best_out, token_out, sound_out, row_stride, v,
    FILTERED: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Argmax of log p + noise over one piece of one row. A Philox block serves four neighbouring tokens."""
    row, piece = tl.program_id(0), tl.program_id(1)
    session = tl.load(sessions + row)
    temperature = tl.load(temperatures + session)
    seed = tl.load(seeds + session)
    position = tl.load(positions + row)
    edge = -float("inf")
    if FILTERED:
        edge = tl.load(least + row)
    base = logits + row.to(tl.int64) * row_stride
    best, token = -float("inf"), 2147483647
    high, damage = -float("inf"), 0
    quads = tl.arange(0, BLOCK // 4)
    for start in range(piece * PIECE, tl.minimum((piece + 1) * PIECE, v), BLOCK):
        counter = start // 4 + quads
        words = counter.to(tl.uint32), counter.to(tl.uint32), counter.to(tl.uint32), counter.to(tl.uint32)
        if temperature > 0:
            zero = (counter * 0).to(tl.uint32)
            low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
            words = tl.philox(seed, counter.to(tl.uint32), zero, low, zero + (position >> 32).to(tl.uint32))
        for j in tl.static_range(4):
            id = counter * 4 + j
            x = tl.load(base + id, mask=id < v, other=-float("inf")).to(tl.float32)
            damage += tl.sum((x != x).to(tl.int32))
            high = tl.maximum(high, tl.max(x))
            score = x
            if temperature > 0:
                score = tl.where(x >= edge, x / temperature + _gumbel(words[j]), -float("inf"))
            top = tl.max(score)
            mine = tl.min(tl.where(score == top, id, 2147483647))
            if (top > best) | ((top == best) & (mine < token)):
                best, token = top, mine
    out = row * tl.num_programs(1) + piece
    tl.store(best_out + out, best)
    tl.store(token_out + out, token)
    tl.store(sound_out + out, tl.where(damage > 0, float("inf"), high))


@triton.jit
def _gumbel(word):
    """-log(-log1p(-v)), v = (word + 1/2) / 2^32, with log1p by Kahan's correction: v of few bits keeps them all."""
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = tl.minimum(v, 0.99999994)  # the largest words round up to 1
    u = 1.0 - v
    lost = u - 1.0
    exact = tl.where(lost == 0.0, v, -tl.log(u) * v / tl.where(lost == 0.0, 1.0, -lost))
    return -tl.log(exact)


@triton.jit
def _key(x):
    """Bit patterns of floats as integers in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _threshold(logits, sessions, filters, least, row_stride, v, BLOCK: tl.constexpr):
    """One row: k-th largest logit, then the edge of the top-p set above it, then min-p's floor; the highest decides."""
    row = tl.program_id(0)
    session = tl.load(sessions + row)
    scale = tl.load(filters + session * 4)
    top_k = tl.load(filters + session * 4 + 1)
    top_p = tl.load(filters + session * 4 + 2)
    min_p = tl.load(filters + session * 4 + 3)
    base = logits + row.to(tl.int64) * row_stride
    high = -float("inf")
    for start in range(0, v, BLOCK):
        high = tl.maximum(high, tl.max(_load(base, start, v, BLOCK)))
    edge = tl.full([], -2147483647 - 1, tl.int32)
    if (top_k > 0) & (top_k < v):
        edge = _bisect(base, v, edge, high, scale, top_k, False, BLOCK)
    if top_p < 1.0:
        total = _reach(base, v, edge, high, scale, True, BLOCK)
        edge = _bisect(base, v, edge, high, scale, top_p * total, True, BLOCK)
    bits = edge ^ ((edge >> 31) & 0x7FFFFFFF)
    kept = tl.where(edge == -2147483647 - 1, -float("inf"), bits.to(tl.float32, bitcast=True))
    tl.store(least + row, tl.maximum(kept, high + scale * min_p))


@triton.jit
def _load(base, start, v, BLOCK: tl.constexpr):
    id = start + tl.arange(0, BLOCK)
    return tl.load(base + id, mask=id < v, other=-float("inf")).to(tl.float32)


@triton.jit
def _reach(base, v, edge, high, scale, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits have keys from `edge` on, or how much probability they carry (up to a constant)."""
    out = 0.0
    for start in range(0, v, BLOCK):
        x = _load(base, start, v, BLOCK)
        inside = (_key(x) >= edge) & (x > -float("inf"))
        out += tl.sum(tl.where(inside, tl.exp((x - high) / scale) if MASS else 1.0, 0.0))
    return out


@triton.jit
def _bisect(base, v, floor, high, scale, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key from `floor` on whose reach is at least `wanted`."""
    low = floor.to(tl.int64)
    top = _key(high).to(tl.int64) + 1
    while top - low > 1:
        middle = (low + top) >> 1
        if _reach(base, v, middle.to(tl.int32), high, scale, MASS, BLOCK) >= wanted:
            low = middle
        else:
            top = middle
    return low.to(tl.int32)


@triton.jit
def _walk(
    best, token, sound, roots, parents, tokens, rows, count_out, token_out, finite_out, n, width,
    PIECES: tl.constexpr, PP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One session: from its root, the child that holds the row's choice, until there is none."""
    session = tl.program_id(0)
    here = tl.load(roots + session).to(tl.int32)
    piece = tl.arange(0, PP)
    count, finite, last = 0, 1, 0
    while here >= 0:
        tl.store(rows + session * width + count, here)
        count += 1
        at = here * PIECES + piece
        score = tl.load(best + at, mask=piece < PIECES, other=-float("inf"))
        id = tl.load(token + at, mask=piece < PIECES, other=2147483647)
        top = tl.max(tl.load(sound + at, mask=piece < PIECES, other=-float("inf")))
        if (top == float("inf")) | (top == -float("inf")):
            finite = 0
        last = tl.min(tl.where(score == tl.max(score), id, 2147483647))
        child = n
        for start in range(here + 1, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            parent = tl.load(parents + i, mask=i < n, other=-1)
            drafted = tl.load(tokens + i, mask=i < n, other=-1)
            child = tl.minimum(child, tl.min(tl.where((parent == here) & (drafted == last), i, n)))
        here = tl.where((child < n) & (finite == 1), child, -1)
    tl.store(count_out + session, count)
    tl.store(token_out + session, last)
    tl.store(finite_out + session, finite)
