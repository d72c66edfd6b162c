"""`paceline draft eval` as a function: agreement, calibration, cost and predicted speed of a draft on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import folder
from .evaluate import DraftView, Sight, agreement, see_all
from .factory import draft_file
from .llama import step_cost
from .predict import Setting, tokens_per_second
from .traces import read_prompts, record

WIDTHS = (1, 4, 8)
Step = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """round_trips, verify: seconds."""

    per_category: int = 0
    tokens: int = 64
    round_trips: Sequence[float] = (0.0, 0.025, 0.05, 0.1)
    verify: float = 0.03
    threads: int = 1


def evaluate(
    target: Path,
    draft: Path,
    prompts: Path,
    options: Options,
    cache: Path | None = None,
    step: Step = lambda done, total: None,
) -> dict[str, Any]:
    """Everything `draft eval` prints. The folder's card, if there is one, keeps the result."""
    traces = record(target, read_prompts(prompts, options.per_category), options.tokens, cache, options.threads, step)
    view = DraftView(draft_file(draft), options.threads)
    sights = see_all(view, traces, step)
    cost = step_cost([view.model], WIDTHS)[0]
    view.model.close()
    result = agreement(sights) | {
        "text": f"held out: greedy text of {target.name} on the prompts of {prompts.name}, {options.tokens} tokens each",
        "step_ms": {str(w): round(1000 * c, 3) for w, c in cost.items()},
        "threads": options.threads,
        "predicted_tokens_per_second": predicted(sights, cost[1], options),
        "prediction": "one chain, four candidates a step, virtual time; a low estimate (no planner, no side branches)",
        "plain_tokens_per_second": 1 / options.verify,
    }
    if draft.is_dir():
        card = folder.read_card(draft)
        card.evaluation = result
        folder.write_card(draft, card)
    return result


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
    lines.append(f"(plain: {result['plain_tokens_per_second']:.1f}; {result['prediction']})")
    return "\n".join([*lines, result["text"]])
