"""What a batch of rows costs, and how many rows are worth taking along: the same question at both ends.

A model's step over n rows takes about a + b (n - 1) seconds. The line starts from a measurement and follows what
steps really take. The best number of optional rows makes (expected gain) / (seconds) largest. At the cloud the gain
is tokens: one for each session, plus the probability of each drafted node taken along, and a paced step takes at
least `floor`. At the edge it is the usefulness of the nodes run. Where rows are nearly free that is the free width of
the hardware; on a CPU it is what pays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

DECAY = 0.98  # of what is known, with each step: about the last fifty count
ADRIFT = 3  # after so many steps in a row that took over twice what was expected, or under half, the last few count
ADRIFT_DECAY = 0.7
MIN_SECONDS = 1e-6


class StepCost:
    """a + b (n - 1), by least squares over decayed measurements."""

    def __init__(self, table: Sequence[tuple[int, float]]) -> None:
        self._way = self._off = 0  # longer (1) or shorter (-1) than expected, and for how many steps by now
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        for rows, seconds in table:
            self._add(rows - 1, seconds)

    def learn(self, rows: int, seconds: float) -> None:
        """A step took so long. A machine that is slowed down by its heat, or no longer is, is known within a few steps."""
        expected = self(rows)
        way = (seconds > 2 * expected) - (2 * seconds < expected)
        self._off = self._off + 1 if way and way == self._way else abs(way)
        self._way = way
        decay = ADRIFT_DECAY if self._off >= ADRIFT else DECAY
        for name in ("_n", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * decay)
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


def best_count(
    gains: Sequence[float], cost: StepCost, *, base_gain: float = 0.0, base_rows: int = 0, floor: float = 0.0
) -> int:
    """How many of the optional rows to take, given their log-gains, best first, beside `base_rows` rows worth `base_gain`."""
    best, rate, total = 0, 0.0, base_gain
    if base_rows:
        rate = base_gain / max(cost(base_rows), floor, MIN_SECONDS)
    for n, gain in enumerate(gains, 1):
        total += math.exp(gain)
        now = total / max(cost(base_rows + n), floor, MIN_SECONDS)
        if now > rate:
            best, rate = n, now
    return best


@dataclass(frozen=True)
class Patience:
    """How long a step that would begin without a node waits for one; the same rule at both ends. Seconds.

    Nodes are due `response` after the commit that left the tree, and a `row` later for each token committed since. They are
    waited for if they are due within `longest`.
    """

    longest: float = 0.0
    response: float = 0.0
    row: float = 0.0

    def start(self, now: float, missed: float, since: int) -> float:
        """When the step begins that could begin `now`, with the tree left at time `missed` and `since` tokens before."""
        due = missed + self.response + self.row * since
        return due if now < due <= now + self.longest else now
