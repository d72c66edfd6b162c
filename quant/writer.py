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
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    done: bool = False


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
    cache = Cache(shape, w, len(rows), length)
    for at in range(length - 1):
        for row in rows:
            if row.given:
                row.tokens.append(row.given.pop(0))
        if all(row.done for row in rows):
            break
        tokens = torch.tensor([row.tokens[at] if at < len(row.tokens) else 0 for row in rows], device=device)
        logp = torch.log_softmax(step(shape, w, cache, tokens, at), -1)
        best = logp.topk(max(TOP, USER_CHOICES))
        values = best.values.cpu()
        ids = (best.indices if to_target is None else to_target[best.indices]).cpu()
        for b, row in enumerate(rows):
            if not row.done and not row.given:
                advance(row, ids[b], values[b], chat, generator, length // 3)
        progress(at + 1, length - 1)
    return collected(rows)


def advance(row: Row, ids: Tensor, logp: Tensor, chat: Chat, generator: torch.Generator, patience: int) -> None:
    """Choose the row's next token from its likeliest ids [24] and their log-probabilities.

    A user's turn that has not ended after `patience` tokens is cut there.
    """
    user = row.answer == 0
    if not user:
        row.top.append((ids[:TOP].numpy().copy(), logp[:TOP].numpy().copy()))
    temperature = 1.0 if user else row.temperature
    if temperature == 0:
        choice = 0
    else:
        choice = int(torch.multinomial(torch.softmax(logp[:USER_CHOICES] / temperature, 0), 1, generator=generator))
    token = int(ids[choice])
    if user and (token in chat.ends or len(row.tokens) >= patience + len(chat.opening)):
        row.given = list(chat.reply)
        row.answer = len(row.tokens) + len(chat.reply)
        return
    row.tokens.append(token)
    row.done = not user and token in chat.ends


def collected(rows: Sequence[Row]) -> OwnText:
    """The conversations whose answers have at least eight tokens, as training text."""
    kept = [row for row in rows if row.answer and len(row.tokens) - row.answer >= 8]
    answers = [len(r.tokens) - r.answer for r in kept]
    tops = [pair for r, n in zip(kept, answers, strict=True) for pair in r.top[:n]]
    empty = np.zeros((0, TOP))
    return OwnText(
        toks=np.array([t for r in kept for t in r.tokens], np.int32),
        lens=np.array([len(r.tokens) for r in kept], np.int64),
        rs=np.array([r.answer for r in kept], np.int64),
        nl=np.array(answers, np.int64),
        ti=np.array([t[0] for t in tops] or empty).astype(np.int32),
        tv=np.array([t[1] for t in tops] or empty).astype(np.float16),
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
