"""The target writes its own training text: a chat's opening is given, the user's turn is sampled, the answer follows.

All rows of a batch advance one position a step, whether a token is given or chosen, so no padding is needed and prompts of any
length mix. Knows the chat's token sequences, not how they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .decoder import (
    EMBEDDING,
    LAST_NORM,
    Rotation,
    Shape,
    after,
    attending,
    embed,
    feed_forward,
    head,
    linear,
    norm,
    queries_keys_values,
    rotations,
)
from .text import TOP, OwnText

USER_CHOICES = 24  # the user's turn is drawn among so many likeliest tokens at temperature 1
ANSWER_TEMPERATURES = (0.0, 0.0, 0.5, 0.8)


@dataclass(frozen=True)
class Chat:
    """Token sequences around the turns. opening: up to where the user's words begin; reply: from the end of the user's words to
    where the answer begins; ends: tokens that end a turn."""

    opening: list[int]
    reply: list[int]
    ends: frozenset[int]


@dataclass
class Row:
    """One conversation being written. given: tokens still to be fed as they are."""

    given: list[int]
    temperature: float
    tokens: list[int] = field(default_factory=list)
    answer: int = 0  # where the answer begins, 0 while the user speaks
    done: bool = False

    @property
    def heat(self) -> float:
        """The temperature of its next token."""
        return self.temperature if self.answer else 1.0


class Cache:
    """Keys and values of every layer that has attention, [B, G, T, head_dim], filled one position at a time."""

    def __init__(self, shape: Shape, w: Mapping[str, Tensor], rows: int, length: int) -> None:
        table = w[EMBEDDING]
        self.k, self.v = ({i: self._empty(shape, w, i, rows, length) for i in attending(shape, w)} for _ in "kv")
        self.turns: list[Rotation] = rotations(shape, length, table.device)

    @staticmethod
    def _empty(shape: Shape, w: Mapping[str, Tensor], i: int, rows: int, length: int) -> Tensor:
        heads = len(w[f"blk.{i}.attn_k.weight"]) // shape.head_dim
        return w[EMBEDDING].new_zeros(rows, heads, length, shape.head_dim)


def step(shape: Shape, w: Mapping[str, Tensor], cache: Cache, tokens: Tensor, at: int) -> Tensor:
    """Feed tokens [B] at position `at`; returns the logits for the next position, [B, V] float32."""
    x = embed(shape, w[EMBEDDING], tokens[:, None])
    for i in range(shape.layers):
        if i in cache.k:
            x = x + attention_step(shape, w, cache, i, x, at)
        x = x + feed_forward(shape, w, i, x)
    return F.linear(norm(x, w[LAST_NORM], shape.eps)[:, 0], head(w)).float()


def attention_step(shape: Shape, w: Mapping[str, Tensor], cache: Cache, i: int, x: Tensor, at: int) -> Tensor:
    """The attention branch of layer i at one position, without its residual. x: [B, 1, D]."""
    p, turn = f"blk.{i}.", (cache.turns[i][0][at : at + 1], cache.turns[i][1][at : at + 1])
    q, k, v = queries_keys_values(shape, w, i, norm(x, w[p + "attn_norm.weight"], shape.eps), turn)
    cache.k[i][:, :, at : at + 1], cache.v[i][:, :, at : at + 1] = k, v
    start = max(0, at + 1 - shape.window) if shape.local(i) else 0
    q = q.reshape(len(q), k.shape[1], -1, shape.head_dim)  # [B, G, H / G, head_dim]: a group's queries share its keys
    keys, values = cache.k[i][:, :, start : at + 1], cache.v[i][:, :, start : at + 1]
    mixed = F.scaled_dot_product_attention(q, keys, values).flatten(1)[:, None]
    return after(w, p + "post_attention_norm.weight", linear(w, p + "attn_output", mixed), shape.eps)


@torch.no_grad()
def write(
    shape: Shape,
    w: Mapping[str, Tensor],
    chat: Chat,
    rows: Sequence[Row],
    length: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    to_target: Tensor | None = None,
) -> OwnText:
    """Write the rows' conversations, at most `length` tokens each. w: weights, all in memory; to_target: the id of each
    row of the head, where rows are not ids."""
    device = w[EMBEDDING].device
    generator = torch.Generator(device="cpu").manual_seed(seed)
    cache, likeliest = Cache(shape, w, len(rows), length), Likeliest()
    for at in range(length - 1):
        for row in rows:
            if row.given:
                row.tokens.append(row.given.pop(0))
        if all(row.done for row in rows):
            break
        tokens = torch.tensor([row.tokens[at] if at < len(row.tokens) else 0 for row in rows], device=device)
        best = torch.log_softmax(step(shape, w, cache, tokens, at), -1).topk(max(TOP, USER_CHOICES))
        logp = best.values.cpu()
        ids = (best.indices if to_target is None else to_target[best.indices]).cpu()
        likeliest.append(ids, logp)
        places = chosen(logp, torch.tensor([row.heat for row in rows]), generator)
        for row, token in zip(rows, ids.gather(1, places[:, None])[:, 0].tolist(), strict=True):
            if not row.done and not row.given:
                advance(row, token, chat, length // 3)
        progress(at + 1, length - 1)
    return collected(rows, likeliest)


class Likeliest:
    """The likeliest ids after each position of every row, and their log-probabilities: a list of [B, 16] each."""

    def __init__(self) -> None:
        self.ids: list[NDArray[np.int32]] = []
        self.logp: list[NDArray[np.float16]] = []

    def append(self, ids: Tensor, logp: Tensor) -> None:
        self.ids.append(ids[:, :TOP].numpy().astype(np.int32))
        self.logp.append(logp[:, :TOP].numpy().astype(np.float16))


def chosen(logp: Tensor, heat: Tensor, generator: torch.Generator) -> Tensor:
    """Which of its likeliest tokens [B, 24] each row takes, [B]: drawn at its temperature [B], the first at 0."""
    share = torch.softmax(logp[:, :USER_CHOICES] / heat.clamp(min=1e-3)[:, None], 1)
    return torch.where(heat > 0, torch.multinomial(share, 1, generator=generator)[:, 0], 0)


def advance(row: Row, token: int, chat: Chat, patience: int) -> None:
    """Give the row the token that was chosen for it.

    A user's turn that has not ended after `patience` tokens is cut there.
    """
    user = row.answer == 0
    if user and (token in chat.ends or len(row.tokens) >= patience + len(chat.opening)):
        row.given = list(chat.reply)
        row.answer = len(row.tokens) + len(chat.reply)
        return
    row.tokens.append(token)
    row.done = not user and token in chat.ends


def collected(rows: Sequence[Row], likeliest: Likeliest) -> OwnText:
    """The conversations whose answers have at least eight tokens, as training text."""
    kept = [(b, row) for b, row in enumerate(rows) if row.answer and len(row.tokens) - row.answer >= 8]
    answers = [len(r.tokens) - r.answer for _, r in kept]
    # The token at a position was chosen among the likeliest after the one before it.
    spans = [(b, at - 1) for b, r in kept for at in range(r.answer, len(r.tokens))]
    ids = [likeliest.ids[at][b] for b, at in spans]
    logp = [likeliest.logp[at][b] for b, at in spans]
    return OwnText(
        toks=np.array([t for _, r in kept for t in r.tokens], np.int32),
        lens=np.array([len(r.tokens) for _, r in kept], np.int64),
        rs=np.array([r.answer for _, r in kept], np.int64),
        nl=np.array(answers, np.int64),
        ti=np.array(ids).reshape(-1, TOP).astype(np.int32),
        tv=np.array(logp).reshape(-1, TOP).astype(np.float16),
    )


def openings(chat: Chat, count: int, seed: int, prompts: Sequence[list[int]] = ()) -> list[Row]:
    """Rows to write: from the user's own prompts where given (token ids of their words), else from the bare opening."""
    temperatures = np.random.default_rng(seed).choice(ANSWER_TEMPERATURES, count)
    rows = []
    for i in range(count):
        if prompts:
            given = chat.opening + prompts[i % len(prompts)] + chat.reply
            rows.append(Row(given, float(temperatures[i]), answer=len(given)))
        else:
            answer = 0 if chat.reply else len(chat.opening)
            rows.append(Row(list(chat.opening), float(temperatures[i]), answer=answer))
    return rows
