"""`paceline draft ngrams` as a function: a target's own text counted into a table of n-grams (`paceline.protocol.ngrams`)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from paceline.protocol.ngrams import BITS, IDEAS, SIZES, Gram, Ngrams, packed

from . import store
from .errors import RecipeError
from .factory import split
from .landing import landing
from .shipped import NGRAMS
from .target import open_target, vocabulary

LEAST = {3: 2, 2: 2, 1: 1}  # times a context of so many tokens must have been met
UNSEEN = 1.0  # times that something else would have followed, too


def counted(texts: Iterable[Sequence[int]], vocabulary: str) -> Ngrams:
    """The table of token sequences. vocabulary: its fingerprint. Raises `RecipeError` for tokens that are too large."""
    followers: dict[int, dict[int, Counter[int]]] = {size: defaultdict(Counter) for size in SIZES}
    for text in texts:
        if max(text, default=0) >> BITS:
            raise RecipeError(f"Tokens up to {(1 << BITS) - 1:,} can be counted; here is one of {max(text):,}.")
        for size in SIZES:
            for at in range(size, len(text)):
                followers[size][packed(text[at - size : at])][text[at]] += 1
    return Ngrams({size: _gram(found, LEAST[size]) for size, found in followers.items()}, vocabulary)


def _gram(found: dict[int, Counter[int]], least: int) -> Gram:
    keys = sorted(key for key, after in found.items() if after.total() >= least)
    tokens, shares = np.full((len(keys), IDEAS), -1, np.int32), np.zeros((len(keys), IDEAS), np.uint8)
    for row, key in enumerate(keys):
        total = found[key].total() + UNSEEN
        for place, (token, count) in enumerate(sorted(found[key].items(), key=lambda f: (-f[1], f[0]))[:IDEAS]):
            tokens[row, place], shares[row, place] = token, round(255 * count / total)
    return Gram(np.array(keys, np.int64), tokens, shares)


def make(
    source: Path,
    out: Path,
    conversations: int,
    prompts: Path | None = None,
    text_file: Path | None = None,
    cache: Path | None = None,
    device: torch.device | None = None,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Path, Ngrams]:
    """Write the table of the target at `source` to `out`, or into it where it is a folder; returns where, and the table.

    Held-out conversations are left out, as in training. Raises `RecipeError`, `WeightsError` and `DiskError`.
    """
    target = open_target(source)
    text = store.text(target, source, conversations, prompts, cache, device, progress=step, file=text_file)
    train, _ = split(text)
    table = counted((text.conversation(int(i)).tolist() for i in train), vocabulary(target).fingerprint)
    path = out / NGRAMS if out.is_dir() else out
    with landing(path) as part:
        table.save(part)
    return path, table
