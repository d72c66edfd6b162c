"""What each policy would make of this device, link and verifier: the real agent, planner and scheduler in virtual time.

The draft's step costs what was measured here. Which tokens it gets right is drawn from how often its candidates of each
rank are taken; a text of its own would take the target, which a device does not hold.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from paceline.edge.candidates import FAN_OUT
from paceline.edge.draft import Candidates
from paceline.edge.policies import policy
from paceline.edge.predictor import Predictor
from paceline.protocol.sampling import Sampling
from paceline.protocol.vocabulary import Vocabulary
from paceline.quant.shipped import card
from paceline.scripts.lab.cases import Case
from paceline.scripts.lab.edges import fitted
from paceline.scripts.lab.experiment import Bench, Setting, answer
from paceline.scripts.lab.memo import Digest, Memo
from paceline.scripts.lab.network import LinkSpec

POLICIES = ("ar", "sync", "ssd", "stream")
TOKENS = 160
SIZE = 32768  # of a vocabulary of numbers


class Likely(Memo):
    """A draft whose rank-j candidate is right with chance `shares[j]`, and says so; always the same for the same path."""

    def __init__(self, case: Case, shares: Sequence[float]) -> None:
        self._text, self._prompt, self._shares = case.text, case.prompt, np.asarray(shares, float)
        self._bounds = np.cumsum(self._shares)

    def of(self, paths: Sequence[tuple[Digest, Sequence[int]]]) -> list[Candidates]:
        return [self._after(digest, tuple(tokens)) for digest, tokens in paths]

    def save(self) -> None:
        """Nothing is kept."""

    def _after(self, digest: Digest, tokens: tuple[int, ...]) -> Candidates:
        rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        found = rng.integers(0, SIZE, len(self._shares))
        rank = int(np.searchsorted(self._bounds, rng.random()))
        if rank < len(found) and len(tokens) < len(self._text) and tokens == self._text[: len(tokens)]:
            found[rank] = self._text[len(tokens)]
        return Candidates(found, self._shares)


def learned(table: Path | None) -> tuple[float, ...]:
    """How often candidates of each rank are taken: as the pair's own table says, or else the shipped draft's card."""
    predictor = Predictor()
    if table is not None:
        predictor.load(table)
    return predictor.shares() or shipped()


def shipped() -> tuple[float, ...]:
    """The shipped draft's agreement with its target, by rank, as it was evaluated; what lies between is shared out evenly."""
    mean = card("default").evaluation["mean"]
    one, two, four, eight = (float(mean[f"top{n}"]) for n in (1, 2, 4, 8))
    return (one, two - one, *[(four - two) / 2] * 2, *[(eight - four) / 4] * 4)


def speeds(
    step_cost: Sequence[tuple[int, float]],
    round_trip: float,
    verify: float,
    shares: Sequence[float],
    tokens: int = TOKENS,
) -> dict[str, float]:
    """Tokens a second by policy. `step_cost`: (rows, seconds) of the draft; times in seconds."""
    rng = random.Random(0)
    text = tuple(rng.randrange(SIZE) for _ in range(tokens))
    case = Case("expected", "all", (1, 2, 3), Sampling(), text)
    edge, link = fitted(step_cost), LinkSpec(round_trip)
    vocabulary = Vocabulary("numbers", SIZE, "0" * 64)
    shares = [*shares][:FAN_OUT]
    found = {}
    for name in POLICIES:
        bench = Bench(vocabulary, Likely(case, shares), Predictor())
        run = answer(bench, case, Setting(policy(name), edge, link, verify))
        found[name] = run.tokens / run.seconds
    return found
