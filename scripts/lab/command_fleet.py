"""`paceline bench fleet`: thousands of edges on many verifiers, plain and drafting, and where the sum stops being linear."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from paceline.scripts import options
from paceline.scripts.lab.steps import StepTable, step_table

if TYPE_CHECKING:
    from paceline.scripts.lab.fleet import Made

LINEAR = 0.9  # of the tokens a second that an edge has where there is room
SLOWER = 1.1  # a step that takes this much longer than one over a row


@dataclass(frozen=True)
class Pair:
    """The same fleet, decoding plainly and with drafts. `linear`: an edge's rate over that of the least loaded fleet's."""

    plain: "Made"
    made: "Made"
    linear: float


def fleet_command(
    prompts: Annotated[Path, typer.Option(help="Lines of JSON with `turns`, and `category` if there is one.")],
    verifiers: Annotated[str, typer.Option(help="Numbers of verifiers, with commas between.")] = "1,4,16",
    edges: Annotated[str, typer.Option(help="Numbers of edges a verifier, with commas between.")] = "16,64,128",
    pair: options.Pair = "smollm2",
    rtt: Annotated[float, typer.Option("--rtt", min=0, max=10, help="Round trip in seconds.")] = 0.05,
    edge: Annotated[
        str, typer.Option(help="laptop, small-gpu, fast, pi, or ms for a row and a further row: 5,0.5.")
    ] = "small-gpu",
    costs: Annotated[
        str, typer.Option(help="A step by its rows: a100, JSON of `bench engine`, or rows:ms as in 1:30,64:31,128:40.")
    ] = "a100",
    balance: Annotated[
        str, typer.Option(help="even, as by least connections; hash, as by consistent hashing.")
    ] = "even",
    seconds: Annotated[
        float, typer.Option(min=0.5, help="Virtual seconds of each run; a quarter is not counted.")
    ] = 3.0,
    count: Annotated[int, typer.Option(min=1, help="Prompts that the edges ask.")] = 8,
    skip: Annotated[int, typer.Option(min=0, help="Prompts to leave out before them.")] = 0,
    max_tokens: options.MaxTokens = 128,
    learn: Annotated[int, typer.Option(min=0, help="Further prompts that the predictor has learned on before.")] = 8,
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: what was asked, and the runs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this PNG.")] = None,
) -> None:
    """Load N verifiers with simulated edges: recorded targets, the real protocol code, a virtual clock."""
    from paceline.protocol.errors import PacelineError
    from paceline.scripts.lab.command_rtt import Question, bar

    if balance not in ("even", "hash"):
        raise PacelineError(f"--balance {balance!r}: it is even or hash")
    table = step_table(costs)
    sizes = [(n, n * m) for n in options.whole_numbers(verifiers) for m in options.whole_numbers(edges)]
    question = Question(
        pair, edge, table(1), (rtt,), ("stream",), prompts, count, skip, max_tokens, 0.0, 0, learn, 0,
    )  # fmt: skip
    with bar() as step:
        alone, runs, about = measure(question, threads, table, balance, seconds, sizes, step)
    if as_json:
        typer.echo(json.dumps({**about, "alone": alone, "runs": [asdict(run) for run in runs]}))
    else:
        show(about, alone, runs)
    if plot is not None:
        draw(about, runs, plot)


def measure(
    question: Any,
    threads: int | None,
    table: StepTable,
    balance: str,
    seconds: float,
    sizes: Sequence[tuple[int, int]],
    step: Callable[[str, int | None], None],
) -> tuple[float, list[Pair], dict[str, Any]]:
    """Tokens a second of the real agent alone, the runs, and a description. Raises PacelineError."""
    from paceline.scripts.lab.book import write_book
    from paceline.scripts.lab.experiment import answer
    from paceline.scripts.lab.fleet import Setting, fleet
    from paceline.scripts.lab.prepare import prepared, setting_of

    workshop, cases, _, learned, about = prepared(question, threads, step)
    [rtt], books, spent = question.round_trips, [], 0.0
    step("rehearsing", len(cases))
    for case in cases:
        bench = workshop.bench(case, learned)
        run = answer(bench, case, setting_of(workshop, question, "stream", rtt))
        spent += run.seconds
        books.append(write_book(bench.memo, case, learned))
        bench.memo.save()
        step("rehearsing", None)
    step("running", 20 * sum(edges for _, edges in sizes))
    found = []
    for n, edges in sizes:

        def done(edges: int = edges) -> None:
            for _ in range(edges):
                step("running", None)

        settings = [
            Setting(n, edges, table, workshop.edge(question.edge), seconds, rtt, drafts, balance)
            for drafts in (False, True)
        ]
        found.append([fleet(setting, books, workshop.vocabulary, done) for setting in settings])
    workshop.close()
    about = {name: about[name] for name in ("pair", "edge", "target", "draft", "cases", "tokens", "code")}
    about |= {"round_trip": rtt, "seconds": seconds, "balance": balance, "costs": table.name, "source": table.source}
    about["note"] = "recorded targets and drafts on a virtual clock; own_in_step is this machine's"
    return sum(len(case.text) for case in cases) / spent, paired(found), about


def paired(found: "Sequence[Sequence[Made]]") -> list[Pair]:
    least = min((made for _, made in found), key=lambda m: m.edges / m.verifiers)
    full = least.tokens_a_second_an_edge
    return [Pair(plain, made, made.tokens_a_second_an_edge / full) for plain, made in found]


def bend(runs: Sequence[Pair], table_step: float) -> str:
    """Where an edge's rate first falls below `LINEAR` of what it is where there is room, and why."""
    bent = [run for run in runs if run.linear < LINEAR]
    if not bent:
        return f"linear within {1 - LINEAR:.0%} up to {max(run.made.edges for run in runs)} edges"
    m = min((run.made for run in bent), key=lambda made: (made.fullest, made.edges))
    where = f"below {LINEAR:.0%} of linear from {m.fullest} edges at a verifier ({m.edges} on {m.verifiers}): "
    if m.step > SLOWER * table_step:
        return f"{where}its step has {m.rows:.0f} rows and takes {1e3 * m.step:.1f} ms, against {1e3 * table_step:.1f} ms for one"
    return f"{where}a session gets {m.nodes:.1f} nodes a step, and {m.tokens_a_step:.2f} tokens"


def show(about: dict[str, Any], alone: float, runs: Sequence[Pair]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 150)
    console.print(
        f"{about['pair']} ({about['draft']}), {len(about['cases'])} prompts, edge {about['edge']}, round trip"
        f" {1e3 * about['round_trip']:g} ms, edges placed {about['balance']}; {about['note']}\n"
        f"a step's cost: {about['costs']}, {about['source']}\n"
        f"the real agent alone makes {alone:.1f} tokens/s on the same prompts",
        highlight=False,
    )
    heads = "verifiers|edges|fullest|tok/s|plain|x|an edge|of linear|p50 ms|p99 ms|GPU s/1000|plain|rows|step ms|busy|own ms|same"
    out = Table(*heads.split("|"), box=None)
    for run in runs:
        m, p = run.made, run.plain
        out.add_row(
            *(f"{m.verifiers}", f"{m.edges}", f"{m.fullest}", f"{m.tokens_a_second:.0f}", f"{p.tokens_a_second:.0f}"),
            *(f"{m.tokens_a_second / p.tokens_a_second:.2f}", f"{m.tokens_a_second_an_edge:.1f}", f"{run.linear:.2f}"),
            *(f"{1e3 * m.p50_between_commits:.0f}", f"{1e3 * m.p99_between_commits:.0f}"),
            *(f"{m.gpu_seconds_per_1000:.2f}", f"{p.gpu_seconds_per_1000:.2f}", f"{m.rows:.0f}", f"{1e3 * m.step:.1f}"),
            *(f"{m.busy:.2f}", f"{1e3 * m.own_in_step:.1f}", "NO" if m.altered or p.altered else "yes"),
        )
    console.print(out)
    console.print(bend(runs, min(run.plain.step for run in runs)), highlight=False)


def draw(about: dict[str, Any], runs: Sequence[Pair], path: Path) -> None:
    """Tokens a second against edges, a line for each number of verifiers; dashed: plain decoding. Raises PacelineError."""
    from paceline.scripts.lab.plot import canvas, save

    figure, axes = canvas(8, 5)
    for n in sorted({run.made.verifiers for run in runs}):
        some = sorted((run for run in runs if run.made.verifiers == n), key=lambda run: run.made.edges)
        x = [run.made.edges for run in some]
        [line] = axes.plot(
            x, [run.made.tokens_a_second for run in some], marker="o", label=f"{n} verifiers" if n > 1 else "1"
        )
        axes.plot(x, [run.plain.tokens_a_second for run in some], marker=".", ls="--", color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="edges", ylabel="tokens a second (dashed: plain decoding)")
    axes.set_title(
        f"{about['pair']}, edge {about['edge']}, round trip {1e3 * about['round_trip']:g} ms, steps as {about['costs']};"
        " recorded, virtual clock",
        fontsize=9,
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save(figure, path)
