"""Whether a series of samples rises or falls, and how sure that is; what a process holds in memory."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCKS = 20  # means that the noise is estimated from: neighbouring samples are not independent


@dataclass(frozen=True)
class Trend:
    """A straight line through a series: `slope` in units a second, `noise` its standard error, `mean` in units."""

    slope: float
    noise: float
    mean: float
    seconds: float

    @property
    def change(self) -> float:
        """By how much the line rises over the whole series."""
        return self.slope * self.seconds

    def flat(self, share: float = 0.01) -> bool:
        """Within three standard errors of level, or of a rise over the whole series below `share` of the mean."""
        return abs(self.slope) <= 3 * self.noise or abs(self.change) <= share * self.mean


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """Least squares through the means of blocks of the series. Raises ValueError for fewer than six samples."""
    if len(times) < 6:
        raise ValueError("a trend needs six samples")
    blocks = min(BLOCKS, len(times) // 2)
    edges = [len(times) * i // blocks for i in range(blocks + 1)]
    spans = list(itertools.pairwise(edges))
    x = [statistics.fmean(times[a:b]) for a, b in spans]
    y = [statistics.fmean(values[a:b]) for a, b in spans]
    slope, intercept = statistics.linear_regression(x, y)
    residuals = sum((b - slope * a - intercept) ** 2 for a, b in zip(x, y, strict=True))
    spread = sum((a - statistics.fmean(x)) ** 2 for a in x)
    noise = math.sqrt(residuals / (blocks - 2) / spread)
    return Trend(slope, noise, statistics.fmean(values), times[-1] - times[0])


@dataclass(frozen=True)
class Memory:
    """Bytes. `own` is what the process alone has written to: what a leak adds to. The others also count shared files."""

    resident: int
    proportional: int
    own: int

    @classmethod
    def of(cls, pid: int) -> "Memory":
        """Raises OSError if there is no such process; Linux only."""
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        return cls(found["Rss"], found["Pss"], found["Anonymous"])
