"""`paceline bench drafts`: what a step of several drafts of one target costs, side by side in one run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from paceline.scripts import options

if TYPE_CHECKING:
    from paceline.edge.draft import Row
    from paceline.edge.drafts.files import FileDraft
    from paceline.protocol.vocabulary import Vocabulary

FILLER = 0  # the token that text and rows are made of: what they say does not change what they cost


def drafts(
    others: Annotated[list[str], typer.Argument(help="Drafts to set beside it: GGUF files or draft folders.")],
    pair: options.Pair = "smollm2",
    target: options.Target = None,
    draft: options.Draft = None,
    rows: Annotated[str, typer.Option(help="Rows of a step, separated by commas.")] = "1,4,8",
    past: Annotated[int, typer.Option(min=1, max=3000, help="Tokens of text before them.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Steps of each; the median counts.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="With 1, processor time is measured; else time on the wall.")] = 1,
    provider: options.Provider = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for people.")] = False,
) -> None:
    """Measure a step of the pair's draft and of others in turns, and say each as a ratio to the first."""
    from paceline.edge.text import Text
    from paceline.scripts.pairs import draft_of, files_of, vocabulary_of

    widths = options.whole_numbers(rows)
    files = files_of(pair, target, draft)
    paths = [files.draft, *(draft_of(pair, name) for name in others)]
    vocabulary = Text(vocabulary_of(files.target)).vocabulary
    opened = [_open(path, vocabulary, threads, provider) for path in paths]
    found = measure(opened, widths, past, repeats)
    for one in opened:
        one.shut()
    names = [str(path) for path in paths]
    result = {"threads": threads, "past": past, "drafts": dict(zip(names, found, strict=True))}
    typer.echo(json.dumps(result) if as_json else as_lines(names, found))


def measure(drafts: "Sequence[FileDraft]", widths: Sequence[int], past: int, repeats: int) -> list[dict[int, float]]:
    """Median seconds of each draft's forward at each width: children of the last of `past` tokens, freed after each step."""
    from statistics import median

    times: list[dict[int, list[float]]] = [{w: [] for w in widths} for _ in drafts]
    handles = [draft.open([FILLER] * past) for draft in drafts]
    for draft, handle in zip(drafts, handles, strict=True):
        draft.extend([_row(handle, past, 0)])
    for _ in range(repeats):
        for width in widths:
            for draft, handle, mine in zip(drafts, handles, times, strict=True):
                mine[width].append(draft.extend([_row(handle, past, n + 1) for n in range(width)]).forward)
                draft.commit(handle, (), (), {0})
    return [{w: median(t) for w, t in mine.items()} for mine in times]


def as_lines(names: Sequence[str], found: Sequence[dict[int, float]]) -> str:
    """One line a draft: milliseconds of a step at each width, and the ratio to the first draft's."""
    lines = []
    for name, mine in zip(names, found, strict=True):
        steps = (f"{w} rows {1000 * s:.1f} ms ({s / found[0][w]:.2f})" for w, s in mine.items())
        lines.append(f"{', '.join(steps)}: {name}")
    return "\n".join(lines)


def _open(path: Path, vocabulary: "Vocabulary", threads: int, provider: str | None) -> "FileDraft":
    import time

    from paceline.edge.drafts.files import open_draft

    clock = time.thread_time if threads == 1 else time.perf_counter
    provider = provider if path.suffix == ".onnx" else None
    return open_draft(path, vocabulary, threads=threads, provider=provider, clock=clock)


def _row(handle: int, past: int, node: int) -> "Row":
    """Node 0 is the last token of the text, the others its children."""
    from paceline.edge.draft import Choice, Row
    from paceline.protocol.sampling import Sampling

    return Row(handle, node, 0 if node else -1, FILLER, past - 1 + (node > 0), Choice(Sampling()))
