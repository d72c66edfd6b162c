"""Which rows of a target's vocabulary a draft keeps, and which row stands in for each token it does not keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .decoder import working


@dataclass(frozen=True)
class Trim:
    """to_target: [R] target id of each row, ascending; to_row: [V] the row fed for each target id."""

    to_target: Tensor
    to_row: Tensor

    def row_or_none(self, vocabulary: int) -> Tensor:
        """[V]: the row of each target id, -1 where it has none of its own."""
        own = torch.full((vocabulary,), -1, device=self.to_target.device)
        own[self.to_target] = torch.arange(len(self.to_target), device=own.device)
        return own


def special(tokens: Sequence[str], kinds: NDArray[np.int64] | None) -> NDArray[np.bool_]:
    """Which ids must stay: control and user-defined tokens (GGUF types 3 and 4) and single bytes (6), or tokens spelled <...>."""
    if kinds is not None:
        return np.isin(kinds[: len(tokens)], (3, 4, 6))
    return np.array([t.startswith("<") and t.endswith(">") for t in tokens])


def rank_prior(vocabulary: int, seen: float) -> NDArray[np.float64]:
    """What to add to the usage of each id for text that was not seen: by Zipf's law over ids, since vocabularies list their
    merges commonest first. seen: all usage together; the prior weighs a twentieth of it or so."""
    return seen / 150 / (np.arange(vocabulary, dtype=np.float64) + 100.0)


def choose(usage: NDArray[np.float64], keep: NDArray[np.bool_], rows: int) -> Tensor:
    """Ids of the rows kept, ascending: all of `keep`, then by usage, ties by the lower id (older merges are commoner)."""
    score = np.where(keep, np.inf, usage)
    order = np.lexsort((np.arange(len(score)), -score))
    return torch.from_numpy(np.sort(order[:rows]).copy())


def trim(table: Tensor, to_target: Tensor, piece: int = 4096) -> Trim:
    """Lead every id of the embedding table [V, D] to its own row or the one of the most similar embedding (cosine)."""
    kind = working(table.device)
    kept = F.normalize(table[to_target].float(), dim=1).to(kind)
    to_row = torch.full((len(table),), -1)
    to_row[to_target] = torch.arange(len(to_target))
    for ids in torch.split((to_row < 0).nonzero().squeeze(1), piece):
        to_row[ids] = (F.normalize(table[ids].float(), dim=1).to(kind) @ kept.T).argmax(1)
    return Trim(to_target, to_row)


def whole(vocabulary: int) -> Trim:
    ids = torch.arange(vocabulary)
    return Trim(ids, ids)
