"""How likely is it that the target takes this candidate? Learned online from what it did take.

A draft's softmax is not that probability: a greedy target takes the draft's first choice far more often than the
softmax says, and search by uncalibrated values wanders sideways instead of deep. The table counts, per rank and bin
of the draft's confidence, how often such a candidate was offered and how often taken, both decaying, with the
confidence itself as the prior.
"""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from paceline.edge.draft import Candidates

RANKS = 8
EDGES = np.array([0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98])
PRIOR = 4.0  # outcomes that the draft's own confidence counts for
DECAY = 0.9995  # a table remembers about the last 2,000 outcomes
ENOUGH = 200.0  # outcomes, before they are told as a figure
FLOOR, CEILING = 1e-4, 0.999

Probabilities = npt.NDArray[np.float64]


class Predictor:
    """P(taken | rank, confidence), apart for greedy and for seeded choice. `enabled=False` believes the draft as it is."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._offered = np.zeros((2, RANKS, len(EDGES) + 1))
        self._taken = np.zeros_like(self._offered)

    def copy(self, *, enabled: bool) -> "Predictor":
        """One that begins with what this one has learned, and goes its own way from there."""
        new = Predictor(enabled=enabled)
        new._offered, new._taken = self._offered.copy(), self._taken.copy()
        return new

    def probabilities(self, found: Candidates, *, seeded: bool) -> Probabilities:
        """Calibrated probabilities [F] of candidates in rank order; they sum to at most 1."""
        q = found.confidence[:RANKS]
        if not self.enabled:
            return np.clip(q, FLOOR, CEILING)
        at = (int(seeded), np.arange(len(q)), np.searchsorted(EDGES, q))
        share = (self._taken[at] + PRIOR * q) / (self._offered[at] + PRIOR)
        p: Probabilities = np.clip(share, FLOOR, CEILING)
        total = p.sum()
        return p / total if total > 1 else p

    def learn(self, found: Candidates, taken: int, *, seeded: bool) -> None:
        """The target chose the token `taken` where `found` was offered."""
        q = found.confidence[:RANKS]
        self._offered *= DECAY
        self._taken *= DECAY
        at = (int(seeded), np.arange(len(q)), np.searchsorted(EDGES, q))
        self._offered[at] += 1
        self._taken[at] += found.tokens[:RANKS] == taken

    def shares(self, *, seeded: bool = False) -> tuple[float, ...] | None:
        """How often candidates of each rank were taken; None while too little was seen to say."""
        offered, taken = self._offered[int(seeded)].sum(axis=1), self._taken[int(seeded)].sum(axis=1)
        if offered[0] < ENOUGH:
            return None
        return tuple(float(t / o) for t, o in zip(taken, offered, strict=True) if o >= ENOUGH)

    def save(self, path: Path) -> None:
        """Keep the table for the next run; a table that cannot be written is only learned again."""
        part = path.with_suffix(".part")
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"offered": self._offered.tolist(), "taken": self._taken.tolist()}))
        part.replace(path)

    def load(self, path: Path) -> None:
        """Take over a saved table; one that is missing, damaged or of another shape is ignored."""
        try:
            table = json.loads(path.read_text())
            offered, taken = np.array(table["offered"], float), np.array(table["taken"], float)
        except (OSError, ValueError, KeyError, TypeError):
            return
        if (
            offered.shape == self._offered.shape == taken.shape
            and np.isfinite(offered).all()
            and np.isfinite(taken).all()
        ):
            self._offered, self._taken = offered, taken
