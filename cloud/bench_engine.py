"""`paceline bench engine`: what a step of an engine costs, by sessions and by rows, in one run.

Each session count is run twice over the same prompts: plain, which also records the target's own text, and with trees whose main
path is that text, going wrong at each token with a stated probability: so the acceptance is a known quantity, and the engine's
cost is what is measured. Drafting and the network are not part of it.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from paceline.cloud.engine import Engine, Work
from paceline.protocol.cloud_session import Plan, Walk
from paceline.protocol.errors import EngineError
from paceline.protocol.sampling import Sampling
from rich.console import Console
from rich.table import Table

CURVE = (1, 2, 4, 8, 16, 32, 64, 128)
Clock = Callable[[], float]


class MakeEngine(Protocol):
    """Brings an engine up by name."""

    def __call__(self, engine: str, model: Path, *, exact: bool, quant: str | None, device: str) -> Engine: ...


@dataclass(frozen=True)
class Load:
    """What every session does: a prompt, then steps with trees of `nodes` nodes that are right with probability `right`."""

    prompt: int = 64
    steps: int = 12
    nodes: int = 8
    right: float = 0.8
    sampling: Sampling = Sampling(seed=1, temperature=0.8)  # noqa: RUF009 (frozen)


@dataclass(frozen=True)
class Row:
    """One session count. Times in seconds; `outside` is the share of the forward's time that the rest of a step takes."""

    sessions: int
    rows: float  # a step
    step: float  # median
    tokens_per_second: float
    accepted: float  # drafted tokens a session and step
    plain_step: float
    plain_tokens_per_second: float
    outside: float | None


@dataclass(frozen=True)
class Report:
    engine: str
    model: str
    free_width: int
    load: dict[str, Any]
    sessions: list[Row]
    curve: list[tuple[int, float]]  # rows, seconds of a step


def measure(
    engine: Engine, model: str, sessions: Sequence[int], load: Load, clock: Clock = time.perf_counter
) -> Report:
    """Raises EngineError where the engine cannot hold that many sessions."""
    rows = [_sessions(engine, count, load, clock) for count in sessions]
    curve = [(n, _curve_point(engine, n, load, clock)) for n in CURVE if n <= engine.context - load.prompt]
    shown = {"prompt": load.prompt, "steps": load.steps, "nodes": load.nodes, "right": load.right}
    return Report(engine.name, model, engine.free_width, shown, rows, curve)


def _sessions(engine: Engine, count: int, load: Load, clock: Clock) -> Row:
    rng = random.Random(count)
    prompts = [rng.choices(range(engine.vocabulary.size), k=load.prompt) for _ in range(count)]
    plain = _Run(engine, prompts, load, clock)
    length = 1 + load.steps * (load.nodes + 1)
    while min(map(len, plain.texts)) < length:
        plain.step([Plan()] * count)
    trees = _Run(engine, prompts, load, clock)
    for _ in range(load.steps):
        trees.step(
            [
                tree(rng, t[len(w) :], load, engine.vocabulary.size)
                for t, w in zip(plain.texts, trees.texts, strict=True)
            ]
        )
    plain.close()
    trees.close()
    return Row(
        sessions=count,
        rows=statistics.mean(trees.rows),
        step=statistics.median(trees.seconds),
        tokens_per_second=trees.tokens_per_second,
        accepted=trees.accepted / load.steps / count,
        plain_step=statistics.median(plain.seconds),
        plain_tokens_per_second=plain.tokens_per_second,
        outside=statistics.median(trees.outside) if trees.outside else None,
    )


def tree(rng: random.Random, truth: Sequence[int], load: Load, vocabulary: int) -> Plan:
    """A chain of `truth` that goes wrong with probability 1 - right a token, with a sibling beside every second node."""
    parents: list[int] = []
    tokens: list[int] = []
    here, good = -1, True
    for token in truth:
        if len(tokens) >= load.nodes:
            break
        good = good and rng.random() < load.right
        parents.append(here)
        tokens.append(token if good else (token + 1) % vocabulary)
        if len(tokens) % 3 == 2 and len(tokens) < load.nodes:
            parents.append(here)
            tokens.append((token + 2) % vocabulary)
            here = len(tokens) - 2
        else:
            here = len(tokens) - 1
    return Plan(tuple(range(len(tokens))), tuple(tokens), tuple(parents))


class _Run:
    """Sessions that have had their prompts, and the figures of their steps."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], load: Load, clock: Clock) -> None:
        self._engine, self._prompts, self._load, self._clock = engine, prompts, load, clock
        self._handles = [engine.open(p) for p in prompts]
        self.texts: list[list[int]] = [[] for _ in prompts]
        self.seconds: list[float] = []
        self.rows: list[int] = []
        self.outside: list[float] = []
        self.accepted = 0
        self.step([Plan()] * len(prompts))  # prompts, and whatever is compiled at first use
        self.seconds, self.rows, self.outside, self._base = [], [], [], sum(map(len, self.texts))
        self.accepted = 0

    @property
    def tokens_per_second(self) -> float:
        return (sum(map(len, self.texts)) - self._base) / sum(self.seconds)

    def step(self, plans: Sequence[Plan]) -> None:
        works = []
        for handle, prompt, text, plan in zip(self._handles, self._prompts, self.texts, plans, strict=True):
            sequence = [*prompt, *text]
            works.append(Work(handle, tuple(sequence[self._engine.length(handle) :]), plan, self._load.sampling))
        began = self._clock()
        results = self._engine.verify(works)
        self.seconds.append(self._clock() - began)
        self.rows.append(sum(len(w.tokens) + len(w.plan.tokens) for w in works))
        timing = getattr(self._engine, "timing", None)
        if timing is not None:
            self.outside.append(timing.outside / timing.forward)
        for text, work, result in zip(self.texts, works, results, strict=True):
            if not isinstance(result, Walk):
                raise result or EngineError("the engine chose nothing where it was asked to")
            text += [*(work.plan.tokens[i] for i in result.accepted), result.token]
            self.accepted += len(result.accepted)

    def close(self) -> None:
        for handle in self._handles:
            self._engine.close(handle)


def _curve_point(engine: Engine, rows: int, load: Load, clock: Clock) -> float:
    """Seconds of a step over one token and rows - 1 nodes below it, after a prompt: the best of three."""
    prompt = random.Random(0).choices(range(engine.vocabulary.size), k=load.prompt)
    plan = Plan(tuple(range(rows - 1)), tuple(range(rows - 1)), tuple(range(-1, rows - 2)))
    times = []
    for _ in range(4):
        handle = engine.open(())
        engine.verify([Work(handle, tuple(prompt), Plan(), load.sampling, choose=False)])
        began = clock()
        engine.verify([Work(handle, (0,), plan, load.sampling)])
        times.append(clock() - began)
        engine.close(handle)
    return min(times[1:])


def command(resolve: Callable[[str], Path], make: MakeEngine, clock: Clock = time.perf_counter) -> Callable[..., None]:
    """The typer command. `resolve` turns a model's name into a path, `make` brings an engine up."""

    def engine(
        model: Annotated[str, typer.Option(help="A model's name, a GGUF file, or a folder.")] = "smollm2",
        engine: Annotated[str, typer.Option(help="Which engine to measure.")] = "torch",
        sessions: Annotated[str, typer.Option(help="Numbers of sessions, with commas between.")] = "1,4,16,64",
        nodes: Annotated[int, typer.Option(min=0, max=512, help="Nodes of a session's tree.")] = 8,
        steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps measured for each number of sessions.")] = 12,
        exact: Annotated[bool, typer.Option("--exact", help="Bitwise exact mode.")] = False,
        quant: Annotated[str | None, typer.Option(help="nf4, int8 or w4.")] = None,
        device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """What a step of an engine costs, by sessions and by rows."""
        counts = read_counts(sessions)
        target = make(engine, resolve(model), exact=exact, quant=quant, device=device)
        report = measure(target, model, counts, Load(nodes=nodes, steps=steps), clock)
        if as_json:
            typer.echo(json.dumps(asdict(report)))
        else:
            show(report, Console())

    return engine


def read_counts(text: str) -> list[int]:
    """Positive numbers with commas between. Raises EngineError for anything else."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as e:
        raise EngineError(f"--sessions {text!r} is not a list of numbers like 1,4,16") from e
    if min(counts) < 1:
        raise EngineError(f"--sessions {text!r} holds a number below 1")
    return counts


def show(report: Report, console: Console) -> None:
    title = f"{report.engine}, {report.model}: free width {report.free_width}"
    table = Table(
        "sessions", "rows", "step ms", "tok/s", "accepted", "plain step ms", "plain tok/s", "outside %", title=title
    )
    for r in report.sessions:
        outside = "-" if r.outside is None else f"{100 * r.outside:.1f}"
        ms, plain = f"{1e3 * r.step:.1f}", f"{1e3 * r.plain_step:.1f}"
        cells = (f"{r.rows:.0f}", ms, f"{r.tokens_per_second:.1f}", f"{r.accepted:.2f}", plain)
        table.add_row(str(r.sessions), *cells, f"{r.plain_tokens_per_second:.1f}", outside)
    console.print(table)
    curve = Table("rows", "step ms", title="One session, by rows")
    for rows, seconds in report.curve:
        curve.add_row(str(rows), f"{1e3 * seconds:.1f}")
    console.print(curve)
