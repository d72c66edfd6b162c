"""The prediction of tokens a second: its limits are known exactly, and it moves the right way between them."""

import numpy as np
import pytest
from paceline.quant.predict import Setting, tokens_per_second


def speed(rank: np.ndarray, step: float = 0.005, trip: float = 0.025, verify: float = 0.03) -> float:
    return tokens_per_second([rank.astype(np.int64)], Setting(verify, step, trip))


def test_a_draft_that_is_never_right_leaves_plain_speed() -> None:
    assert speed(np.full(300, 8)) == pytest.approx(1 / 0.03, rel=0.01)


def test_a_perfect_draft_runs_at_its_own_pace() -> None:
    assert speed(np.zeros(3_000)) == pytest.approx(1 / 0.005, rel=0.05)


def test_a_draft_slower_than_the_target_is_no_loss() -> None:
    assert speed(np.zeros(500), step=0.2) >= 0.99 / 0.03


def test_agreement_helps_and_distance_and_cost_hurt() -> None:
    rng = np.random.default_rng(0)
    good, bad = (rng.random(2_000) > p for p in (0.9, 0.6))
    assert speed(good) > speed(bad) * 1.3
    assert speed(good, trip=0.0) > speed(good) > speed(good, trip=0.1) > 1 / 0.03
    assert speed(good, step=0.002) > speed(good, step=0.01)


def test_a_second_candidate_is_worth_something() -> None:
    rng = np.random.default_rng(1)
    wrong = rng.random(2_000) > 0.7
    assert speed(np.where(wrong, 1, 0)) > speed(np.where(wrong, 8, 0)) * 1.05
