"""From a draft's logits to a candidate set, in Triton and in one launch: log-softmax, noise, top-F, calibrated chance.

For drafts that run on a GPU: what follows a draft step is then one kernel instead of a dozen. One program a row; it reads the row
once for the sum and once for the candidates, and keeps the F best so far in registers.
"""

import torch
import triton
import triton.language as tl
from paceline.kernels.candidates import Calibration, Candidates
from paceline.kernels.choice_triton import _gumbel
from torch import Tensor

_NONE = 2147483647


def candidates(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, table: Calibration) -> Candidates:
    """logits [R, V]; seeds, positions [R]; temperature [R], 0 for greedy. F <= V. Equal scores: the lowest id first."""
    (rows, v), (f, bins) = logits.shape, table.chance.shape
    tokens = torch.empty((rows, f), dtype=torch.int64, device=logits.device)
    log_q, chance = (torch.empty((rows, f), dtype=torch.float32, device=logits.device) for _ in range(2))
    _candidates[(rows,)](
        logits, seeds, positions, temperature, table.chance, tokens, log_q, chance, logits.stride(0), v, bins,
        table.bins_a_nat, F=f, FP=triton.next_power_of_2(f), BLOCK=min(4096, max(4, triton.next_power_of_2(v))),
    )  # fmt: skip
    return Candidates(tokens, log_q, chance)


@triton.jit
def _candidates(
    logits, seeds, positions, temperatures, table, tokens_out, log_q_out, chance_out, row_stride, v, bins, bins_a_nat,
    F: tl.constexpr, FP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    scale = tl.where(temperature > 0, temperature, 1.0)
    base = logits + row.to(tl.int64) * row_stride
    high, total = -float("inf"), 0.0
    for start in range(0, v, BLOCK):
        id = start + tl.arange(0, BLOCK)
        x = tl.load(base + id, mask=id < v, other=-float("inf")).to(tl.float32) / scale
        new = tl.maximum(high, tl.max(x))
        total = total * tl.exp(high - new) + tl.sum(tl.exp(x - new))
        high = new
    norm = high + tl.log(total)

    seed, position = tl.load(seeds + row), tl.load(positions + row)
    slot = tl.arange(0, FP)
    best = tl.where(slot < F, -float("inf"), float("inf"))  # padding slots are never the worst
    who = tl.full([FP], 2147483647, tl.int32)
    for start in range(0, v, BLOCK):
        id = start + tl.arange(0, BLOCK)
        score = tl.load(base + id, mask=id < v, other=-float("inf")).to(tl.float32) / scale - norm
        if temperature > 0:
            zero = (id * 0).to(tl.uint32)
            low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
            w0, w1, w2, w3 = tl.philox(seed, (id // 4).to(tl.uint32), zero, low, zero + (position >> 32).to(tl.uint32))
            word = tl.where(id % 4 < 2, tl.where(id % 4 == 0, w0, w1), tl.where(id % 4 == 2, w2, w3))
            score = tl.where(id < v, score + _gumbel(word), -float("inf"))
        top = tl.max(score)
        while top > tl.min(best):  # ids come in ascending order, so an equal score never displaces an earlier one
            winner = tl.min(tl.where(score == top, id, 2147483647))
            worst = tl.min(best)
            last = tl.max(tl.where(best == worst, tl.where(who == 2147483647, 2147483647, who), -1))
            place = tl.min(tl.where((best == worst) & (who == last), slot, FP))
            best = tl.where(slot == place, top, best)
            who = tl.where(slot == place, winner, who)
            score = tl.where(id == winner, -float("inf"), score)
            top = tl.max(score)

    best = tl.where(slot < F, best, -float("inf"))
    for rank in range(F):
        top = tl.max(best)
        token = tl.min(tl.where(best == top, who, 2147483647))
        own = tl.load(base + token).to(tl.float32) / scale - norm
        bin = tl.minimum((-own * bins_a_nat).to(tl.int32), bins - 1)
        tl.store(tokens_out + row * F + rank, token.to(tl.int64))
        tl.store(log_q_out + row * F + rank, own)
        tl.store(chance_out + row * F + rank, tl.load(table + rank * bins + tl.maximum(bin, 0)))
        best = tl.where(who == token, -float("inf"), best)
        who = tl.where(who == token, 2147483647, who)
