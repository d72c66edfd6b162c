"""From measured answers to the tables: medians over prompts, with their spread, and ratios paired prompt by prompt."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.scripts.lab.sweep import Entry


@dataclass(frozen=True)
class Line:
    """A policy at a round trip. Speeds in tokens/s; medians over prompts, `low` and `high` are the quartiles of the speed.

    `ratio` is the median over prompts of (speed / speed of `ar` on the same prompt). `hidden` is the share of the round
    trips of its steps that cost no time: 1 - (time - time at no round trip) / (steps x round trip).
    """

    policy: str
    label: str
    round_trip: float
    prompts: int
    speed: float
    low: float
    high: float
    ratio: float
    first_token: float
    hit_rate: float
    match_rate: float
    accepted: float
    tokens_a_forward: float
    rows_a_token: float
    drafted_a_token: float
    stale_a_token: float
    up: float
    down: float
    largest: int
    hidden: float
    same: bool | None

    @property
    def ms_a_token(self) -> float:
        return 1000 / self.speed


def lines(entries: Sequence[Entry]) -> list[Line]:
    """One line for every policy and round trip, in the order in which they were measured."""
    groups: dict[tuple[str, str, float], list[Entry]] = defaultdict(list)
    for e in entries:
        groups[(e.policy, e.label, e.round_trip)].append(e)
    plain = {(e.round_trip, e.case): _speed(e) for e in entries if e.policy == "ar"}
    at_zero = {(e.policy, e.case): e.run.seconds for e in entries if e.round_trip == 0}
    return [_line(group, plain, at_zero) for group in groups.values()]


def by_category(entries: Sequence[Entry], round_trip: float) -> dict[str, dict[str, float]]:
    """Median ratio to `ar` per category and policy at one round trip."""
    plain = {e.case: _speed(e) for e in entries if e.policy == "ar" and e.round_trip == round_trip}
    cells: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for e in entries:
        if e.round_trip == round_trip and e.case in plain:
            cells[e.category][e.policy].append(_speed(e) / plain[e.case])
    return {c: {p: statistics.median(v) for p, v in row.items()} for c, row in cells.items()}


def _line(group: Sequence[Entry], plain: dict[tuple[float, str], float], at_zero: dict[tuple[str, str], float]) -> Line:
    first = group[0]
    speeds = sorted(_speed(e) for e in group)
    quarters = statistics.quantiles(speeds, n=4, method="inclusive") if len(speeds) > 1 else speeds * 3
    ratios = [_speed(e) / plain[(e.round_trip, e.case)] for e in group if (e.round_trip, e.case) in plain]
    total = _totals(group)
    return Line(
        policy=first.policy,
        label=first.label,
        round_trip=first.round_trip,
        prompts=len(group),
        speed=statistics.median(speeds),
        low=quarters[0],
        high=quarters[2],
        ratio=statistics.median(ratios) if ratios else float("nan"),
        first_token=statistics.median(e.run.first_token for e in group),
        hit_rate=total("hits") / max(total("steps"), 1),
        match_rate=total("matched") / total("offered") if total("offered") else float("nan"),
        accepted=total("accepted") / max(total("steps"), 1),
        tokens_a_forward=total("tokens") / max(total("steps"), 1),
        rows_a_token=total("rows") / total("tokens"),
        drafted_a_token=total("drafted") / total("tokens"),
        stale_a_token=total("stale") / total("tokens"),
        up=total("up") / total("tokens"),
        down=total("down") / total("tokens"),
        largest=max(e.run.largest for e in group),
        hidden=_hidden(group, at_zero),
        same=None if all(e.run.same is None for e in group) else all(e.run.same for e in group),
    )


def _hidden(group: Sequence[Entry], at_zero: dict[tuple[str, str], float]) -> float:
    known = [e for e in group if (e.policy, e.case) in at_zero and e.round_trip > 0]
    if not known:
        return float("nan")
    paid = sum(e.run.seconds - at_zero[(e.policy, e.case)] for e in known)
    return 1 - paid / sum(e.run.steps * e.round_trip for e in known)


def _totals(group: Iterable[Entry]) -> Callable[[str], float]:
    entries = list(group)
    return lambda name: float(sum(getattr(e.run, name) for e in entries))


def _speed(e: Entry) -> float:
    return e.run.tokens / e.run.seconds
