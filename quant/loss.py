"""What a draft is trained on, and the measure it is stopped by."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .decoder import EMBEDDING, Shape, embed, head, hidden
from .text import Batch
from .trim import Trim

OTHERS = 2048  # rows drawn besides those that a batch names


def logits(shape: Shape, w: Mapping[str, Tensor], trim: Trim, batch: Batch, rows: Tensor | None = None) -> Tensor:
    """The draft's logits for each answer token, [N, R]; rows: only for these rows of the head."""
    x = embed(shape, w[EMBEDDING], trim.to_row[batch.tokens])
    table = head(w) if rows is None else head(w)[rows]
    return F.linear(hidden(shape, w, x).flatten(0, 1)[batch.at], table).float()


def candidates(row: Tensor, total: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The rows a batch's softmax runs over, `row` as places among them, and what to add to their logits.

    row: [N, 16], -1 where the draft has none. Every row that the target thinks likely anywhere in the batch is there, and
    `OTHERS` drawn from the rest, each of which stands for its share of it: sampled softmax (Bengio and Senecal 2008), whose sum
    over the vocabulary is right on average.
    """
    named = torch.zeros(total, dtype=torch.bool, device=row.device)
    named[row[row >= 0]] = True
    others = torch.zeros_like(named)
    others[torch.randint(total, (OTHERS,), generator=generator).to(row.device)] = True
    others &= ~named
    rows = (named | others).nonzero().squeeze(1)
    place = torch.where(named, (named | others).cumsum(0) - 1, -1)
    share = (total - named.sum()) / others.sum().clamp(min=1)
    weight = torch.where(others[rows], share.log(), 0.0)
    return rows, torch.where(row >= 0, place[row.clamp(min=0)], -1), weight


def divergence(scores: Tensor, row: Tensor, logp: Tensor) -> Tensor:
    """Summed KL divergence from the target's likeliest tokens and the rest of its mass, in nats.

    scores: [N, R] the draft's logits; row: [N, 16] rows of the target's likeliest ids, -1 where the draft has none (their mass
    joins the rest); logp: [N, 16].
    """
    log_q = scores.gather(1, row.clamp(min=0)) - scores.logsumexp(1, keepdim=True)
    there = row >= 0
    p, log_q = torch.where(there, logp.exp(), 0.0), torch.where(there, log_q, 0.0)
    q = torch.where(there, log_q.exp(), 0.0)
    rest_p, rest_q = (1 - p.sum(1)).clamp(min=1e-6), (1 - q.sum(1)).clamp(min=1e-6)
    kept = (p * (p.clamp(min=1e-9).log() - log_q)).sum(1)
    return (kept + rest_p * (rest_p.log() - rest_q.log())).sum()


def hits(scores: Tensor, trim: Trim, batch: Batch) -> tuple[int, int, int]:
    """How often the target's first choice is the draft's, and among its four likeliest; and of how many."""
    likeliest = trim.to_target[scores.topk(4).indices]
    first = batch.top[:, :1]
    return int((likeliest[:, :1] == first).sum()), int((likeliest == first).any(1).sum()), len(first)
