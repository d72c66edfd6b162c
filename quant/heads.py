"""Leaving heads out of a draft in training: those groups whose absence would change its loss least, over all layers together.

A group is a head of keys and values with the heads of queries that read it. What a group is worth is taken from gradients
(Michel, Levy and Neubig, arXiv 1905.10650): the loss's slope along a gate on its output, squared and summed over batches. In
a small draft attention costs more than its weights say, since it reads the whole text in every layer; much of it can be spared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .decoder import ATTENTION
from .errors import RecipeError
from .grids import BLOCK
from .loss import divergence, logits
from .student import Parameter, Student
from .text import OwnText

TOKENS = 1100  # padded tokens of a batch
STAGES = 4  # times that the worth of what is left is taken anew
Progress = Callable[[int, int], None]


def _silent(done: int, total: int) -> None: ...


def worth(student: Student, text: OwnText, chosen: Sequence[int]) -> list[Tensor]:
    """For each layer, what its groups are worth along the chosen conversations: [groups of the layer], squared nats."""
    span = student.shape.heads // student.shape.kv_heads * student.shape.head_dim
    w = student.weights()
    outs = {i: w[f"blk.{i}.attn_output.weight"].requires_grad_() for i, n in enumerate(student.layout().kv_heads) if n}
    device = student.trim.to_row.device
    row = student.trim.row_or_none(len(student.trim.to_row)).to(device)
    found = [torch.zeros(n) for n in student.layout().kv_heads]
    for group in text.batches(np.array(chosen), TOKENS):
        batch = text.batch(group).to(device)
        loss = divergence(logits(student.shape, w, student.trim, batch), row[batch.top], batch.logp)
        slopes = torch.autograd.grad(loss, list(outs.values()))
        for (i, out), slope in zip(outs.items(), slopes, strict=True):
            found[i] += (out.detach() * slope).float().sum(0).view(-1, span).sum(1).pow(2).cpu()
    return found


def thin(student: Student, keep: int, text: OwnText, chosen: Sequence[int], progress: Progress = _silent) -> None:
    """Leave out of the student, in place, all but `keep` groups in all; in stages, since what is left takes over.

    Optimiser moments go with their weights. Raises `RecipeError` where there are fewer.
    """
    have = sum(student.layout().kv_heads)
    if (span := student.shape.heads // student.shape.kv_heads * student.shape.head_dim) % BLOCK:
        raise RecipeError(
            f"A head of keys serves {span} values of the stream, not a multiple of {BLOCK}: keep them all."
        )
    if not 0 < keep <= have:
        raise RecipeError(f"The draft has {have} heads of keys in all; {keep} of them cannot be kept.")
    for stage in range(STAGES):
        left = have - round((have - keep) * (stage + 1) / STAGES)
        if left < sum(student.layout().kv_heads):
            keep_best(student, left, worth(student, text, chosen))
        progress(stage + 1, STAGES)


def keep_best(student: Student, count: int, found: Sequence[Tensor]) -> None:
    """Leave the `count` groups that are worth most. found: of each layer, its groups' worth."""
    best = torch.cat(list(found)).argsort(descending=True, stable=True)[:count]
    kept = torch.zeros(sum(map(len, found)), dtype=torch.bool)
    kept[best] = True
    for i, mine in enumerate(kept.split([len(values) for values in found])):
        if len(mine):
            keep_groups(student, i, mine.nonzero().flatten().tolist())


def keep_groups(student: Student, i: int, kept: Sequence[int]) -> None:
    """Leave layer i of the student these groups of its attention only; with none it has no attention at all."""
    shape, p = student.shape, f"blk.{i}."
    if not kept:
        for name in [n for n in student.parameters if n.startswith((p + "attn_", p + "post_attention_"))]:
            del student.parameters[name]
        return
    keys = _spans(kept, shape.head_dim)
    queries = _spans(kept, shape.heads // shape.kv_heads * shape.head_dim)
    for stem, take, at in zip(ATTENTION, (_rows, _rows, _rows, _columns), (queries, keys, keys, queries), strict=True):
        name = f"{p}{stem}.weight"
        student.parameters[name] = take(student.parameters[name], at)


def _spans(kept: Sequence[int], size: int) -> Tensor:
    return torch.cat([torch.arange(g * size, (g + 1) * size) for g in kept])


def _rows(p: Parameter, at: Tensor) -> Parameter:
    """Of a matrix, some rows."""
    return Parameter(**{name: t[at].clone() for name, t in vars(p).items()})


def _columns(p: Parameter, at: Tensor) -> Parameter:
    """Of a matrix, some columns, whole blocks of them."""
    blocks = at[::BLOCK] // BLOCK
    wide = {k: getattr(p, k)[:, at].clone() for k in ("value", "first", "second")}
    scales = {k: getattr(p, k)[:, blocks].clone() for k in ("base", "log", "log_first", "log_second")}
    return replace(p, **wide, **scales)
