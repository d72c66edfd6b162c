"""The forward as CUDA graphs, one a bucket of shapes: a step then costs one launch on the host, not hundreds.

A bucket fixes the number of rows and the sizes of the attention's tables; what a step does not fill points at page 0, which holds
nobody's keys, or at a block without rows. A bucket is captured when it is first met. Larger steps run as they come.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from paceline.cloud.engines.torch import Decoder, Forward
from paceline.cloud.kv import Cache
from paceline.cloud.model import Rows, forward
from paceline.kernels.attention_triton import Sizes, natural_sizes, plan_over, tables
from paceline.kernels.layout import Layout
from torch import Tensor

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PAGES = (4, 16, 64, 256, 1024)
EXTRA = (64, 256)


def bucket(layout: Layout, group: int, exact: bool) -> Sizes | None:
    """The smallest bucket that the step fits into, with a block to spare; None if it fits into none."""
    need = natural_sizes(layout, group, exact)
    rows, pages, extra = _up(need.rows, ROWS), _up(need.pages, PAGES), _up(need.extra, EXTRA)
    if rows is None or pages is None or extra is None:
        return None
    return Sizes(rows=rows, programs=rows, blocks=rows + 1, pages=pages, extra=extra)


def _up(size: int, steps: Sequence[int]) -> int | None:
    return next((s for s in steps if s >= size), None)


@dataclass(frozen=True)
class Captured:
    """A graph and the memory it reads and writes."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor  # [4, rows]: tokens, positions, slots, asked
    tables: Tensor  # int32
    logits: Tensor  # [rows, V]


class Graphs:
    """A `Forward` for a CUDA device with Triton; `eager` runs what fits into no bucket."""

    def __init__(self, decoder: Decoder, cache: Cache, eager: Forward) -> None:
        self._decoder, self._cache, self._eager = decoder, cache, eager
        self._group = decoder.config.heads // decoder.config.kv_heads
        self._captured: dict[Sizes, Captured] = {}
        self._pool: Any = None  # memory that all graphs share

    def __call__(self, rows: Rows, layout: Layout) -> Tensor:
        sizes = bucket(layout, self._group, self._decoder.exact)
        if sizes is None:
            return self._eager(rows, layout)
        if sizes not in self._captured:
            self._captured[sizes] = self._capture(sizes)
        captured = self._captured[sizes]
        captured.tables.copy_(torch.from_numpy(tables(layout, sizes, self._group, self._decoder.exact)))
        captured.rows.zero_()
        for own, given in zip(captured.rows, (rows.tokens, rows.positions, rows.slots, rows.asked), strict=True):
            own[: len(given)] = given
        captured.graph.replay()
        return captured.logits[: len(rows.asked)]

    def _capture(self, sizes: Sizes) -> Captured:
        d, device = self._decoder, self._decoder.device
        numbers = torch.zeros(4, sizes.rows, dtype=torch.int64, device=device)
        flat = torch.zeros(sum(torch.Size(s).numel() for s in sizes.shapes), dtype=torch.int32, device=device)
        rows, plan = Rows(*numbers), plan_over(flat, sizes, d.exact)

        def run() -> Tensor:
            return forward(d.weights, d.config, rows, self._cache.keys, self._cache.values, plan, d.suite)

        side = torch.cuda.Stream(device)  # what is compiled or allocated once must not be part of the graph
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = run()
        self._pool = self._pool or graph.pool()
        return Captured(graph, numbers, flat, logits)
