"""`paceline draft`: build, distil, thin, evaluate, export, check. Parses and prints; the work is imported when needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from paceline.protocol.errors import PacelineError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .errors import RecipeError

app = typer.Typer(no_args_is_help=True, help="Make, train, measure and check 4-bit drafts.")
console = Console(stderr=True)
Step = Callable[[int, int], None]


@contextmanager
def guarded() -> Iterator[None]:
    """Errors that a person can act on end the command with their sentence, not with a traceback."""
    try:
        yield
    except PacelineError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        raise typer.Exit(1) from error


@contextmanager
def bar(label: str) -> Iterator[Step]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@app.command()
def build(
    target: Annotated[Path, typer.Argument(help="A .gguf file or a Hugging Face folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the draft to be made.")],
    layers: Annotated[str, typer.Option(help="How many layers to keep, which (0,1,8), or `auto` for all.")] = "auto",
    vocab: Annotated[str, typer.Option(help="How many vocabulary rows to keep, or `full`.")] = "full",
    quant: Annotated[str, typer.Option(help="iq4_nl, q4_0, q8_0, or q4_k (through llama.cpp's quantiser).")] = "iq4_nl",
    table: Annotated[str, typer.Option(help="Grid of the embedding and head: q8_0, or the same as --quant.")] = "q8_0",
    neurons: Annotated[int, typer.Option(help="Feed-forward width to keep; 0 keeps all.")] = 0,
    rounding: Annotated[str, typer.Option(help="plain, corrected (along the target's own text), or auto.")] = "auto",
    conversations: Annotated[int, typer.Option(help="Own conversations at hand; written where fewer are cached.")] = 24,
    calibration: Annotated[int, typer.Option(help="How many of them the correction looks at.")] = 24,
    sweeps: Annotated[
        int, typer.Option(min=0, help="Rounds of choosing scales and codes anew; each agrees better.")
    ] = 1,
    text: Annotated[Path | None, typer.Option(help="A file of own text to calibrate on instead.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder for the target's own text.")] = None,
) -> None:
    """Make an untrained draft of TARGET, from the target alone."""
    from . import factory

    with guarded(), bar("building") as step:
        report = factory.build(
            target,
            out,
            factory.Options(layers, vocab, quant, table, neurons, rounding, conversations, calibration, sweeps),
            text,
            cache,
            step,
        )
    typer.echo(json.dumps(report, indent=2))


@app.command()
def distill(
    target: Annotated[Path, typer.Option(help="The target: a .gguf file or a Hugging Face folder.")],
    draft: Annotated[Path, typer.Option(help="Draft folder in Q4_0 or IQ4_NL; trained in place.")],
    minutes: Annotated[float, typer.Option(help="Training time in all, earlier runs included.")] = 60.0,
    resume: Annotated[bool, typer.Option(help="Go on from the folder's checkpoint.")] = True,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1.5e-4,
    conversations: Annotated[
        int, typer.Option(help="Own conversations to train on; written where the cache has fewer.")
    ] = 1200,
    prompts: Annotated[
        Path | None, typer.Option(help="Your own prompts (JSON lines): the draft follows your domain.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A file of own text to train on instead.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder for the target's own text.")] = None,
) -> None:
    """Train a draft on its target's own text. Nothing leaves the machine; killed at any moment, it resumes."""
    from . import schooling

    with guarded(), bar("training (minutes)") as step:
        options = schooling.Options(minutes, rate, resume, device, conversations)
        report = schooling.distil(target, draft, options, prompts, text, cache, step, console.print)
    typer.echo(json.dumps(report, indent=2))


@app.command()
def thin(
    target: Annotated[Path, typer.Option(help="The target: a .gguf file or a Hugging Face folder.")],
    draft: Annotated[Path, typer.Option(help="Draft folder; changed in place.")],
    heads: Annotated[int, typer.Option(help="Heads of keys and values to keep, in all layers together.")],
    conversations: Annotated[
        int, typer.Option(help="Own conversations at hand; written where fewer are cached.")
    ] = 1200,
    text: Annotated[Path | None, typer.Option(help="A file of own text to choose along instead.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder for the target's own text.")] = None,
) -> None:
    """Leave the heads out of a draft's attention that it needs least. Train it on afterwards: `--minutes` counts anew."""
    from . import thin as thinning

    with guarded(), bar("thinning") as step:
        report = thinning.thin(target, draft, thinning.Options(heads, conversations), text, cache, step)
    typer.echo(json.dumps(report, indent=2))


@app.command("eval")
def evaluate(
    target: Annotated[Path, typer.Option(help="The target as a .gguf file.")],
    draft: Annotated[Path, typer.Option(help="A draft folder, or a .gguf file.")],
    prompts: Annotated[
        Path, typer.Option(help="JSON lines with `turns` or `prompt`. Held-out text: never train on it.")
    ],
    per_category: Annotated[int, typer.Option(help="Prompts a category; 0 takes all.")] = 0,
    tokens: Annotated[int, typer.Option(help="Length of the target's greedy text on each.")] = 64,
    rtt: Annotated[str, typer.Option(help="Round trips to predict for, in milliseconds.")] = "0,25,50,100",
    verify: Annotated[float, typer.Option(help="One verification of the target, in milliseconds.")] = 30.0,
    threads: Annotated[int, typer.Option(help="Threads for measuring and for the cost.")] = 1,
    temperature: Annotated[
        float, typer.Option(help="Measure along text drawn at this temperature as well; 0 leaves it out.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
    cache: Annotated[Path | None, typer.Option(help="Folder for the target's recorded text.")] = None,
) -> None:
    """Measure a draft along the target's own greedy text on held-out prompts: agreement, calibration, cost, predicted speed."""
    from . import measure

    with guarded(), bar("measuring") as step:
        trips = [float(r) / 1000 for r in rtt.split(",")]
        options = measure.Options(per_category, tokens, trips, verify / 1000, threads, temperature)
        result = measure.evaluate(target, draft, prompts, options, cache, step)
    typer.echo(json.dumps(result, indent=2) if as_json else measure.table(result))


@app.command()
def export(
    draft: Annotated[Path, typer.Argument(help="A draft folder, or a .gguf file.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the draft to be made.")],
    form: Annotated[str, typer.Option("--format", help="onnx: for ONNX Runtime.")] = "onnx",
    bits: Annotated[str, typer.Option(help="Of each matrix: 4, 8, or exact, as few as hold it exactly.")] = "exact",
    target: Annotated[
        Path | None, typer.Option(help="The target's .gguf file, where DRAFT is a file without a vocabulary.")
    ] = None,
) -> None:
    """Write a draft for another runtime, and say what its values lost."""
    from . import onnx_export

    with guarded(), bar("exporting") as step:
        if form not in onnx_export.FORMATS:
            raise RecipeError(f"There is no --format {form}; there is {', '.join(onnx_export.FORMATS)}.")
        if bits not in onnx_export.BITS:
            raise RecipeError(f"--bits is {', '.join(onnx_export.BITS)}, not {bits}.")
        report = onnx_export.export(draft, out, onnx_export.BITS[bits], target, step)
    typer.echo(json.dumps(report, indent=2))


@app.command()
def ngrams(
    target: Annotated[Path, typer.Argument(help="A .gguf file or a Hugging Face folder.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The draft's folder, or a file to be made.")],
    conversations: Annotated[
        int, typer.Option(min=1, help="Own conversations to count; written where the cache has fewer.")
    ] = 1200,
    prompts: Annotated[
        Path | None, typer.Option(help="Your own prompts (JSON lines): their answers are counted instead.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A file of own text to count instead.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder for the target's own text.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, to write text on.")] = "cpu",
) -> None:
    """Count what TARGET writes into a table of n-grams, which drafts for nothing beside a draft or a verifier."""
    from . import ngrams as counting
    from . import schooling

    with guarded(), bar("text") as step:
        on = schooling.device_named(device)
        path, table = counting.make(target, out, conversations, prompts, text, cache, on, step)
    typer.echo(f"{path}: {len(table):,} contexts, {path.stat().st_size:,} bytes")


@app.command()
def verify(
    draft: Annotated[Path, typer.Argument(help="A draft folder.")],
    target: Annotated[Path | None, typer.Option(help="Also check that it is a draft for this target.")] = None,
) -> None:
    """Check a draft folder: complete, undamaged, its maps sound, and made for its target."""
    from .folder import verify as check

    with guarded():
        against = None
        if target is not None:
            from .target import open_target, vocabulary

            against = vocabulary(open_target(target))
        card = check(draft, against)
    typer.echo(f"{draft} is a sound draft for {card.target['name']}.")
