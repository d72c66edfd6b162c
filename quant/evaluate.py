"""How good a draft is as a draft: how often its candidates are what the target chooses, along the target's own greedy text.

Counts per position; knows nothing of links or planners. Agreement "top-j" is the share of positions where the target's token is
among the draft's j likeliest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paceline.kernels.gguf_file import GgufHeader
from paceline.kernels.onnx_file import INPUT_MAP, TOKEN_MAP

from .llama import LlamaModel
from .traces import Trace

TOPS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Sight:
    """One trace seen through a draft. rank: [N], place of the target's token among the draft's 8 likeliest, 8 when absent;
    confidence: [N], the draft's probability of its first candidate."""

    category: str
    rank: NDArray[np.int64]
    confidence: NDArray[np.float64]


class DraftView:
    """A draft in llama.cpp, speaking the target's ids."""

    def __init__(self, path: Path | str, threads: int = 1) -> None:
        file = GgufHeader(path)
        self.model = LlamaModel(path, threads=threads)
        token_map, input_map = file.integers(TOKEN_MAP), file.integers(INPUT_MAP)
        self.to_target = np.arange(self.model.rows) if token_map is None else token_map
        self.to_row = self.to_target if input_map is None else input_map

    def see(self, trace: Trace) -> Sight:
        whole = [int(self.to_row[t]) for t in trace.prompt + trace.text[:-1]]
        rows, logps = self.model.top(whole, len(trace.prompt) - 1, max(TOPS))
        hit = self.to_target[rows] == np.array(trace.text)[:, None]
        rank = np.where(hit.any(1), hit.argmax(1), max(TOPS))
        return Sight(trace.category, rank, np.exp(logps[:, 0]))


def see_all(
    draft: DraftView, traces: Sequence[Trace], progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Sight]:
    sights = []
    for i, trace in enumerate(t for t in traces if t.text):
        sights.append(draft.see(trace))
        progress(i + 1, len(traces))
    return sights


def agreement(sights: Sequence[Sight]) -> dict[str, Any]:
    """Top-1/2/4/8 agreement by category and their mean over categories, by depth in the text, and calibration of the first
    candidate: for each tenth of confidence, how many there were and how many the target took."""
    by_category: dict[str, dict[str, float]] = {}
    for category in sorted({s.category for s in sights}):
        rank = np.concatenate([s.rank for s in sights if s.category == category])
        by_category[category] = {f"top{j}": float((rank < j).mean()) for j in TOPS} | {"tokens": len(rank)}
    mean = {f"top{j}": float(np.mean([c[f"top{j}"] for c in by_category.values()])) for j in TOPS}
    depth = {
        str(low): float((np.concatenate([s.rank[low : low + 32] for s in sights if len(s.rank) > low]) < 1).mean())
        for low in range(0, max(len(s.rank) for s in sights), 32)
    }
    return {"mean": mean, "categories": by_category, "by_position": depth, "calibration": calibration(sights)}


def calibration(sights: Sequence[Sight], bins: int = 10) -> list[dict[str, float]]:
    confidence, rank = (np.concatenate([getattr(s, n) for s in sights]) for n in ("confidence", "rank"))
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    groups = [place == b for b in range(bins)]
    return [
        {"confidence": float(confidence[g].mean()), "taken": float((rank[g] < 1).mean()), "tokens": int(g.sum())}
        for g in groups
        if g.any()
    ]
