"""Distillation: a draft learns to choose as its target does, with its own rounding in the loop.

A `Trainer` owns a student, its place in the data and its log; it can be stopped and saved after any step. Two micro-batches run
side by side in threads, each single-threaded: on a busy machine that loses far less to waiting than one batch split by
operator. Time, files and printing are the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .decoder import working
from .errors import RecipeError, WeightsError
from .landing import landing
from .loss import candidates, divergence, hits, logits
from .student import Student, step_parameter
from .text import OwnText

FORMAT = 1


@dataclass
class Place:
    """How far training has come. elapsed: seconds of training, all runs together; log: (elapsed, answer tokens seen, top-1,
    top-4)."""

    step: int = 0
    elapsed: float = 0.0
    seen: int = 0
    epoch: int = 0
    cursor: int = 0
    log: list[tuple[float, int, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Pace:
    """rate: peak learning rate; tokens: padded tokens of a micro-batch; workers: micro-batches a step; warm: warm-up steps."""

    rate: float = 1.5e-4
    tokens: int = 1100
    workers: int = 2
    warm: int = 20
    clip: float = 1.0

    def at(self, step: int, share: float) -> float:
        """The learning rate at a step, with `share` of the time gone: warm-up, then a cosine to a twentieth."""
        return self.rate * min(1.0, (step + 1) / self.warm) * (0.05 + 0.475 * (1 + math.cos(math.pi * min(share, 1.0))))


class Trainer:
    """One draft's training. Not for several threads; it has its own."""

    def __init__(
        self, student: Student, text: OwnText, train: NDArray[np.int64], pace: Pace, place: Place | None = None
    ) -> None:
        self.student, self.text, self.train, self.pace = student, text, train, pace
        self.place = place or Place()
        self.device = student.trim.to_row.device
        self.row = student.trim.row_or_none(len(student.trim.to_row)).to(self.device)
        self.now: dict[str, Tensor] = {}
        self._pool = ThreadPoolExecutor(pace.workers, initializer=torch.set_num_threads, initargs=(1,))
        self.now.update({name: t.to(working(t.device)) for name, t in student.frozen.items()})
        list(self._pool.map(self._refresh, student.parameters))
        self._groups: list[list[int]] = []

    def _refresh(self, name: str) -> None:
        self.now[name] = self.student.parameters[name].rounded(self.student.grid).requires_grad_()

    def _gradients(self, chosen: Sequence[int]) -> tuple[float, int, tuple[Tensor, ...]]:
        batch = self.text.batch(chosen).to(self.device)
        # Drawn anew each step, yet the same for a resumed run.
        dice = torch.Generator().manual_seed(self.place.step * 4096 + chosen[0])
        rows, place, weight = candidates(self.row[batch.top], len(self.student.trim.to_target), dice)
        scores = logits(self.student.shape, self.now, self.student.trim, batch, rows) + weight
        loss = divergence(scores, place, batch.logp)
        return (
            float(loss.detach()),
            len(batch.top),
            torch.autograd.grad(loss, [self.now[n] for n in self.student.parameters]),
        )

    def _next(self) -> list[list[int]]:
        """The next step's micro-batches. An epoch's order depends on its number alone, so a resumed run goes on as it was."""
        place, count = self.place, self.pace.workers
        if not self._groups:
            self._groups = self.text.batches(self.train, self.pace.tokens, np.random.default_rng(100 + place.epoch))
        if place.cursor + count > len(self._groups):
            if place.cursor == 0:
                raise RecipeError("There is too little text to train on; let the target write more.")
            place.epoch, place.cursor, self._groups = place.epoch + 1, 0, []
            return self._next()
        place.cursor += count
        return self._groups[place.cursor - count : place.cursor]

    def extend(self, text: OwnText, train: NDArray[np.int64]) -> None:
        """Go on with more text, from the beginning of a new epoch; the conversations there were keep their numbers."""
        self.text, self.train, self._groups = text, train, []
        self.place.epoch, self.place.cursor = self.place.epoch + 1, 0

    def step(self, share: float) -> float:
        """One optimiser step, with `share` of the training time gone; returns the mean divergence in nats a token."""
        results = list(self._pool.map(self._gradients, self._next()))
        count, rate = sum(n for _, n, _ in results), self.pace.at(self.place.step, share)
        names = list(self.student.parameters)

        def summed(i: int) -> Tensor:
            total = torch.zeros_like(results[0][2][i], dtype=torch.float32)
            for _, _, gradients in results:
                total += gradients[i]
            return total.div_(count)

        gradients = list(self._pool.map(summed, range(len(names))))
        size = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(size):
            raise RecipeError(
                "Training diverged (a gradient is not finite); resume from the checkpoint with a lower --rate."
            )
        shrink = min(1.0, self.pace.clip / (size + 1e-9))

        def apply(i: int) -> None:
            p = self.student.parameters[names[i]]
            step_parameter(p, self.student.grid, gradients[i].mul_(shrink), rate, self.place.step + 1)
            self._refresh(names[i])

        list(self._pool.map(apply, range(len(names))))
        self.place.step, self.place.seen = self.place.step + 1, self.place.seen + count
        return sum(loss for loss, _, _ in results) / count

    def agreement(self, chosen: NDArray[np.int64]) -> tuple[float, float]:
        """Top-1 and top-4 agreement with the target on conversations, the draft rounded as it will ship."""

        @torch.no_grad()
        def count(group: Sequence[int]) -> tuple[int, int, int]:
            batch = self.text.batch(group).to(self.device)
            return hits(logits(self.student.shape, self.now, self.student.trim, batch), self.student.trim, batch)

        first, four, total = np.sum(list(self._pool.map(count, self.text.batches(chosen, self.pace.tokens))), axis=0)
        return float(first / total), float(four / total)  # plain numbers: a checkpoint holds nothing else

    def close(self) -> None:
        self._pool.shutdown()


def save(path: Path, student: Student, place: Place) -> None:
    """Write a checkpoint in one step: a kill at any moment leaves the old one or the new one."""
    with landing(path) as part:
        torch.save({"format": FORMAT, "place": asdict(place), "student": student.state()}, part)


def load(path: Path, frozen: Callable[[str, Tensor, list[int]], Tensor]) -> tuple[Student, Place]:
    """A checkpoint; frozen(name, ids of rows, layers) gives the matrices that are not in it. Raises `WeightsError`."""
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        if state["format"] != FORMAT:
            raise ValueError(f"its format is {state['format']!r}")
        place = Place(**state["place"])
        kept = state["student"]
        student = Student.from_state(kept, {n: frozen(n, kept["to_target"], kept["layers"]) for n in kept["frozen"]})
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, UnpicklingError) as error:
        raise WeightsError(f"{path} is not a usable checkpoint: {error}. Delete it to begin anew.") from error
    return student, place
