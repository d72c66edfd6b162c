"""What a step costs, and how many drafted nodes are worth taking along.

A step over n rows takes about a + b (n - 1) seconds. The line starts from the engine's own measurement and follows what steps
really take. A step over one session's last token yields one token; each node taken along adds the probability that the target
walks through it. So the best number of nodes is the one that makes (expected tokens) / (seconds) largest, where a paced step
takes at least `floor`. On a GPU, where rows are nearly free, that is the engine's free width; on a CPU it is what pays.
"""

import math
from collections.abc import Sequence

DECAY = 0.98
MIN_SECONDS = 1e-6


class StepCost:
    """a + b (n - 1), by least squares over decayed measurements."""

    def __init__(self, table: Sequence[tuple[int, float]]) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        for rows, seconds in table:
            self._add(rows - 1, seconds)

    def learn(self, rows: int, seconds: float) -> None:
        for name in ("_n", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * DECAY)
        self._add(rows - 1, seconds)

    def __call__(self, rows: int) -> float:
        """Seconds of a step over `rows` rows."""
        if not self._n:
            return MIN_SECONDS
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x**2
        b = max(0.0, (self._xy / self._n - mean_x * mean_y) / spread) if spread > 1e-9 else 0.0
        a = max(mean_y - b * mean_x, MIN_SECONDS)
        return a + b * (rows - 1)

    def _add(self, x: float, y: float) -> None:
        self._n += 1
        self._x += x
        self._y += y
        self._xx += x * x
        self._xy += x * y


def best_width(reach: Sequence[float], sessions: int, rows: int, cost: StepCost, floor: float) -> int:
    """How many of the nodes to take, given their log-probabilities `reach`, likeliest first, beside `rows` other rows."""
    best, most, expected = 0, sessions / max(cost(max(rows, 1)), floor, MIN_SECONDS), float(sessions)
    for n, r in enumerate(reach, 1):
        expected += math.exp(r)
        rate = expected / max(cost(rows + n), floor, MIN_SECONDS)
        if rate > most:
            best, most = n, rate
    return best
