"""`paceline draft distill` as a function: text, training, checkpoints, early stop, and the draft folder kept current."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from paceline.kernels.gguf_file import GgufFile

from . import distil as distilling
from . import folder, store
from . import text as own_text
from .begin import student_of
from .build import frozen_tensor
from .errors import DraftError, RecipeError
from .factory import CHECKPOINT, card, split, write_student
from .refresh import on_policy
from .report import picture
from .student import Student
from .target import Target, open_target, vocabulary
from .text import OwnText

EVERY = 300.0  # seconds between checkpoints
QUICK = 24  # held-out conversations looked at on the way; the end looks at as many as it can afford
LOOKING, LOOKING_SHARE = 60.0, 0.1  # seconds that the end may look for, or that share of the training if it is more
PATIENCE = 5  # checkpoints without a better agreement before stopping
LATE = 0.7  # share of the time after which the draft also learns from what it writes itself
REFRESHED = "refresh.npz"
Step = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    minutes: float = 60.0
    rate: float = 1.5e-4
    resume: bool = True
    device: str = "cpu"
    conversations: int = 1200


def device_named(name: str) -> torch.device:
    """cpu, or cuda where there is one. Raises `RecipeError`."""
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise RecipeError(f"--device is cpu or cuda, not {name!r}.")
    if name != "cpu" and not torch.cuda.is_available():
        raise RecipeError("torch sees no CUDA device here: train with --device cpu, or install torch with CUDA.")
    return torch.device(name)


def begun(target: Target, out: Path) -> tuple[Student, distilling.Place]:
    """The draft in the folder `out` where its training stands: its checkpoint, or its file where it has none.

    Raises `DraftError` unless it is this target's, and `RecipeError` where it cannot be trained.
    """
    card = folder.read_card(out)
    if card.target["fingerprint"] != vocabulary(target).fingerprint:
        raise DraftError(f"{out} is a draft for {card.target['name']}, not for {target.name}: their tokens differ.")
    if (out / CHECKPOINT).exists():
        return load(out / CHECKPOINT, target)
    if not (out / folder.DRAFT).exists():
        raise DraftError(
            f"{out} has neither {CHECKPOINT} nor {folder.DRAFT}: make it with `paceline draft build` first."
        )
    layers = card.recipe.get("layers", list(range(target.shape.layers)))
    return student_of(GgufFile(out / folder.DRAFT), target, layers), distilling.Place()


def distil(
    source: Path,
    out: Path,
    options: Options,
    prompts: Path | None = None,
    text_file: Path | None = None,
    cache: Path | None = None,
    step: Step = lambda done, total: None,
    say: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Train the draft in `out` until `options.minutes` of training in all, or until held-out agreement stops rising.

    Writes checkpoint, draft.gguf, draft.json and training.svg every few minutes, each in one step; the folder holds the best
    draft so far, the checkpoint the latest state.
    """
    device, target = device_named(options.device), open_target(source)
    student, place = begun(target, out)
    text = store.text(target, source, options.conversations, prompts, cache, device, progress=step, file=text_file)
    train, held = split(text)
    if not options.resume:
        place = distilling.Place()
    pace = distilling.Pace(rate=options.rate, **({"workers": 1, "tokens": 16_384} if device.type == "cuda" else {}))
    if (out / REFRESHED).exists() and options.resume:
        text, train = joined_by(text, train, own_text.load(out / REFRESHED))
    trainer = distilling.Trainer(student.to(device), text, train, pace, place)
    session = Session(trainer, target, out, held, say, partial(on_policy, target, source))
    session.run(options.minutes * 60, step)
    result = session.finish()
    trainer.close()
    return result


def joined_by(text: OwnText, train: NDArray[np.int64], more: OwnText) -> tuple[OwnText, NDArray[np.int64]]:
    """Text with more behind it, all of which is trained on."""
    return own_text.joined([text, more]), np.concatenate([train, len(text) + np.arange(len(more))])


def load(checkpoint: Path, target: Target) -> tuple[Student, distilling.Place]:
    return distilling.load(checkpoint, lambda name, ids, layers: frozen_tensor(target, name, ids, layers))


def affordable(spent: float, elapsed: float, most: int) -> int:
    """How many held-out conversations of `most` the end looks at: `QUICK` took `spent` seconds, the training `elapsed`."""
    seconds = max(LOOKING, LOOKING_SHARE * elapsed)
    return min(most, max(QUICK, int(QUICK * seconds / max(spent, 1e-9))))


class Session:
    """One run of training: decides when to look, to save and to stop."""

    def __init__(
        self,
        trainer: distilling.Trainer,
        target: Target,
        out: Path,
        held: NDArray[np.int64],
        say: Callable[[str], object],
        refresh: Callable[[Student, OwnText, NDArray[np.int64], int], OwnText],
    ) -> None:
        self.trainer, self.target, self.out, self.held, self.say = trainer, target, out, held, say
        self.refresh = refresh

    def run(self, budget: float, step: Step) -> None:
        place = self.trainer.place
        if not place.log:
            self.look(self.held[:QUICK])
        saved = place.elapsed
        while place.elapsed < budget and not self.stale():
            began = time.monotonic()
            if place.elapsed >= LATE * budget and not (self.out / REFRESHED).exists():
                self.turn_to_own_text()
            loss = self.trainer.step(place.elapsed / budget)
            place.elapsed += time.monotonic() - began
            step(int(place.elapsed / 60), int(budget / 60))
            if place.elapsed - saved >= EVERY:
                self.look(self.held[:QUICK])
                first, four = place.log[-1][2:]
                self.say(f"step {place.step}: divergence {loss:.4f}, held-out agreement {first:.1%} (top-4 {four:.1%})")
                self.keep()
                saved = place.elapsed

    def turn_to_own_text(self) -> None:
        """Add answers that the draft writes, with what the target would have said at each place: kept, so that a resumed run has
        them too."""
        trainer = self.trainer
        more = self.refresh(trainer.student, trainer.text, trainer.train, trainer.place.step)
        own_text.save(self.out / REFRESHED, more)
        trainer.extend(*joined_by(trainer.text, trainer.train, more))
        self.say(f"{len(more)} answers of the draft's own join the text")

    def look(self, chosen: NDArray[np.int64]) -> None:
        place = self.trainer.place
        place.log.append((place.elapsed, place.seen, *self.trainer.agreement(chosen)))

    def stale(self) -> bool:
        scores = [entry[2] for entry in self.trainer.place.log]
        return len(scores) > PATIENCE + 1 and max(scores[-PATIENCE:]) < max(scores[:-PATIENCE])

    def keep(self) -> None:
        """Save the state; and the draft, if no earlier one agreed better."""
        log = self.trainer.place.log
        distilling.save(self.out / CHECKPOINT, self.trainer.student, self.trainer.place)
        if log[-1][2] >= max(entry[2] for entry in log):
            write_student(self.trainer.student, self.target, self.out / folder.DRAFT)
            self.describe({})
        (self.out / "training.svg").write_text(
            picture(log, f"{self.out.name}: agreement with {self.target.name}, held-out text")
        )

    def describe(self, result: dict[str, Any]) -> None:
        kept = folder.read_card(self.out)
        recipe = kept.recipe | {"training": result or asdict(self.trainer.place)}
        fresh = card(self.target, kept.name, recipe)
        fresh.evaluation = kept.evaluation
        folder.write_card(self.out, fresh)

    def finish(self) -> dict[str, Any]:
        place, began = self.trainer.place, time.monotonic()
        self.look(self.held[:QUICK])
        count = affordable(time.monotonic() - began, place.elapsed, len(self.held))
        self.keep()
        first, four = place.log[-1][2:] if count <= QUICK else self.trainer.agreement(self.held[:count])
        result = {
            "steps": place.step,
            "minutes": round(place.elapsed / 60, 1),
            "answer_tokens_seen": place.seen,
            "held_out_top1": first,
            "held_out_top4": four,
            "held_out_conversations": count,
        }
        self.describe(result)
        return result
