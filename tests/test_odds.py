"""Faded outcomes: what is reckoned with before any, what many say, and how soon the old ones are forgotten."""

import pytest
from paceline.protocol.odds import Odds


def test_before_any_outcome_it_is_what_one_reckons_with() -> None:
    odds = Odds(0.3, 5.0, 0.9)
    assert odds.ratio == pytest.approx(0.3)
    odds.learn(True)
    assert odds.ratio == pytest.approx((0.9 * 1.5 + 1) / (0.9 * 5 + 1))


def test_it_becomes_the_share_that_comes_true_of_what_was_expected() -> None:
    odds = Odds(0.9, 5.0, 0.98)
    for i in range(2000):
        odds.learn(i % 4 == 0)
    assert odds.ratio == pytest.approx(0.25, abs=0.02)
    for _ in range(2000):
        odds.learn(3.0, 2.0)  # more than was expected
    assert odds.ratio == pytest.approx(1.5)


def test_nothing_asked_is_nothing_learnt_but_that_time_has_passed() -> None:
    odds = Odds(0.5, 4.0, 0.5)
    odds.learn(0.0, 0.0)
    assert odds.ratio == pytest.approx(0.5)
    odds.learn(1.0, 1.0)  # counts for more now
    assert odds.ratio == pytest.approx(1.5 / 2)
