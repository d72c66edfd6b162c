"""The recipes of the shipped drafts, and making one from its target: `scripts/make_default_draft NAME TARGET WORK`.

`default`: every layer, the whole vocabulary; agreement first. It ships as a patch of its target's file. `tiny`: narrow layers
with few heads, a third of the vocabulary; cost first. Both are trained on nothing but text that the target wrote.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.protocol.errors import PacelineError

from . import factory, folder, measure, patch, schooling, thin
from .errors import RecipeError
from .shipped import PATCH

CONVERSATIONS = 1200
WHOLE = 0.33  # share of the training before heads are left out
CALIBRATION = 84  # conversations that the correction of `default` looks at
#: Of a number of weights, more layers that are narrower agree far more often than few of full width, and most of their heads can
#: be spared (quant/README.md).
TINY_LAYERS = "0,1,2,4,5,7,8,9,10,11,12,13,15,16,18,19,20,21,23,24,26,27,28,29"
NOTICE = """This draft is derived from the weights of SmolLM2-135M-Instruct by Hugging Face TB, Apache License 2.0
(https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct). It was made with `scripts/make_default_draft`,
on text written by that model alone, and is distributed under the same licence.
"""


@dataclass(frozen=True)
class Shipped:
    """options: how it is built; minutes: training on two idle cores; rate: peak learning rate; patched: ships as a patch; heads:
    of keys and values that are left, in all layers together, when a third of the training is over, None for all."""

    options: factory.Options
    minutes: float
    rate: float
    patched: bool
    heads: int | None = None


RECIPES = {
    "default": Shipped(
        factory.Options(
            quant="iq4_nl",
            table="q8_0",
            rounding="corrected",
            conversations=CONVERSATIONS,
            calibration=CALIBRATION,
            sweeps=3,
        ),
        240.0,
        3e-5,
        True,
    ),
    "tiny": Shipped(
        factory.Options(
            TINY_LAYERS,
            "16384",
            "q4_0",
            "q4_0",
            neurons=288,
            rounding="corrected",
            conversations=CONVERSATIONS,
            calibration=32,
            sweeps=0,
        ),
        240.0,
        5e-4,
        False,
        heads=34,
    ),
}


def make(
    name: str,
    target: Path,
    work: Path,
    minutes: float | None = None,
    conversations: int = CONVERSATIONS,
    prompts: Path | None = None,
    say: Callable[[str], object] = print,
    device: str = "cpu",
) -> Path:
    """Build, train, measure and pack the draft `name` in `work`, going on where it stopped; returns the folder to ship.

    minutes: of training in all, the recipe's where None; conversations: of own text to learn from; prompts: held-out ones to
    measure along, without which nothing is measured. Raises `RecipeError` and whatever a part raises.
    """
    if name not in RECIPES:
        raise RecipeError(f"There is no recipe {name!r}; there are: {', '.join(RECIPES)}.")
    recipe, out, cache = RECIPES[name], work / name, work / "text"
    if not (out / factory.CHECKPOINT).exists():
        say(f"building {name}")
        report = factory.build(target, out, replace(recipe.options, conversations=conversations), cache=cache)
        say(f"built in {report['seconds']} s, {report['bytes']:,} bytes")
    wanted = recipe.minutes if minutes is None else minutes
    if wanted > 0:
        train(recipe, target, out, schooling.Options(wanted, recipe.rate, True, device, conversations), cache, say)
    if prompts is not None:
        say(measure.table(measure.evaluate(target, out, prompts, measure.Options(), work / "traces")))
    return pack(name, target, out, work / "ship" / name)


def train(
    recipe: Shipped, target: Path, out: Path, options: schooling.Options, cache: Path, say: Callable[[str], object]
) -> None:
    """Train the draft in `out` for the options' minutes in all, and leave heads out of it on the way where the recipe says so."""

    def on(share: float) -> None:
        part = replace(options, minutes=share * options.minutes)
        say(json.dumps(schooling.distil(target, out, part, cache=cache, say=say)))

    if recipe.heads is None:
        on(1.0)
        return
    if "thinned" not in folder.read_card(out).recipe:
        on(WHOLE)
        say(json.dumps(thin.thin(target, out, thin.Options(recipe.heads, options.conversations), cache=cache)))
    on(1 - WHOLE)


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="make_default_draft", description=__doc__)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("target", type=Path, help="SmolLM2-135M-Instruct as a GGUF file")
    parser.add_argument("work", type=Path, help="folder where everything is kept and taken up again")
    parser.add_argument("--minutes", type=float, help="training time in all; 0 for rounding alone")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS, help="own text to learn from")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where it is trained")
    parser.add_argument("--prompts", type=Path, help="held-out prompts to measure along")
    given = parser.parse_args()
    try:
        made = make(
            given.name, given.target, given.work, given.minutes, given.conversations, given.prompts, device=given.device
        )
        print(made)
    except PacelineError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
