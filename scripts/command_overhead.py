"""`paceline bench overhead`: what either side spends outside its model's forward."""

from typing import Annotated

import typer
from paceline.scripts import options

QUESTIONS = ["why is the sky blue", "Write a short story about a lighthouse keeper.", "List three uses for a brick."]


def overhead(
    pair: options.Pair = "smollm2",
    target: options.Target = None,
    draft: options.Draft = None,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = 1,
    verify_floor: options.VerifyFloor = 0.03,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for people.")] = False,
) -> None:
    """CPU seconds of edge and verifier outside their models' forward, as shares of it, in one run on this machine."""
    import json

    from paceline.scripts.lab.llama_overhead import measure, report
    from paceline.scripts.pairs import files_of, vocabulary_of

    params = options.sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    files = files_of(pair, target, draft)
    found = report(
        measure(files.target, files.draft, vocabulary_of(files.target), QUESTIONS, params, max_tokens, verify_floor)
    )
    if as_json:
        typer.echo(json.dumps(found))
        return
    for side in ("edge", "cloud"):
        forward, loop = found[f"{side}_forward_seconds"], found[f"{side}_loop_seconds"]
        outside, share = found[f"{side}_thread_outside_seconds"], found[f"{side}_share"]
        typer.echo(
            f"{side:5}  {share:.1%} outside the forward: {1000 * loop:.0f} ms in the event loop, {1000 * outside:.0f} ms"
            f" around {1000 * forward:.0f} ms of forwards"
        )
    typer.echo(f"each step of the verifier paced to {1000 * verify_floor:.0f} ms")
    typer.echo(
        f"{found['tokens']} tokens in {found['steps']} steps, {found['draft_rows']} rows drafted,"
        f" {found['uplink_bytes_per_token']} bytes up a token, largest message {found['largest_message_bytes']} bytes"
    )
