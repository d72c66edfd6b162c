"""What a draft step costs on the devices the lab speaks for: seconds for one row, and for each further row of a batch."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.edge.draft import PROBE_ROWS, Choice, Draft, Row
from paceline.protocol.errors import PacelineError
from paceline.protocol.sampling import Sampling

PAST = 192  # tokens of text before the rows of a measured step
REPEATS = 5


@dataclass(frozen=True)
class EdgeCost:
    """A step over n rows takes first + more (n - 1) seconds."""

    name: str
    first: float
    more: float

    def __call__(self, rows: int) -> float:
        return self.first + self.more * (rows - 1)

    @property
    def table(self) -> list[tuple[int, float]]:
        """(rows, seconds) as a draft would have measured them at start."""
        return [(n, self(n)) for n in PROBE_ROWS]


EDGES = {
    cost.name: cost
    for cost in (
        EdgeCost("laptop", 0.008, 0.003),
        EdgeCost("small-gpu", 0.005, 0.0005),
        EdgeCost("fast", 0.001, 0.00005),
        EdgeCost("pi", 0.060, 0.025),
    )
}


def measured(draft: Draft, clock: Callable[[], float] = time.perf_counter) -> list[tuple[int, float]]:
    """(rows, seconds) of whole steps of a draft on this machine, in the median: the forward below a text, and the search for each
    row's candidates."""
    choice = Choice(Sampling())
    handle = draft.open([0] * PAST)
    draft.extend([Row(handle, 0, -1, 0, PAST - 1, choice)])
    table = []
    for width in PROBE_ROWS:
        times = []
        for _ in range(REPEATS):
            begin = clock()
            draft.extend([Row(handle, node, 0, 0, PAST, choice) for node in range(1, width + 1)])
            times.append(clock() - begin)
            draft.commit(handle, (), (), {0})
        table.append((width, statistics.median(times)))
    draft.close(handle)
    return table


def fitted(table: Sequence[tuple[int, float]]) -> EdgeCost:
    """The line through (rows, seconds) as they were measured on this machine."""
    line = statistics.linear_regression([rows - 1 for rows, _ in table], [seconds for _, seconds in table])
    return EdgeCost("native", line.intercept, max(line.slope, 0.0))


def edge_named(name: str) -> EdgeCost:
    """A preset, or `first,more` in milliseconds. Raises PacelineError."""
    if name in EDGES:
        return EDGES[name]
    try:
        first, more = (float(part) / 1e3 for part in name.split(","))
        if first > 0 and more >= 0:
            return EdgeCost(name, first, more)
    except ValueError:
        pass
    raise PacelineError(f"edge {name!r} is not known; use {', '.join(EDGES)}, native, or two milliseconds as in 5,0.5")
