"""`paceline bench rtt`: every policy at every round trip, side by side in one run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from paceline.scripts import options

Seconds = Annotated[str, typer.Option("--rtt", help="Round trips in seconds, with commas between.")]


@dataclass(frozen=True)
class Question:
    """What is measured, as it was asked for."""

    pair: str
    edge: str
    verify_floor: float
    round_trips: tuple[float, ...]
    policies: tuple[str, ...]
    prompts: Path
    count: int
    skip: int
    tokens: int
    temperature: float
    seed: int
    learn: int
    tune: int
    predictor: bool = True
    candidates: int | None = None
    jitter: float = 0.0
    up: float = 0.0
    down: float = 0.0
    loss: float = 0.0
    width: int | None = None
    rule: str = "coupled"


def rtt(
    prompts: Annotated[Path, typer.Option(help="Lines of JSON with `turns`, and `category` if there is one.")],
    pair: options.Pair = "smollm2",
    verify_floor: Annotated[float, typer.Option(min=0.0001, max=10, help="Seconds of a verification.")] = 0.03,
    round_trips: Seconds = "0,0.01,0.025,0.05,0.1,0.2",
    policies: Annotated[str, typer.Option(help="Names with commas between, or all.")] = "ar,colo,sync,ssd,stream",
    edge: Annotated[
        str, typer.Option(help="laptop, small-gpu, fast, pi, or ms for a row and a further row: 5,0.5.")
    ] = ("small-gpu"),
    clock: Annotated[
        str, typer.Option(help="virtual: modelled costs; real: two processes on this machine.")
    ] = "virtual",
    temperature: options.Temperature = 0.0,
    rule: options.Rule = "coupled",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of tokens.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Prompts, taking turns between the categories.")] = 24,
    skip: Annotated[int, typer.Option(min=0, help="Prompts to leave out before them.")] = 0,
    max_tokens: options.MaxTokens = 128,
    learn: Annotated[int, typer.Option(min=0, help="Further prompts that the predictor has learned on before.")] = 8,
    tune: Annotated[int, typer.Option(min=0, help="Of those, prompts on which colo, sync and ssd are tuned.")] = 3,
    predictor: Annotated[str, typer.Option(help="on, or off: believe the draft's own probabilities.")] = "on",
    candidates: Annotated[int | None, typer.Option(min=1, help="Candidates of a row, at most.")] = None,
    jitter: Annotated[float, typer.Option(min=0, help="Mean of a random delay each way, in seconds.")] = 0.0,
    uplink: Annotated[float, typer.Option(min=0, help="Mbit/s from the edge; 0: no limit.")] = 0.0,
    downlink: Annotated[float, typer.Option(min=0, help="Mbit/s to the edge; 0: no limit.")] = 0.0,
    loss: Annotated[float, typer.Option(min=0, max=0.5, help="Share of frames that are lost and sent again.")] = 0.0,
    width: Annotated[int | None, typer.Option(min=1, help="Nodes verified in a step, at most.")] = None,
    threads: options.Threads = None,
    out: Annotated[
        Path | None, typer.Option("--json", help="Keep the results here; a run that was cut goes on.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this PNG.")] = None,
) -> None:
    """Measure tokens a second against the round trip, every policy side by side on the same prompts."""
    from paceline.edge.policies import POLICIES
    from paceline.protocol.errors import PacelineError
    from paceline.scripts.lab.report import lines
    from paceline.scripts.lab.show import show

    names = tuple(POLICIES) if policies == "all" else tuple(policies.split(","))
    question = Question(
        pair, edge, verify_floor, _numbers(round_trips), names, prompts, count, skip, max_tokens, temperature, seed, learn,
        tune, predictor != "off", candidates, jitter, uplink * 1e6, downlink * 1e6, loss, width, rule,
    )  # fmt: skip
    if predictor not in ("on", "off"):
        raise PacelineError(f"--predictor {predictor!r}: it is on or off")
    if clock == "real":
        from paceline.scripts.lab.real import measure_real

        results = measure_real(question, threads, out)
    elif clock == "virtual":
        results = measure(question, threads, out)
    else:
        raise PacelineError(f"clock {clock!r} is not known; there are virtual and real")
    table = lines(results.entries)
    show(results.about, table, results.entries)
    if plot is not None:
        from paceline.scripts.lab.plot import draw

        draw(results.about, table, plot)


def measure(question: Question, threads: int | None, out: Path | None) -> Any:
    """The sweep under the virtual clock. Raises PacelineError."""
    from paceline.scripts.lab.prepare import entrants, prepared
    from paceline.scripts.lab.sweep import continued, sweep

    with bar() as step:
        workshop, cases, others, learned, about = prepared(question, threads, step)
        results = continued(about, out)
        chosen = entrants(question, workshop, others, learned, results.about, step)
        step("measuring", len(cases) * len(chosen))
        sweep(workshop, cases, chosen, learned, results, out, lambda: step("measuring", None))
        workshop.close()
    return results


@contextmanager
def bar() -> Iterator[Any]:
    """`step(what, total)` begins a part of the work, `step(what, None)` counts one on; shown only on a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def step(what: str, total: int | None) -> None:
            if total is not None:
                tasks[what] = progress.add_task(what, total=total)
            else:
                progress.advance(tasks[what])

        yield step


def _numbers(text: str) -> tuple[float, ...]:
    from paceline.protocol.errors import PacelineError

    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise PacelineError(f"--rtt {text!r}: seconds with commas between, as in 0,0.025,0.1") from None
    if any(not 0 <= v <= 10 for v in values):
        raise PacelineError(f"--rtt {text!r}: a round trip lies between 0 and 10 seconds")
    return values
