"""Tokens a second to expect from a draft, from its ranks along the target's text: the streaming policy in virtual time.

The model: the draft grows one chain, each step costs `step` seconds and yields a few candidates, which reach the cloud half a
round trip later. The cloud verifies what it holds, `verify` seconds a time, and commits the accepted tokens and its own next
one. Where the target takes a candidate that is not the first, the cloud still has it, but the draft is on the wrong branch until
the commit reaches it. A planner that grows side branches does better; so this is a low estimate, good for ordering drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Setting:
    """All in seconds. candidates: how many of a step's likeliest tokens are sent."""

    verify: float
    step: float
    round_trip: float
    candidates: int = 4


#: Seconds a row of the target at Q4_0 takes on the devices that `paceline bench` speaks for; a draft takes its share of it.
DEVICES = {"laptop": 0.008, "small-gpu": 0.005, "pi": 0.060}


def arrivals(rank: NDArray[np.int64], front: int, start: float, s: Setting) -> tuple[NDArray[np.float64], int]:
    """When the cloud holds each right token, if drafting (re)starts at position `front` at time `start`; and where it goes wrong.

    Entries not reached are infinite. The position returned is the first whose target token is not the draft's first candidate.
    """
    wrong = np.flatnonzero(rank[front:] > 0)
    end = front + int(wrong[0]) if len(wrong) else len(rank)
    times = np.full(len(rank), math.inf)
    times[front:end] = start + s.step * np.arange(1, end - front + 1) + s.round_trip / 2
    if end < len(rank) and rank[end] < s.candidates:
        times[end] = start + s.step * (end - front + 1) + s.round_trip / 2
    return times, end


def seconds(rank: NDArray[np.int64], s: Setting) -> float:
    """Time to commit the whole text."""
    committed, clock = 0, 0.0
    held, wrong = arrivals(rank, 0, 0.0, s)
    restart: list[tuple[float, int]] = []  # (time at which the draft learns it, committed length)
    while committed < len(rank):
        while restart and restart[0][0] <= clock:
            at, length = restart.pop(0)
            if length > wrong:  # the target has left the chain: begin again behind what is known
                late = max(at, 0.0)
                fresh, wrong = arrivals(rank, length, late, s) if length < len(rank) else (held, len(rank))
                held = np.minimum(held, fresh)
        run = 0
        while committed + run < len(rank) and held[committed + run] <= clock:
            run += 1
        clock += s.verify
        committed = min(committed + run + 1, len(rank))
        restart.append((clock + s.round_trip / 2, committed))
        # A commit that arrives while the next verification runs takes effect then, not after it.
        while restart and restart[0][0] <= clock + s.verify and restart[0][1] > wrong and restart[0][1] < len(rank):
            at, length = restart.pop(0)
            fresh, wrong = arrivals(rank, length, at, s)
            held = np.minimum(held, fresh)
    return clock


def tokens_per_second(ranks: Sequence[NDArray[np.int64]], s: Setting) -> float:
    """Mean speed over texts, each position counted once."""
    total = sum(len(r) for r in ranks)
    return total / sum(seconds(r, s) for r in ranks) if total else 0.0
