"""From a draft's logits to a candidate set, in torch: what a draft and its predictor work out for every node.

    score_v = log q_v + G(seed, position, v)      q the softmax of logits / temperature; greedy: score_v = log q_v
    the F best by score, best first, each with the calibrated chance that the target takes it

The calibration is a table [F, B]: the chance for the candidate of rank j whose -log q falls into bin b, as an online predictor
counts it. Noise is that of the target's own choice (ALGORITHMS: coupled rule), so ranks are comparable across the two ends.
"""

from dataclasses import dataclass

import torch
from paceline.kernels.philox import gumbel
from torch import Tensor


@dataclass(frozen=True)
class Calibration:
    chance: Tensor  # [F, B] float32
    bins_a_nat: float  # bin of a candidate: floor(-log q * bins_a_nat), at most B - 1


@dataclass(frozen=True)
class Candidates:
    """Best first, [R, F] each."""

    tokens: Tensor
    log_q: Tensor
    chance: Tensor


def candidates(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, table: Calibration) -> Candidates:
    """logits [R, V]; seeds, positions [R]; temperature [R], 0 for greedy. Equal scores: the lowest id first."""
    sampled = temperature > 0
    scale = torch.where(sampled, temperature, 1.0)[:, None].double()
    log_q = torch.log_softmax(logits.double() / scale, dim=-1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel(seeds[:, None], positions[:, None], ids[None, :])
    score = torch.where(sampled[:, None], log_q + noise, log_q)
    tokens = score.sort(descending=True, stable=True).indices[:, : len(table.chance)]
    own = log_q.gather(1, tokens)
    bins = (-own * table.bins_a_nat).long().clamp(0, table.chance.shape[1] - 1)
    rank = torch.arange(tokens.shape[1], device=logits.device)
    return Candidates(tokens, own.float(), table.chance[rank, bins])
