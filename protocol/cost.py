"""What a step costs by its rows, and how many rows are worth taking along: the same question at both ends.

A model's step is flat while it waits for memory, and rises once it computes: a convex, rising curve of its rows. It begins
with a measurement and follows what steps really take. The best number of optional rows makes (expected gain) / (seconds)
largest. At the cloud the gain is tokens: one for each session, plus the probability of each drafted node taken along, and a
paced step takes at least `floor`. At the edge it is the usefulness of the nodes run. Where rows are nearly free that is the
free width of the hardware; on a CPU it is what pays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

GRAIN = 6  # bins for each doubling of the rows: steps in one bin count as the same
DECAY = 0.98  # of a bin's weight with each step: about the last fifty count
KEPT = 0.5  # of a step: so much a bin always weighs, for what lies below the steps of now says how fast they rise
FORGET = 1000  # steps after which a bin above those of now is forgotten, so that it is tried again
STIFF = 0.05  # of a step: so much weighs that the curve has no knee
KNEE = 0.125  # of its rows: where a knee is held against that
REACH = 0.125  # of the most rows seen: so far beyond them a trial goes
CAUTION = 0.05  # by so much rows must gain more than they cost, as gains and costs are guesses
OFF = 1.3  # a step is off if it takes so many times what is expected, or as much less
SURE = 3.0  # where so many were seen
ADRIFT = 3  # after so many steps off in the same way the whole curve moves
UNREAD = 0.25  # of a step's rows: if no logits are read of more, it tells too little of rows that have some
HICCUP = 2.0  # of what is expected where little was seen: more is not believed of one step; elsewhere, `OFF`
NEWS = 0.005  # by so much a bin moves before the curve is fitted anew
MIN_SECONDS = 1e-6
ASKED = 256  # choices of rows of which a curve remembers what it says: a crowd's steps soon have had them all


@dataclass
class Bin:
    """Steps of about as many rows: their weight when the last one came, and their means."""

    weight: float
    rows: float
    seconds: float
    last: int  # number of the last one among all steps

    def weight_at(self, step: int) -> float:
        return max(self.weight * DECAY ** (step - self.last), KEPT)

    def add(self, step: int, rows: int, seconds: float) -> None:
        self.weight = self.weight_at(step) + 1
        self.rows += (rows - self.rows) / self.weight
        self.seconds += (seconds - self.seconds) / self.weight
        self.last = step


@dataclass(frozen=True)
class Curve:
    """Straight lines between knots. `trial` rows are more than were ever seen: beyond what was, a row takes `far` seconds."""

    rows: Floats  # [n + 1], rising; the last one is `trial`
    seconds: Floats  # [n + 1]; the last one if the piece before it goes on
    far: float
    reckoned: dict[tuple[int, int, float], Floats] = field(default_factory=dict)  # by `step_seconds`: what it was asked

    def at(self, rows: float) -> float:
        most = self.rows[-2]
        return float(np.interp(min(rows, most), self.rows, self.seconds) + self.far * max(rows - most, 0.0))

    def tried(self, rows: Ints) -> Floats:
        found: Floats = np.interp(rows, self.rows, self.seconds)
        if rows[-1] > self.rows[-1]:
            found += self.far * np.maximum(rows - self.rows[-1], 0.0)
        return found


class StepCost:
    """A convex, rising, piecewise linear curve by least squares over the bins' means.

    What no step has shown is never taken to be cheap: beyond the most rows seen a row takes what the last piece says, or what
    a row took there in the mean if that is more. Twice the rows never take more than two steps, so this is the most it can be.
    """

    def __init__(self, table: Sequence[tuple[int, float]]) -> None:
        """`table`: (rows, seconds), measured at start."""
        self._bins: dict[int, Bin] = {}
        self._steps = 0
        self._off: list[float] = []  # by what factors the last steps were off
        self._curve: Curve | None = None
        self._moved = 0.0  # by what share what is known has moved since the curve was fitted
        for rows, seconds in table:
            self._add(rows, max(seconds, MIN_SECONDS))

    def learn(self, rows: int, seconds: float, unread: int = 0) -> None:
        """A step took so long. A machine that is slowed down by its heat, or no longer is, is known within a few steps.

        unread: of the rows, those of which no logits are read, as a prompt's. They take less than those that are chosen here.
        """
        if unread > UNREAD * rows:
            return
        seconds = max(seconds, MIN_SECONDS)
        expected = self(rows) if self._bins else seconds
        known = self._bins.get(_bin(rows))
        self._steps += 1
        sure = known is not None and known.weight_at(self._steps) >= SURE
        expected *= self._drift(seconds / expected if sure else 1.0)
        for i in [i for i, b in self._bins.items() if i > _bin(rows) and self._steps - b.last > FORGET]:
            del self._bins[i]
            self._curve = None
        found = self._add(rows, min(seconds, (OFF if sure else HICCUP) * expected))
        self._moved += abs(seconds / expected - 1) / found.weight
        if known is None or self._moved > NEWS:
            self._curve = None

    def __call__(self, rows: int) -> float:
        """Seconds of a step over `rows` rows."""
        return self._fitted().at(rows) if self._bins else MIN_SECONDS

    def trial(self, rows: Ints) -> Floats:
        """The same for a choice of rows [n], rising; but a few more than were ever seen are tried at the last piece's price."""
        return self._fitted().tried(rows) if self._bins else np.full(len(rows), MIN_SECONDS)

    @property
    def reckoned(self) -> dict[tuple[int, int, float], Floats]:
        """What `step_seconds` has reckoned with the curve of now."""
        return self._fitted().reckoned if self._bins else {}

    def _add(self, rows: int, seconds: float) -> Bin:
        if (found := self._bins.get(_bin(rows))) is not None:
            found.add(self._steps, rows, seconds)
        else:
            found = self._bins[_bin(rows)] = Bin(1.0, rows, seconds, self._steps)
        return found

    def _drift(self, ratio: float) -> float:
        """By what factor the whole curve moves, as steps have lately taken `ratio` times what was expected."""
        same = not self._off or (ratio > 1) == (self._off[-1] > 1)
        off = ratio > OFF or ratio * OFF < 1
        self._off = [*(self._off if same else []), ratio] if off else []
        if len(self._off) < ADRIFT:
            return 1.0
        factor = min(self._off, key=lambda r: abs(math.log(r)))
        for each in self._bins.values():
            each.seconds *= factor
        self._off, self._curve = [], None
        return factor

    def _fitted(self) -> Curve:
        if self._curve is None:
            self._moved = 0.0
            self._curve = _fit([self._bins[i] for i in sorted(self._bins)], self._steps)
        return self._curve


def _bin(rows: int) -> int:
    return int(GRAIN * math.log2(rows))


def _fit(bins: Sequence[Bin], step: int) -> Curve:
    """Least squares over a level and, at each bin but the last, by how much the slope rises there; neither falls below 0."""
    x, y = np.array([b.rows for b in bins]), np.array([b.seconds for b in bins])
    weight = np.array([b.weight_at(step) for b in bins])
    hinges = np.maximum(x[:, None] - x[None, :-1], 0.0)
    terms = np.column_stack((np.ones(len(x)), hinges))
    stiff = np.diag(np.append(0.0, STIFF * (KNEE * x[:-1]) ** 2))
    found = nonnegative(terms.T @ (weight[:, None] * terms) + stiff, terms.T @ (weight * y))
    seconds, slope, last = np.maximum(terms @ found, MIN_SECONDS), float(found[1:].sum()), float(x[-1])
    beyond = (1 + REACH) * last + 1
    end = seconds[-1] + slope * (beyond - last)
    return Curve(np.append(x, beyond), np.append(seconds, end), max(slope, seconds[-1] / last))


def nonnegative(gram: Floats, right: Floats) -> Floats:
    """The x >= 0 [n] with the least x' gram x / 2 - right' x, by active sets (Lawson and Hanson); `gram` [n, n] is definite."""
    scale = 1 / np.sqrt(np.diag(gram))
    gram, right = gram * scale[:, None] * scale, right * scale
    x, free = np.zeros(len(right)), np.zeros(len(right), dtype=bool)
    for _ in range(3 * len(right)):
        rise = np.where(free, -np.inf, right - gram @ x)
        if rise.max() <= 1e-9 * abs(right).max():
            break
        free[rise.argmax()] = True
        while True:
            best = np.zeros(len(right))
            best[free] = np.linalg.solve(gram[np.ix_(free, free)], right[free])
            low = free & (best <= 0)
            if not low.any():
                break
            x = x + (best - x) * (x[low] / (x[low] - best[low])).min()
            free &= x > 1e-12 * x.max()
        x = best
    return x * scale


def best_count(
    gains: Sequence[float] | Floats, cost: StepCost, *, base_gain: float = 0.0, base_rows: int = 0, floor: float = 0.0
) -> int:
    """How many of the optional rows to take, given their log-gains, best first, beside `base_rows` rows worth `base_gain`.

    The rate rises to one peak and falls, as gains fall and the cost is convex: whether a row is taken depends on better ones.
    """
    if not len(gains):
        return 0
    totals = base_gain + np.cumsum(np.exp(gains))
    seconds = step_seconds(len(gains), cost, base_rows=base_rows, floor=floor)
    rates = totals / seconds[1:]
    best = int(rates.argmax())
    return best + 1 if not base_rows or rates[best] > base_gain / seconds[0] else 0


def step_seconds(most: int, cost: StepCost, *, base_rows: int = 0, floor: float = 0.0) -> Floats:
    """What a step is reckoned to take beside `base_rows` rows with 0, 1, ... `most` optional ones [most + 1].

    The rate of what they gain rises to one peak and falls, as gains fall and this is convex. Nobody may write to it.
    """
    known, asked = cost.reckoned, (most, base_rows, floor)
    if (found := known.get(asked)) is not None:
        return found
    seconds: Floats = np.maximum(cost.trial(base_rows + np.arange(most + 1)), max(floor, MIN_SECONDS))
    if base_rows:
        seconds = seconds[0] + (1 + CAUTION) * (seconds - seconds[0])
    seconds.setflags(write=False)
    if len(known) >= ASKED:
        known.clear()
    known[asked] = seconds
    return seconds


def most_count(gain: float, seconds: Floats, base_gain: float) -> int:
    """How many optional rows would pay if each were worth `gain`, the most that one is. `seconds` as `step_seconds` has them.

    None if even that is little better than no rows: then guesses decide, and a cost that was guessed wrong is found out by
    steps without them. Does not look at the rows themselves, so it may decide about drawn nodes.
    """
    totals = base_gain + gain * np.arange(len(seconds))
    most = int((totals / seconds).argmax())
    after = seconds[0] + (seconds[most] - seconds[0]) / (1 + CAUTION)
    better = totals[most] / after > (1 + CAUTION) * base_gain / seconds[0]
    return most if better else 0


@dataclass(frozen=True)
class Patience:
    """How long a step that would begin without a node waits for one; the same rule at both ends. Seconds.

    Nodes are due `response` after the commit that left the tree, and a `row` later for each token committed since. They are
    waited for if they are due within `longest`.
    """

    longest: float = 0.0
    response: float = 0.0
    row: float = 0.0

    def start(self, now: float, missed: float, since: int) -> float:
        """When the step begins that could begin `now`, with the tree left at time `missed` and `since` tokens before."""
        due = missed + self.response + self.row * since
        return due if now < due <= now + self.longest else now
