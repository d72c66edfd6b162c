"""The lab's curves as a picture: tokens a second against the round trip, the quartiles over the prompts as a band."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.protocol.errors import PacelineError
from paceline.scripts.lab.report import Line

COLOURS = {"ar": "#666666", "colo": "#8c6bb1", "sync": "#d95f0e", "ssd": "#2b8cbe", "stream": "#238b45"}


def draw(about: dict[str, Any], table: Sequence[Line], path: Path) -> None:
    """Raises PacelineError if matplotlib is not there, or the file cannot be written."""
    figure, axes = canvas(8, 5)
    for policy in dict.fromkeys(line.policy for line in table):
        points = sorted((n for n in table if n.policy == policy), key=lambda n: n.round_trip)
        x = [1000 * n.round_trip for n in points]
        colour = COLOURS.get(policy)
        axes.plot(x, [n.speed for n in points], marker="o", label=policy, color=colour)
        axes.fill_between(x, [n.low for n in points], [n.high for n in points], alpha=0.12, color=colour)
    axes.set_xlabel("round trip, ms")
    axes.set_ylabel("tokens a second (median over prompts, quartiles)")
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"{about['pair']}, edge {about['edge']}, verification {1000 * about['verify_floor']:g} ms,"
        f" {len(about['cases'])} prompts, {about['clock']} clock",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A figure without a window, in inches, and its axes. Raises PacelineError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PacelineError("drawing needs matplotlib: pip install 'paceline[bench]'") from None
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    return figure, figure.subplots()


def save(figure: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as e:
        raise PacelineError(f"{path}: the picture cannot be written ({e})") from None
