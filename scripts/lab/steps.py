"""What a step of a verifier costs by its rows: a table, and where it comes from."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from paceline.protocol.errors import PacelineError


@dataclass(frozen=True)
class StepTable:
    """(rows, seconds), rows rising; straight lines between the points, and on beyond the last two."""

    name: str
    source: str
    points: tuple[tuple[int, float], ...]

    def __call__(self, rows: int) -> float:
        points = self.points
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        i = min(bisect_right(points, (rows, float("inf"))), len(points) - 1)
        (a, at_a), (b, at_b) = points[i - 1], points[i]
        return at_a + (at_b - at_a) * (rows - a) / (b - a)

    @property
    def measured_at_start(self) -> list[tuple[int, float]]:
        """What an engine would have measured of it at start."""
        return [(rows, self(rows)) for rows in (1, 2, 4, 8, 16, 32, 64, 128)]


# 30 ms read 61 GB at 2,039 GB/s: 30.6e9 weights in bf16, each of which takes two operations a row, of 312e12 a second.
A100 = StepTable(
    "a100",
    "a roofline: 30 ms a step as in arXiv 2603.03251 for one A100, and from 153 rows on 0.196 ms a row, which is what the"
    " weights read in that time cost at the data sheet's peak (A100 80GB SXM: 2,039 GB/s, 312 Tflop/s)",
    ((1, 0.030), (153, 0.030), (306, 0.060)),
)


def step_table(name: str) -> StepTable:
    """`a100`, the JSON that `paceline bench engine --json` printed, or rows:milliseconds as in 1:30,64:31,128:40.

    Raises PacelineError.
    """
    if name == A100.name:
        return A100
    try:
        if ":" in name and not Path(name).exists():
            pairs = [part.split(":") for part in name.split(",")]
            return StepTable("given", "given", _checked([(int(n), float(ms) / 1e3) for n, ms in pairs]))
        report = json.loads(Path(name).read_text(encoding="utf-8"))
        curve = [(int(n), float(seconds)) for n, seconds in report["curve"]]
        return StepTable(Path(name).name, f"measured: {report['engine']}, {report['model']}", _checked(curve))
    except OSError as e:
        raise PacelineError(f"--costs {name}: {e.strerror or e}; there is a100, and 1:30,64:31 (rows:ms)") from None
    except (ValueError, KeyError, TypeError) as e:
        raise PacelineError(f"--costs {name}: not the JSON of `paceline bench engine`, nor rows:ms ({e})") from None


def _checked(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    if not points or any(rows < 1 or seconds <= 0 for rows, seconds in points):
        raise ValueError("rows and times lie above 0")
    if any(b <= a for (a, _), (b, _) in pairwise(points)):
        raise ValueError("rows must rise")
    return tuple(points)
