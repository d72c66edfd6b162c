"""`paceline bench predictor`: is it calibrated?"""

import json
from pathlib import Path
from typing import Annotated

import typer
from paceline.scripts import options


def predictor(
    prompts: Annotated[Path, typer.Option(help="Lines of JSON with `turns`.")],
    pair: options.Pair = "smollm2",
    count: Annotated[int, typer.Option(min=1, help="Prompts whose outcomes are predicted.")] = 24,
    learn: Annotated[int, typer.Option(min=0, help="Further prompts that were learned on before.")] = 16,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of tokens.")] = 0,
    threads: options.Threads = None,
    plot: Annotated[Path | None, typer.Option(help="A reliability picture as a PNG.")] = None,
) -> None:
    """Brier score and calibration error of the predictor and of the draft's own probabilities, on prompts not learned on."""
    from paceline.scripts.lab.calibration import brier, calibration_error, picture, watch
    from paceline.scripts.lab.command_rtt import Question, bar
    from paceline.scripts.lab.prepare import prepared
    from paceline.scripts.lab.workshop import outcomes

    question = Question(
        pair, "small-gpu", 0.03, (0.0,), ("stream",), prompts, count, 0, max_tokens, temperature, seed, learn, 0,
    )  # fmt: skip
    with bar() as step:
        workshop, cases, others, learned, about = prepared(question, threads, step)
        seen = []
        for case in cases:
            memo = workshop.memo(case)
            seen += outcomes(memo, case)
            memo.save()
    workshop.close()
    found = watch(learned, seen, seeded=temperature > 0)
    result = {
        "pair": pair,
        "draft": about["draft"],
        "learned_on": sum(len(c.text) for c in others),
        "outcomes": len(found.taken),
        "brier": round(brier(found.predicted, found.taken), 4),
        "brier_draft": round(brier(found.draft, found.taken), 4),
        "calibration_error_first": round(calibration_error(found.predicted[:, 0], found.taken[:, 0]), 4),
        "calibration_error_first_draft": round(calibration_error(found.draft[:, 0], found.taken[:, 0]), 4),
        "calibration_error": round(calibration_error(found.predicted, found.taken), 4),
        "calibration_error_draft": round(calibration_error(found.draft, found.taken), 4),
        "taken": [round(float(x), 4) for x in found.taken.mean(axis=0).cumsum()],
    }
    if plot is not None:
        picture(found, plot, f"{pair}: {len(found.taken)} outcomes")
    typer.echo(json.dumps(result))
