"""`paceline bench order`: that the order of cells in the target's cache is what keeps its rows, and its text, the same."""

from typing import Annotated

import typer
from paceline.scripts import options

QUESTIONS = ["why is the sky blue", "Write a short story about a lighthouse keeper.", "List three uses for a brick."]


def order(
    pair: options.Pair = "smollm2",
    target: options.Target = None,
    draft: options.Draft = None,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each answer.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for people.")] = False,
) -> None:
    """Count the rows that differ from one-by-one decoding, and the greedy choices that flip, with cells in order and not."""
    import json
    from dataclasses import asdict

    from paceline.edge.text import Text
    from paceline.scripts.lab.llama_order import measure
    from paceline.scripts.pairs import files_of, vocabulary_of

    files = files_of(pair, target, draft)
    found = measure(files.target, files.draft, Text(vocabulary_of(files.target)), QUESTIONS, tokens)
    names = {True: "in_order", False: "out_of_order"}
    if as_json:
        typer.echo(json.dumps({names[keep]: asdict(o) for keep, o in found.items()}))
        return
    for keep, o in found.items():
        typer.echo(
            f"{names[keep]:13} {o.different} of {o.rows} rows differ, by up to {o.largest:.3f}; {o.flipped} choices flip"
        )
