"""Log-probabilities that a client asked for, from rows of logits on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def top_logprobs(logits: Tensor, chosen: Sequence[int], count: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    """For each row of raw logits [n, V]: (token, log-probability) of the chosen token, then of the `count` likeliest."""
    logp = torch.log_softmax(logits.double(), dim=-1)
    top = logp.topk(min(count, logp.shape[1]), dim=-1)
    own = logp.gather(1, torch.tensor(chosen, device=logits.device)[:, None])
    ids = torch.cat((torch.tensor(chosen, device=logits.device)[:, None], top.indices), dim=1).tolist()
    values = torch.cat((own, top.values), dim=1).tolist()
    return tuple(tuple((t, round(v, 4)) for t, v in zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
