"""How an answer was made, from what was measured while it was: speed, the plain speed beside it, hits, the hidden round trip."""

from dataclasses import dataclass

from paceline.edge.generation import Generation


@dataclass(frozen=True)
class Speed:
    """Figures of one answer; times in seconds, rates a second.

    `plain_rate`: one token for each of the cloud's steps, as this cloud took them: what decoding there alone would give.
    `hidden`: of the round trips that asking and waiting would cost, one a step, the share that nobody waited for. The
    waiting is what is left of the time between the first and the last token when the cloud's own steps are taken away.
    """

    tokens: int
    rate: float
    plain_rate: float
    hit_rate: float
    accepted: float  # a step
    round_trip: float
    hidden: float | None  # None: too little happened to say


def speed(generation: Generation, round_trip: float) -> Speed:
    """Figures of `generation` up to its last commit."""
    f, session = generation.figures, generation.session
    count, steps = len(session.committed), max(f.steps, 1)
    wall = f.last_token - (f.first_token or 0.0)
    return Speed(
        tokens=count,
        rate=(count - _first(generation)) / wall if wall > 0 else 0.0,
        plain_rate=f.steps / f.step_seconds if f.step_seconds else 0.0,
        hit_rate=f.hits / steps,
        accepted=f.accepted / steps,
        round_trip=round_trip,
        hidden=_hidden(wall, f.step_seconds, f.steps, round_trip),
    )


def _first(generation: Generation) -> float:
    """Tokens that came with the first commit: about as many as with any other."""
    steps = generation.figures.steps
    return len(generation.session.committed) / steps if steps else 1.0


def _hidden(wall: float, step_seconds: float, steps: int, round_trip: float) -> float | None:
    if steps < 2 or round_trip <= 0:
        return None
    waited = wall - step_seconds * (steps - 1) / steps  # the first step ran before the first token came
    return 1.0 - min(max(waited / ((steps - 1) * round_trip), 0.0), 1.0)
