"""`paceline draft eval` as a function: agreement, calibration, cost and predicted speed of a draft on held-out prompts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import folder
from .evaluate import DraftView, Sight, agreement, see_all
from .factory import draft_file
from .llama import LlamaModel, step_cost
from .predict import DEVICES, Setting, tokens_per_second
from .report import agreement_picture
from .requantise import Kind, requantise
from .traces import read_prompts, record

WIDTHS = (1, 4, 8)
PICTURE = "evaluation.svg"
Step = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """round_trips, verify: seconds. temperature: of the second text, drawn instead of greedy; 0 leaves it out."""

    per_category: int = 0
    tokens: int = 64
    round_trips: Sequence[float] = (0.0, 0.025, 0.05, 0.1)
    verify: float = 0.03
    threads: int = 1
    temperature: float = 0.0


def evaluate(
    target: Path,
    draft: Path,
    prompts: Path,
    options: Options,
    cache: Path | None = None,
    step: Step = lambda done, total: None,
) -> dict[str, Any]:
    """Everything `draft eval` prints. The folder's card, if there is one, keeps the result, and evaluation.svg shows it."""
    asked = read_prompts(prompts, options.per_category)
    view = DraftView(draft_file(draft), options.threads)

    def seen(temperature: float) -> list[Sight]:
        traces = record(target, asked, options.tokens, cache, options.threads, step, temperature)
        return see_all(view, traces, step)

    sights = seen(0.0)
    cost, reference = costs(view.model, target, cache, options.threads)
    result = agreement(sights) | {
        "text": f"held out: greedy text of {target.name} on the prompts of {prompts.name}, {options.tokens} tokens each",
        "step_ms": {str(w): round(1000 * c, 3) for w, c in cost.items()},
        "step_of_target_at_q4_0": {str(w): round(cost[w] / c, 3) for w, c in reference.items()},
        "threads": options.threads,
        "predicted_tokens_per_second": predicted(sights, cost[1], options),
        "predicted_by_device": {
            device: predicted(sights, row * cost[1] / reference[1], options) for device, row in DEVICES.items()
        },
        "prediction": "one chain, four candidates a step, virtual time; a low estimate (no planner, no side branches)",
        "plain_tokens_per_second": 1 / options.verify,
    }
    if options.temperature:
        drawn = agreement(seen(options.temperature))
        result["sampled"] = {k: drawn[k] for k in ("mean", "categories", "by_position")}
        result["sampled"]["temperature"] = options.temperature
    view.model.close()
    if draft.is_dir():
        card = folder.read_card(draft)
        card.evaluation = result
        folder.write_card(draft, card)
        (draft / PICTURE).write_text(agreement_picture(result, f"{card.name}, a draft for {card.target['name']}"))
    return result


def costs(
    model: LlamaModel, target: Path, cache: Path | None, threads: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds a step by batch width: of the draft, and of the target rounded to Q4_0 by llama.cpp, taking turns in one run."""
    with tempfile.TemporaryDirectory() as scratch:
        reference = (cache or Path(scratch)) / f"{target.stem}.{target.stat().st_size}.Q4_0.gguf"
        if not reference.exists():
            reference.parent.mkdir(parents=True, exist_ok=True)
            requantise(target, reference, Kind.Q4_0, threads=threads)
        other = LlamaModel(reference, threads=threads)
        mine, theirs = step_cost([model, other], WIDTHS)
        other.close()
    return mine, theirs


def predicted(sights: Sequence[Sight], step: float, options: Options) -> dict[str, float]:
    """Tokens a second by round trip in milliseconds."""
    ranks = [s.rank for s in sights]
    trips = {f"{1000 * r:g}": Setting(options.verify, step, r) for r in options.round_trips}
    return {name: round(tokens_per_second(ranks, s), 1) for name, s in trips.items()}


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    rows = [("mean over categories", result["mean"]), *result["categories"].items()]
    lines = [f"{'':24}{'top-1':>8}{'top-2':>8}{'top-4':>8}{'top-8':>8}"]
    lines += [f"{name:24}" + "".join(f"{entry[f'top{j}']:8.1%}" for j in (1, 2, 4, 8)) for name, entry in rows]
    lines.append("step, ms by batch width: " + ", ".join(f"{w}: {ms}" for w, ms in result["step_ms"].items()))
    lines.append(
        "tokens/s by round trip, ms: "
        + ", ".join(f"{r}: {t}" for r, t in result["predicted_tokens_per_second"].items())
    )
    shares = ", ".join(f"{w}: {share:.0%}" for w, share in result["step_of_target_at_q4_0"].items())
    lines.append(f"of the target's at Q4_0: {shares}")
    for device, speeds in result["predicted_by_device"].items():
        lines.append(f"{device:>24} " + ", ".join(f"{r}: {t}" for r, t in speeds.items()))
    if "sampled" in result:
        mean = result["sampled"]["mean"]
        lines.append(
            f"along text drawn at temperature {result['sampled']['temperature']:g}: "
            + ", ".join(f"top-{j} {mean[f'top{j}']:.1%}" for j in (1, 2, 4, 8))
        )
    lines.append(f"(plain: {result['plain_tokens_per_second']:.1f}; {result['prediction']})")
    return "\n".join([*lines, result["text"]])
