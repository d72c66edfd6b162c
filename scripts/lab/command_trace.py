"""`paceline bench trace`: one answer as a timeline."""

from pathlib import Path
from typing import Annotated

import typer
from paceline.scripts import options


def trace(
    prompts: Annotated[Path, typer.Option(help="Lines of JSON with `turns`; the first one after --skip is answered.")],
    out: Annotated[Path, typer.Option("--json", help="The trace, for ui.perfetto.dev.")],
    picture: Annotated[Path | None, typer.Option(help="Swim-lanes as a PNG.")] = None,
    pair: options.Pair = "smollm2",
    policy: Annotated[
        str, typer.Option(help="ar, colo, sync, ssd, stream, with parameters as in sync:rounds=4.")
    ] = "stream",
    rtt: Annotated[float, typer.Option(min=0, max=10, help="Round trip in seconds.")] = 0.05,
    verify_floor: Annotated[float, typer.Option(min=0.0001, max=10, help="Seconds of a verification.")] = 0.03,
    edge: Annotated[
        str, typer.Option(help="laptop, small-gpu, fast, pi, or ms for a row and a further row.")
    ] = "small-gpu",
    skip: Annotated[int, typer.Option(min=0, help="Prompts to leave out.")] = 0,
    learn: Annotated[int, typer.Option(min=0, help="Further prompts that the predictor has learned on before.")] = 8,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    until: Annotated[float, typer.Option(min=0.01, help="Seconds that the picture shows.")] = 0.6,
    threads: options.Threads = None,
) -> None:
    """Trace one answer under the virtual clock: draft, uplink, verifications (hits and misses), downlink, commits."""
    from paceline.edge.policies import policy as policy_named
    from paceline.scripts.lab.command_rtt import Question, bar
    from paceline.scripts.lab.experiment import Events, answer
    from paceline.scripts.lab.prepare import prepared, setting_of
    from paceline.scripts.lab.trace import picture as draw
    from paceline.scripts.lab.trace import spans, write

    policy_named(policy)
    question = Question(
        pair, edge, verify_floor, (rtt,), (policy,), prompts, 1, skip, max_tokens, temperature, 0, learn, 0,
    )  # fmt: skip
    with bar() as step:
        workshop, [case], _, learned, about = prepared(question, threads, step)
    events, bench = Events(), workshop.bench(case, learned)
    run = answer(bench, case, setting_of(workshop, question, policy, rtt), events)
    bench.memo.save()
    workshop.close()
    title = (
        f"{policy}, {about['pair']}, edge {edge}, round trip {1000 * rtt:g} ms, verification {1000 * verify_floor:g} ms:"
        f" {run.tokens / run.seconds:.1f} tokens/s, hit rate {run.hits / max(run.steps, 1):.2f}"
    )
    found = spans(events)
    write(found, title, out)
    if picture is not None:
        draw(found, title, picture, until=until)
    typer.echo(title)
