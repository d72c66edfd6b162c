"""On-policy text: the draft answers the prompts of its training text, and the target says what it would have said at each place.

Late in training a draft sees, some tokens ahead of its target, mostly its own words; this text is like that (after generalised
knowledge distillation, arXiv 2306.13649). Knows nothing of when it is wanted or where it is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .chat import chat_of
from .decoder import EMBEDDING, HEAD, Shape, embed, head, hidden
from .student import Student
from .target import Target, in_memory
from .text import TOP, OwnText
from .writer import ANSWER_TEMPERATURES, Chat, Row, write

CONVERSATIONS, LENGTH = 96, 256  # written at once; tokens each
SCORED = 1100  # padded tokens scored at a time


def on_policy(
    target: Target, source: Path, student: Student, text: OwnText, chosen: NDArray[np.int64], seed: int
) -> OwnText:
    """Answers by the draft to some of the chosen conversations' prompts, with the target's likeliest tokens along them.

    source: the target's path, for its chat. Holds the target in the working type meanwhile.
    """
    device = student.trim.to_row.device
    written = answers(student, chat_of(source)[0], text, chosen, seed)
    w = in_memory(target, device)
    return scored(target.shape, w, written)


def answers(student: Student, chat: Chat, text: OwnText, chosen: NDArray[np.int64], seed: int) -> OwnText:
    """What the draft, rounded as it ships, answers to prompts of the text; its own likeliest tokens stand beside it."""
    dice = np.random.default_rng(seed)
    short = [int(i) for i in chosen if text.rs[i] <= LENGTH // 2]
    picked = dice.permutation(short)[:CONVERSATIONS]
    temperatures = dice.choice(ANSWER_TEMPERATURES, len(picked))
    prompts = [text.conversation(i)[: text.rs[i]].tolist() for i in picked]
    rows = [Row(p, float(t), answer=len(p)) for p, t in zip(prompts, temperatures, strict=True)]
    w, trim = student.weights(), student.trim
    w[HEAD] = head(w)
    w[EMBEDDING] = w[EMBEDDING][trim.to_row]  # so that the target's ids can be fed as they are
    return write(student.shape, w, chat, rows, LENGTH, seed, to_target=trim.to_target)


@torch.no_grad()
def scored(shape: Shape, w: Mapping[str, Tensor], text: OwnText) -> OwnText:
    """The same text with the likeliest tokens of the model w for each answer token. w: weights, ids as rows."""
    ti, tv = np.zeros_like(text.ti), np.zeros_like(text.tv)
    device = w[EMBEDDING].device
    for group in text.batches(np.arange(len(text)), SCORED):
        batch = text.batch(group).to(device)
        x = embed(shape, w[EMBEDDING], batch.tokens)
        scores = F.linear(hidden(shape, w, x).flatten(0, 1)[batch.at], head(w)).float()
        best = torch.log_softmax(scores, 1).topk(TOP)
        spans = np.concatenate([np.arange(text.answer[i], text.answer[i + 1]) for i in group])
        ti[spans], tv[spans] = best.indices.cpu().numpy(), best.values.cpu().numpy()
    return replace(text, ti=ti, tv=tv)
