"""How well the predictor knows: Brier score, calibration error and a reliability picture, against the draft's own word.

Every candidate that was offered where the target chose is an outcome: predicted with some probability, taken or not. The
prediction is the one made before the outcome was learned.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from paceline.edge.draft import Candidates
from paceline.edge.predictor import RANKS, Predictor
from paceline.protocol.philox import Floats
from paceline.scripts.lab.plot import canvas, save

BINS = 10


@dataclass(frozen=True)
class Outcomes:
    """`predicted`, `draft` and `taken` [N, ranks]: the predictor's probability, the draft's own, and what happened."""

    predicted: Floats
    draft: Floats
    taken: Floats


def watch(predictor: Predictor, seen: Iterable[tuple[Candidates, int]], *, seeded: bool) -> Outcomes:
    """Let `predictor` predict and then learn, one outcome after another."""
    predicted, draft, taken = list[Floats](), list[Floats](), list[Floats]()
    for found, token in seen:
        if len(found.tokens) < RANKS:
            continue
        predicted.append(predictor.probabilities(found, seeded=seeded))
        draft.append(found.confidence[:RANKS])
        taken.append((found.tokens[:RANKS] == token).astype(float))
        predictor.learn(found, token, seeded=seeded)
    return Outcomes(np.array(predicted), np.array(draft), np.array(taken))


def brier(p: Floats, taken: Floats) -> float:
    """Mean over positions of the squared distance between the probabilities of the candidates and what was taken."""
    return float(((p - taken) ** 2).sum(axis=-1).mean())


def calibration_error(p: Floats, taken: Floats, bins: int = BINS) -> float:
    """Expected calibration error: mean distance between prediction and share taken, in bins of equal width."""
    return sum(abs(mean - share) * n for mean, share, n in reliability(p, taken, bins)) / p.size


def reliability(p: Floats, taken: Floats, bins: int = BINS) -> list[tuple[float, float, int]]:
    """(mean prediction, share taken, number) of every bin that holds something."""
    at = np.minimum((p * bins).astype(int), bins - 1)
    return [(float(p[at == b].mean()), float(taken[at == b].mean()), int((at == b).sum())) for b in np.unique(at)]


def picture(found: Outcomes, path: Path, title: str) -> None:
    """Share taken against probability predicted, of first candidates; a perfect predictor lies on the diagonal."""
    figure, axes = canvas(5, 5)
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=1)
    sides: Sequence[tuple[str, Floats, str]] = (
        ("predictor", found.predicted, "#238b45"),
        ("draft", found.draft, "#d95f0e"),
    )
    for name, p, colour in sides:
        points = reliability(p[:, 0], found.taken[:, 0])
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", label=name, color=colour)
    axes.set_xlabel("probability of the first candidate")
    axes.set_ylabel("share taken by the target")
    axes.set_title(title, fontsize=10)
    axes.legend()
    save(figure, path)
