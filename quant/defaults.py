"""The recipes of the shipped drafts, and making one from its target: `python -m paceline.quant.defaults NAME TARGET WORK`.

`default`: every layer, the whole vocabulary; agreement first. It ships as a patch of its target's file. `tiny`: few layers, half
of the vocabulary; cost first. Both are trained on nothing but text that the target wrote.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import factory, folder, patch, schooling
from .errors import RecipeError
from .shipped import PATCH

CONVERSATIONS = 1200
NOTICE = """This draft is derived from the weights of SmolLM2-135M-Instruct by Hugging Face TB, Apache License 2.0
(https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct). It was made with `scripts/make_default_draft`,
on text written by that model alone, and is distributed under the same licence.
"""


@dataclass(frozen=True)
class Shipped:
    """options: how it is built; minutes: training on two idle cores; rate: peak learning rate; patched: ships as a patch."""

    options: factory.Options
    minutes: float
    rate: float
    patched: bool


RECIPES = {
    "default": Shipped(
        factory.Options(quant="iq4_nl", table="q8_0", rounding="corrected", conversations=CONVERSATIONS),
        240.0,
        3e-5,
        True,
    ),
    "tiny": Shipped(
        factory.Options("8", "24576", "q4_0", "q4_0", rounding="corrected", conversations=CONVERSATIONS),
        240.0,
        3e-4,
        False,
    ),
}


def make(
    name: str, target: Path, work: Path, minutes: float | None = None, say: Callable[[str], object] = print
) -> Path:
    """Build, train and pack the draft `name` in `work`, going on where it stopped; returns the folder to ship."""
    if name not in RECIPES:
        raise RecipeError(f"There is no recipe {name!r}; there are: {', '.join(RECIPES)}.")
    recipe, out, cache = RECIPES[name], work / name, work / "text"
    if not (out / factory.CHECKPOINT).exists():
        say(f"building {name}")
        report = factory.build(target, out, recipe.options, cache=cache)
        say(f"built in {report['seconds']} s, {report['bytes']:,} bytes")
    wanted = recipe.minutes if minutes is None else minutes
    if wanted > 0:
        options = schooling.Options(wanted, recipe.rate, conversations=CONVERSATIONS)
        result = schooling.distil(target, out, options, cache=cache, say=say)
        say(json.dumps(result))
    return pack(name, target, out, work / "ship" / name)


def pack(name: str, target: Path, draft: Path, ship: Path) -> Path:
    """The folder to ship: card, notice, and the draft or its patch."""
    card = folder.verify(draft)
    ship.mkdir(parents=True, exist_ok=True)
    if RECIPES[name].patched:
        patch.make(draft / folder.DRAFT, target, ship / PATCH, list(card.recipe["layers"]))
    else:
        shutil.copyfile(draft / folder.DRAFT, ship / folder.DRAFT)
    shutil.copyfile(draft / folder.CARD, ship / folder.CARD)
    (ship / "NOTICE").write_text(NOTICE)
    return ship


if __name__ == "__main__":
    given = sys.argv[1:]
    print(make(given[0], Path(given[1]), Path(given[2]), float(given[3]) if len(given) > 3 else None))
