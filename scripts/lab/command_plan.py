"""`paceline plan`: what each policy would make of a link, a verifier and a device, before anything is set up."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from paceline.scripts import options

if TYPE_CHECKING:
    from paceline.scripts.lab.calibration import Outcomes
    from paceline.scripts.lab.command_rtt import Question
    from paceline.scripts.lab.report import Line

TOKENS = 1000  # that bytes, forwards and GPU-seconds are reckoned for
LEARN, TUNE = 8, 3  # further prompts of the file that the predictor learns on, and on which policies are tuned
COLUMNS = {
    "tok/s": "tokens_per_second",
    "tok/forward": "tokens_a_forward",
    "accepted": "accepted",
    "forwards": "forwards",
    "GPU s": "gpu_seconds",
    "kB up": "kilobytes_up",
    "kB down": "kilobytes_down",
    "nodes sent": "nodes_sent",
    "draft rows": "rows_of_the_draft",
}


def plan(
    prompts: Annotated[Path, typer.Option(help="Lines of JSON with `turns`: text like what is to be generated.")],
    rtt: Annotated[float, typer.Option(min=0, max=10, help="Round trip in seconds.")] = 0.05,
    verify_ms: Annotated[float, typer.Option(min=0.1, max=10_000, help="Milliseconds of a verification.")] = 30.0,
    pair: options.Pair = "smollm2",
    edge: Annotated[
        str, typer.Option(help="laptop, small-gpu, fast, pi, native, or ms for a row and a further row: 5,0.5.")
    ] = "small-gpu",
    policies: Annotated[str, typer.Option(help="Names with commas between.")] = "ar,colo,sync,ssd,stream",
    measure: Annotated[
        str | None, typer.Option(help="Address of a verifier: take its round trip and pace instead.")
    ] = None,
    key: options.Key = None,
    authority: options.Authority = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts to reckon with.")] = 16,
    max_tokens: options.MaxTokens = 128,
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Predict tokens/s, bytes, target forwards and GPU-seconds of each policy, with the speed of light beside them."""
    from paceline.scripts.lab.command_rtt import Question

    seconds = verify_ms / 1e3
    if measure is not None:
        from paceline.edge.websocket import Address
        from paceline.scripts.lab.live import measured
        from paceline.scripts.pairs import files_of, vocabulary_of

        vocabulary = vocabulary_of(files_of(pair, None, None).target)
        rtt, seconds = measured(Address(measure, key, False, authority), vocabulary)
    question = Question(
        pair, edge, seconds, (rtt,), tuple(policies.split(",")), prompts, count, 0, max_tokens, 0.0, 0, LEARN, TUNE,
    )  # fmt: skip
    answer = predicted(question, threads)
    typer.echo(json.dumps(answer) if as_json else as_lines(answer))


def predicted(question: "Question", threads: int | None) -> dict[str, Any]:
    """Each policy under the virtual clock on the sample prompts, as what it costs to make `TOKENS` tokens."""
    from paceline.scripts.lab.calibration import watch
    from paceline.scripts.lab.command_rtt import bar
    from paceline.scripts.lab.prepare import entrants, prepared
    from paceline.scripts.lab.report import lines
    from paceline.scripts.lab.sweep import Results, sweep
    from paceline.scripts.lab.workshop import outcomes

    with bar() as step:
        workshop, cases, others, learned, about = prepared(question, threads, step)
        chosen = entrants(question, workshop, others, learned, about, step)
        step("measuring", len(cases) * len(chosen))
        results = Results(about)
        sweep(workshop, cases, chosen, learned, results, None, lambda: step("measuring", None))
        seen = [o for case in cases for o in outcomes(workshop.memo(case), case)]
    workshop.close()
    found = watch(learned.copy(enabled=True), seen, seeded=False)
    [rtt], verify = question.round_trips, question.verify_floor
    return {
        "round_trip": rtt,
        "verify_seconds": verify,
        "policies": {line.policy: _figures(line, verify) for line in lines(results.entries)},
        "speed_of_light": {str(p): speed_of_light(found, p) for p in (4, 16, 64)},
    }


def _figures(line: "Line", verify: float) -> dict[str, Any]:
    forwards = TOKENS / line.tokens_a_forward
    return {
        "parameters": line.label,
        "tokens_per_second": round(line.speed, 1),
        "tokens_a_forward": round(line.tokens_a_forward, 2),
        "accepted": round(line.accepted, 2),
        "forwards": round(forwards),
        "gpu_seconds": round(forwards * verify, 2),
        "kilobytes_up": round(TOKENS * line.up / 1e3, 1),
        "kilobytes_down": round(TOKENS * line.down / 1e3, 1),
        "nodes_sent": round(TOKENS * line.drafted_a_token),
        "rows_of_the_draft": round(TOKENS * line.rows_a_token),
    }


def speed_of_light(found: "Outcomes", width: int) -> dict[str, float | None]:
    """Bounds on the tokens accepted of `width` nodes verified at once (arXiv 2512.11718, and a tighter form of its model).

    mu and mu2 are the mean entropy and the mean of sum p ln^2 p of the predictor's calibrated distribution: for a target
    whose choice is determined, what is uncertain is the draft. None where a bound says nothing.
    """
    import numpy as np

    p = np.clip(found.predicted, 1e-6, 1.0)
    rest = np.clip(1 - p.sum(axis=1, keepdims=True), 1e-6, 1.0)
    p = np.concatenate([p, rest], axis=1)
    mu = float(-(p * np.log(p)).sum(axis=1).mean())
    mu2 = float((p * np.log(p) ** 2).sum(axis=1).mean())
    log_width = math.log(width)
    bounds = {
        "entropy": mu,
        "ln P / mu": log_width / mu,
        "(mu + mu2) ln P / mu^2": (mu + mu2) * log_width / mu**2,
        "ln P / mu + mu2 / mu^2": log_width / mu + mu2 / mu**2,
    }
    return {k: round(v, 3) if k == "entropy" or v < width else None for k, v in bounds.items()}


def as_lines(answer: dict[str, Any]) -> str:
    """The answer as text: a row a policy, then the bounds for each number of nodes."""
    rows: list[Sequence[Any]] = [("policy", *COLUMNS)]
    rows += [(p["parameters"], *(p[k] for k in COLUMNS.values())) for p in answer["policies"].values()]
    title = f"round trip {1e3 * answer['round_trip']:.4g} ms, verification {1e3 * answer['verify_seconds']:.4g} ms"
    out = [f"{title}; per {TOKENS} tokens:"]
    out += ["".join(str(c).ljust(28) if i == 0 else str(c).rjust(12) for i, c in enumerate(row)) for row in rows]
    out.append("\nAt most so many tokens accepted of P nodes verified at once ('-': the bound says nothing):")
    for width, bounds in answer["speed_of_light"].items():
        said = "; ".join(f"{k}: {'-' if v is None else v}" for k, v in bounds.items())
        out.append(f"  P = {width}: {said}")
    return "\n".join(out)
