"""The target's own text as training data: conversations with the target's likeliest tokens for each answer token.

A file (npz) holds conversations one after another: `toks` int32 all ids, `lens` tokens a conversation, `rs` where its answer
begins, `nl` its answer tokens; `ti`, `tv` [answer tokens, 16]: the target's likeliest ids for each answer token and their
log-probabilities. Knows nothing of who wrote it.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import WeightsError
from .landing import landing

TOP = 16
_ARRAYS = ("toks", "lens", "rs", "nl", "ti", "tv")


@dataclass(frozen=True)
class Batch:
    """tokens: [B, S] right-padded; at: flat positions in [B * S] that predict an answer token; top, logp: [N, 16]."""

    tokens: Tensor
    at: Tensor
    top: Tensor
    logp: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(t.to(device) for t in (self.tokens, self.at, self.top, self.logp)))


@dataclass
class OwnText:
    toks: NDArray[np.int32]
    lens: NDArray[np.int64]
    rs: NDArray[np.int64]
    nl: NDArray[np.int64]
    ti: NDArray[np.int64]
    tv: NDArray[np.float16]

    def __post_init__(self) -> None:
        self.start = np.concatenate([[0], np.cumsum(self.lens)])
        self.answer = np.concatenate([[0], np.cumsum(self.nl)])

    def __len__(self) -> int:
        return len(self.lens)

    def conversation(self, i: int) -> NDArray[np.int32]:
        return self.toks[self.start[i] : self.start[i + 1]]

    def split(self, held: int, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Conversations to train on and to hold out; the same for every run over the same text."""
        order = np.random.default_rng(seed).permutation(len(self))
        return np.sort(order[held:]), np.sort(order[:held])

    def batch(self, chosen: Sequence[int]) -> Batch:
        longest = max(int(self.lens[i]) for i in chosen)
        tokens = np.zeros((len(chosen), longest), np.int64)
        for row, i in enumerate(chosen):
            tokens[row, : self.lens[i]] = self.conversation(i)
        at = [row * longest + np.arange(self.rs[i] - 1, self.lens[i] - 1) for row, i in enumerate(chosen)]
        answers = np.concatenate([np.arange(self.answer[i], self.answer[i + 1]) for i in chosen])
        top, logp = self.ti[answers].astype(np.int64), self.tv[answers].astype(np.float32)
        return Batch(*map(torch.from_numpy, (tokens, np.concatenate(at), top, logp)))

    def batches(
        self, chosen: NDArray[np.int64], tokens: int, rng: np.random.Generator | None = None
    ) -> list[list[int]]:
        """Groups of conversations of like length, at most `tokens` padded tokens each (or one conversation)."""
        jitter = rng.integers(0, 12, len(chosen)) if rng is not None else 0
        order = chosen[np.argsort(self.lens[chosen] + jitter, kind="stable")]
        groups: list[list[int]] = [[]]
        for i in order:
            longest = max(int(self.lens[j]) for j in [*groups[-1], i])
            if groups[-1] and longest * (len(groups[-1]) + 1) > tokens:
                groups.append([])
            groups[-1].append(int(i))
        if rng is not None:
            rng.shuffle(groups)
        return groups

    def usage(self, chosen: NDArray[np.int64], vocabulary: int) -> NDArray[np.float64]:
        """How often each id is met: counted in the text, and expected from the target's probabilities (which also see the
        words that it nearly wrote, and so rank rare ids better than counts alone)."""
        count = np.zeros(vocabulary)
        for i in chosen:
            count += np.bincount(self.conversation(int(i)), minlength=vocabulary)[:vocabulary]
            span = slice(self.answer[i], self.answer[i + 1])
            chance = np.exp(self.tv[span].astype(np.float64)).ravel()
            count += np.bincount(self.ti[span].ravel().astype(np.int64), chance, minlength=vocabulary)[:vocabulary]
        return count

    def rows(self, chosen: NDArray[np.int64], length: int, count: int, seed: int = 1) -> Tensor:
        """Up to `count` conversations cut to `length` tokens, [N, length], for calibration; shorter ones are left out."""
        fit = [int(i) for i in chosen if self.lens[i] >= length]
        if not fit:
            raise WeightsError(f"No conversation of {length} tokens to calibrate on; let the target write more text.")
        np.random.default_rng(seed).shuffle(fit)
        return torch.from_numpy(np.stack([self.conversation(i)[:length] for i in fit[:count]]).astype(np.int64))


def load(path: Path) -> OwnText:
    """Raises `WeightsError` when the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            text = OwnText(**{name: file[name] for name in _ARRAYS})
        tokens, answers = int(text.lens.sum()), int(text.nl.sum())
        whole = len(text.toks) == tokens and text.ti.shape == text.tv.shape == (answers, TOP)
        if not whole or (text.nl != text.lens - text.rs).any() or (text.rs < 1).any():
            raise ValueError("its arrays contradict each other")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise WeightsError(
            f"{path} is not a usable file of training text: {error}. Delete it; it is written again."
        ) from error
    return text


def save(path: Path, text: OwnText) -> None:
    with landing(path) as part, part.open("wb") as file:
        np.savez_compressed(file, **{name: getattr(text, name) for name in _ARRAYS})


def joined(texts: Sequence[OwnText]) -> OwnText:
    return OwnText(**{name: np.concatenate([getattr(t, name) for t in texts]) for name in _ARRAYS})


def shards(folder: Path) -> Iterator[Path]:
    """The files of a cache folder, in the order they were written."""
    yield from sorted(folder.glob("text-*.npz"))
