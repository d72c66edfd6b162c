"""What an engine finds out about itself at start: that exact mode is exact on this machine, and how many rows are free."""

import time
from collections.abc import Callable, Sequence

import torch
from paceline.cloud.batch import Share, lay_out
from paceline.cloud.engine import Work
from paceline.cloud.engines.torch import TorchEngine
from paceline.kernels.layout import PAGE
from paceline.protocol.cloud_session import Plan
from paceline.protocol.errors import EngineError
from paceline.protocol.sampling import Sampling
from torch import Tensor

WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # rows tried for `free_width`
FREE = 1.10  # of one row's time
_REPEATS = 3


def demand_exactness(engine: TorchEngine) -> None:
    """Compare one row's logits alone, in a tree, and beside other sequences, bit by bit, across a page's end.

    Raises EngineError where they differ: this machine's library does not allow exact mode.
    """
    text = [(7 * i + 3) % engine.vocabulary.size for i in range(PAGE + 5)]
    last = text[-3:]
    chain = Plan((0, 1, 2, 3), (last[0], last[0] ^ 1, last[1], last[2]), (-1, -1, 0, 2))
    alone = row_logits(engine, [(text, Plan())], [len(text) - 3])[-1]
    whole = row_logits(engine, [(text, Plan())], [0])[-1]
    in_tree = row_logits(engine, [(text[:-3], chain)], [len(text) - 20])[-1]
    batch = row_logits(engine, [(text[:-3], chain), *[(text[: 20 + 9 * i], Plan()) for i in range(4)]], [3] + [0] * 4)[
        4
    ]
    if not all(torch.equal(alone, other) for other in (whole, in_tree, batch)):
        raise EngineError(
            "exact mode is not exact on this machine: a row's logits depend on its batch; run without --exact"
        )


@torch.inference_mode()
def row_logits(engine: TorchEngine, sequences: list[tuple[list[int], Plan]], cached: list[int]) -> Tensor:
    """Logits after the last token and every node of some sequences, the first `cached` tokens of each in a step before."""
    handles = [engine.open(()) for _ in sequences]
    try:
        for handle, (tokens, _), n in zip(handles, sequences, cached, strict=True):
            if n:
                engine.verify([Work(handle, tuple(tokens[:n]), Plan(), Sampling(), choose=False)])
        shares = []
        for handle, (tokens, plan), n in zip(handles, sequences, cached, strict=True):
            if not engine.cache.reserve(handle, len(tokens) + len(plan.tokens), handles):
                raise EngineError("the KV cache is too small to check exact mode; give it more memory")
            work = Work(handle, tuple(tokens[n:]), plan, Sampling())
            shares.append(Share.of(work, engine.cache.held(handle)))
        return engine.logits(lay_out(shares, engine.decoder.exact)).clone()
    finally:
        for handle in handles:
            engine.cache.forget(handle)
            engine.close(handle)


@torch.inference_mode()
def measure_step_cost(engine: TorchEngine, clock: Callable[[], float] = time.perf_counter) -> list[tuple[int, float]]:
    """(rows, seconds of a step), up to the first width that costs twice one row: beyond it the line is known."""
    one = _seconds(engine, 1, clock)
    table = [(1, one)]
    for rows in WIDTHS:
        if rows > min(engine.context, engine.cache.pages.available * PAGE) or table[-1][1] > 2 * one:
            break
        table.append((rows, _seconds(engine, rows, clock)))
    return table


def free_width(step_cost: Sequence[tuple[int, float]]) -> int:
    """The most nodes that go along with a row at no more than 10 % above its cost."""
    return max(rows for rows, seconds in step_cost if seconds <= FREE * step_cost[0][1]) - 1


def _seconds(engine: TorchEngine, rows: int, clock: Callable[[], float]) -> float:
    """Time of a step over a token and its children, logits and walk included: the best of a few, as others' load only adds."""
    plan = Plan(tuple(range(rows - 1)), tuple(range(rows - 1)), (-1,) * (rows - 1))
    times = []
    for _ in range(1 + _REPEATS):
        handle = engine.open(())
        began = clock()
        engine.verify([Work(handle, (0,), plan, Sampling())])
        times.append(clock() - began)
        engine.cache.forget(handle)
        engine.close(handle)
    return min(times[1:])
