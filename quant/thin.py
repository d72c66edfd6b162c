"""`paceline draft thin` as a function: leave heads out of a draft, and let training go on without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import distil, folder, heads, store
from .errors import RecipeError
from .factory import CHECKPOINT, card, split, write_student
from .schooling import begun
from .target import open_target

ALONG = 24  # conversations that the worth of a head is taken along


@dataclass(frozen=True)
class Options:
    """heads: of keys and values that are kept, in all layers together; conversations: to choose the looked-at ones from."""

    heads: int
    conversations: int = 1200


def thin(
    source: Path,
    out: Path,
    options: Options,
    text_file: Path | None = None,
    cache: Path | None = None,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Thin the draft in `out`; checkpoint, draft and card are written anew, and the clock of training begins again.

    Returns what is left, and the held-out agreement before and after. Raises `DraftError`, `RecipeError`, `WeightsError`.
    """
    target = open_target(source)
    if target.architecture != "llama":
        raise RecipeError(
            f"{target.name} is of the family {target.architecture}; heads can be left out of Llama drafts alone,"
            " since llama.cpp runs no others whose layers differ."
        )
    student, place = begun(target, out)
    text = store.text(target, source, options.conversations, root=cache, progress=step, file=text_file)
    train, held = split(text)

    def agreement() -> float:
        trainer = distil.Trainer(student, text, train, distil.Pace())
        first, _ = trainer.agreement(held[:ALONG])
        trainer.close()
        return round(first, 4)

    before = agreement()
    chosen = np.random.default_rng(0).permutation(train)[:ALONG]
    heads.thin(student, options.heads, text, chosen.tolist(), step)
    distil.save(out / CHECKPOINT, student, distil.Place(step=place.step, seen=place.seen))
    write_student(student, target, out / folder.DRAFT)
    result = {
        "heads_by_layer": student.layout().kv_heads,
        "bytes": (out / folder.DRAFT).stat().st_size,
        "held_out_top1": {"before": before, "after": agreement()},
    }
    kept = folder.read_card(out)
    folder.write_card(out, card(target, kept.name, kept.recipe | {"thinned": result}))
    return result
