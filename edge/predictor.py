"""How likely is it that the target takes this candidate? Learned online from what it did take.

A draft's softmax is not that probability: a greedy target takes the draft's first choice far more often than the
softmax says, and search by uncalibrated values wanders sideways instead of deep. What is learned is a conditional
logit: each candidate, and "none of them", has a score that is linear in its log-confidence, its rank and, for the
first, its lead over the second; the chances are the softmax of the scores. So a draft's confidence is sharpened as a
whole, the chances of a row always make one, and six numbers need few outcomes. They are fitted by Newton's method,
one step an outcome, with a curvature that decays.
"""

import json
from pathlib import Path

import numpy as np
from paceline.edge.draft import Candidates
from paceline.protocol.philox import Floats

RANKS = 8
DECAY = 0.9995  # about the last 2,000 outcomes are remembered
ENOUGH = 200.0  # outcomes, before they are told as a figure
DAMPING = 8.0  # keeps the first steps short
DAMPED, LEAST_DAMPING = 0.98, 0.05  # what an outcome leaves of it, and its least
LEAST_CONFIDENCE, LEAST_REST = 1e-4, 1e-3
FLOOR, CEILING = 1e-4, 0.999
FEATURES = 6  # log-confidence; rank 1, rank 2, a later rank, none of them; the first's lead over the second
STEEPEST = 20.0  # weight
LEARNED = ("weights", "curvature", "damping", "offered", "taken")  # what a file of it holds


class Predictor:
    """P(taken | rank, confidences), apart for greedy and for seeded choice. `enabled=False` believes the draft as it is."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._weights = np.zeros((2, FEATURES))
        self._weights[:, 0] = 1.0  # the draft's own confidence
        self._curvature = np.zeros((2, FEATURES, FEATURES))
        self._damping = np.full(2, DAMPING)
        self._offered, self._taken = np.zeros((2, RANKS)), np.zeros((2, RANKS))  # outcomes by rank

    def copy(self, *, enabled: bool) -> "Predictor":
        """One that begins with what this one has learned, and goes its own way from there."""
        new = Predictor(enabled=enabled)
        new._weights, new._curvature = self._weights.copy(), self._curvature.copy()
        new._damping = self._damping.copy()
        new._offered, new._taken = self._offered.copy(), self._taken.copy()
        return new

    def probabilities(self, found: Candidates, *, seeded: bool) -> Floats:
        """Calibrated probabilities [F] of candidates in rank order; they sum to at most 1."""
        q = found.confidence[:RANKS]
        p = _chances(_features(q), self._weights[int(seeded)])[:-1] if self.enabled else q
        bounded: Floats = np.clip(p, FLOOR, CEILING)
        if self.enabled:
            bounded /= max(float(bounded.sum()), 1.0)
        return bounded

    def learn(self, found: Candidates, taken: int, *, seeded: bool) -> None:
        """The target chose the token `taken` where `found` was offered."""
        kind, x = int(seeded), _features(found.confidence[:RANKS])  # [F + 1, FEATURES]
        hit = np.flatnonzero(found.tokens[:RANKS] == taken)
        p = _chances(x, self._weights[kind])
        mean = p @ x
        gradient = mean - x[hit[0] if len(hit) else -1]
        self._curvature[kind] = DECAY * self._curvature[kind] + (x.T * p) @ x - np.outer(mean, mean)
        self._damping[kind] = max(DAMPED * self._damping[kind], LEAST_DAMPING)
        curvature = self._curvature[kind] + self._damping[kind] * np.eye(FEATURES)
        moved = self._weights[kind] - np.linalg.solve(curvature, gradient)
        self._weights[kind] = np.clip(moved, -STEEPEST, STEEPEST)
        self._offered[kind] *= DECAY
        self._taken[kind] *= DECAY
        self._offered[kind, : len(x) - 1] += 1
        self._taken[kind, hit] += 1

    def shares(self) -> tuple[float, ...] | None:
        """How often a greedy target took candidates of each rank; None while too little was seen to say."""
        offered, taken = self._offered[0], self._taken[0]
        if offered[0] < ENOUGH:
            return None
        return tuple(float(t / o) for t, o in zip(taken, offered, strict=True) if o >= ENOUGH)

    def save(self, path: Path) -> None:
        """Keep what was learned for the next run; what cannot be written is only learned again."""
        table = {name: getattr(self, f"_{name}").tolist() for name in LEARNED}
        part = path.with_suffix(".part")
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(table))
        part.replace(path)

    def load(self, path: Path) -> None:
        """Take over what was saved; a file that is missing, damaged or of another shape is ignored."""
        try:
            table = json.loads(path.read_text())
            found = {name: np.array(table[name], float) for name in LEARNED}
        except (OSError, ValueError, KeyError, TypeError):
            return
        if all(v.shape == getattr(self, f"_{k}").shape and np.isfinite(v).all() for k, v in found.items()):
            self._weights = np.clip(found["weights"], -STEEPEST, STEEPEST)
            self._curvature, self._damping = found["curvature"], np.maximum(found["damping"], LEAST_DAMPING)
            self._offered, self._taken = found["offered"], found["taken"]


def _features(confidence: Floats) -> Floats:
    """[F + 1, FEATURES] of candidates with confidences [F], and of none of them."""
    count = len(confidence)
    x = np.zeros((count + 1, FEATURES))
    x[:-1, 0] = np.log(np.clip(confidence, LEAST_CONFIDENCE, 1.0))
    x[-1, 0] = np.log(max(1.0 - float(confidence.sum()), LEAST_REST))
    x[1:2, 1], x[2:3, 2], x[3:, 3] = 1.0, 1.0, 1.0
    x[-1, 1:] = 0.0
    x[-1, 4] = 1.0
    x[0, 5] = x[0, 0] - (x[1, 0] if count > 1 else np.log(LEAST_CONFIDENCE))
    return x


def _chances(x: Floats, weights: Floats) -> Floats:
    score = x @ weights
    weight = np.exp(score - score.max())
    p: Floats = weight / weight.sum()
    return p
