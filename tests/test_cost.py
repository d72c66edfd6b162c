"""The cost of a step: its shape, knees found through noise, nothing cheap where nobody has been, devices that change; choices."""

import math
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.protocol.cost import (
    ASKED,
    CAUTION,
    FORGET,
    REACH,
    StepCost,
    best_count,
    most_count,
    nonnegative,
    step_seconds,
)

Truth = Callable[[int], float]
START = (1, 2, 4, 8, 16, 32, 64, 128)


def roofline(rows: int) -> float:
    return max(0.03, 0.03 / 153 * rows)


def line(rows: int) -> float:
    return 0.009 + 0.005 * (rows - 1)


def bent(rows: int) -> float:
    return 0.02 + 2e-5 * rows + 1e-4 * max(0, rows - 60) + 2e-4 * max(0, rows - 300)


def measured(truth: Truth, rows: Sequence[int] = START) -> StepCost:
    return StepCost([(n, truth(n)) for n in rows])


def soft(rows: int) -> float:
    return 0.02 + 2e-5 * rows + 1e-4 * max(0, rows - 60)


steps = st.lists(st.tuples(st.integers(1, 1500), st.floats(1e-5, 2.0)), max_size=60)


@settings(deadline=None)
@given(steps, steps)
def test_it_is_convex_and_rising_whatever_was_seen(
    table: list[tuple[int, float]], seen: list[tuple[int, float]]
) -> None:
    cost = StepCost(table)
    for rows, seconds in seen:
        cost.learn(rows, seconds)
    rows = np.arange(1, 2000)
    for curve in (np.array([cost(int(n)) for n in rows]), cost.trial(rows)):
        rise = np.diff(curve)
        assert (curve > 0).all()
        assert rise.min() >= -1e-9 * curve.max()
        assert np.diff(rise).min() >= -1e-9 * curve.max()


def test_the_fit_is_the_best_there_is() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        terms = random.normal(size=(9, 6)) * 10.0 ** random.integers(-3, 4, 6)
        gram, right = terms.T @ terms, terms.T @ random.normal(size=9)
        x = nonnegative(gram, right)
        size = np.sqrt(np.diag(gram))
        rise = (gram @ x - right) / size
        assert (x >= 0).all()
        assert rise.min() > -1e-6  # nothing gains by growing
        assert abs(rise[x * size > 1e-9]).max(initial=0.0) < 1e-6  # nor what is used by changing


def test_a_prompts_rows_say_nothing_of_others() -> None:
    """They take a tenth here. A step with few of them is learnt from, as ever."""
    cost = measured(line)
    before = [cost(n) for n in (1, 2, 8, 60)]
    for rows in range(30, 90):
        cost.learn(rows, line(1) + 0.1 * (line(rows) - line(1)), unread=rows - 2)
    assert [cost(n) for n in (1, 2, 8, 60)] == before
    for _ in range(30):
        cost.learn(8, 1.2 * line(8), unread=2)
    assert cost(8) == pytest.approx(1.2 * line(8), rel=0.05)


@pytest.mark.parametrize("truth", [roofline, bent, line])
def test_a_knee_is_found_through_noise_and_hiccups(truth: Truth) -> None:
    random, cost = Random(1), measured(truth)
    for _ in range(600):
        rows = random.randrange(90, 420)
        hiccup = 8.0 if random.random() < 0.01 else 1.0
        cost.learn(rows, truth(rows) * random.gauss(1, 0.05) * hiccup)
    for rows in (100, 130, 153, 180, 220, 300, 400):
        assert cost(rows) == pytest.approx(truth(rows), rel=0.06)
    for low, high in ((200, 300), (300, 400)):
        assert cost(high) - cost(low) == pytest.approx(truth(high) - truth(low), rel=0.25)
    assert cost(130) - cost(100) < 0.04 * cost(100) + truth(130) - truth(100)


@pytest.mark.parametrize("truth", [roofline, soft, line])
@pytest.mark.parametrize("most", [1, 8, 64, 128, 200])
def test_what_was_not_seen_is_never_taken_to_be_cheap(truth: Truth, most: int) -> None:
    """Nor does a choice go more than a little beyond it, however free the rows seemed."""
    cost = measured(truth, [n for n in (*START, 200) if n <= most])
    for rows in range(most, 12 * most):
        assert cost(rows) >= truth(rows) * (1 - 0.02)
    flat = StepCost([(n, 0.03) for n in (*START, 200) if n <= most])
    base = (most + 1) // 2
    tried = base + best_count([math.log(0.5)] * 2000, flat, base_gain=base, base_rows=base)
    assert most < tried <= (1 + REACH) * most + 1


def test_trials_find_a_knee_beyond_what_was_measured_within_a_few_steps() -> None:
    cost, taken, gains = measured(roofline, (1, 2, 4, 8)), list[int](), [math.log(0.5)] * 1000
    for _ in range(60):
        taken.append(40 + best_count(gains, cost, base_gain=40, base_rows=40))
        cost.learn(taken[-1], roofline(taken[-1]))
    assert all(now <= (1 + REACH) * max(40, *taken[:i]) + 2 for i, now in enumerate(taken) if i)
    assert 145 <= taken[-1] <= 170


def test_a_device_that_throttles_is_known_in_a_few_steps_at_every_width_and_so_is_one_that_has_cooled() -> None:
    cost, random = measured(roofline), Random(2)

    def run(factor: float, count: int) -> None:
        for _ in range(count):
            rows = random.randrange(120, 260)
            cost.learn(rows, factor * roofline(rows) * random.gauss(1, 0.03))

    run(1.0, 200)
    for factor in (2.0, 1.0, 5.0, 1.0):
        run(factor, 12)
        for rows in (1, 64, 140, 200, 250):
            assert cost(rows) == pytest.approx(factor * roofline(rows), rel=0.2)


def test_a_device_that_slows_down_little_by_little_is_followed_where_it_works() -> None:
    cost, random = measured(roofline), Random(3)
    for i in range(2000):
        rows = random.randrange(140, 260)
        cost.learn(rows, (1 + i / 2000) * roofline(rows) * random.gauss(1, 0.03))
    for rows in (150, 200, 250):
        assert cost(rows) == pytest.approx(2 * roofline(rows), rel=0.1)


def test_what_was_dear_once_is_tried_again_in_time() -> None:
    cost = StepCost([(n, 0.03) for n in START])
    for _ in range(5):
        cost.learn(128, 0.06)
    assert cost(128) > 0.05
    for _ in range(FORGET + 10):
        cost.learn(64, 0.03)
    base, gains = 60, [math.log(0.9)] * 100
    assert base + best_count(gains, cost, base_gain=base, base_rows=base) > 64


# ---- choosing


@pytest.mark.parametrize("truth", [roofline, bent, line, lambda rows: 0.01 + 1e-6 * rows**2])
@pytest.mark.parametrize("base", [1, 16, 64, 128, 256, 600])
def test_drafting_is_not_below_plain_at_any_load_and_near_the_best(truth: Truth, base: int) -> None:
    """What is chosen, learning from noisy steps, against what the true cost would choose, and against plain decoding."""
    random, cost = Random(base), measured(truth)
    tokens = seconds = best = 0.0
    for _ in range(300):
        gains = [math.log(random.choice([0.99, 0.95, 0.9, 0.7, 0.4])) * random.randrange(1, 6) for _ in range(2 * base)]
        gains.sort(reverse=True)
        most = most_count(1.0, step_seconds(len(gains), cost, base_rows=base), base)
        taken = best_count(gains[:most], cost, base_gain=base, base_rows=base)
        cost.learn(base + taken, truth(base + taken) * random.gauss(1, 0.03))
        totals = base + np.cumsum([0.0, *np.exp(gains)])
        tokens += totals[taken]
        seconds += truth(base + taken)
        best += max(total / truth(base + n) for n, total in enumerate(totals)) / 300
    plain = base / truth(base)
    assert tokens / seconds >= 0.998 * plain
    assert tokens / seconds >= (0.97 - CAUTION) * best


def test_a_choice_is_the_best_prefix_and_depends_on_better_ones_alone() -> None:
    random, cost = Random(4), measured(bent)
    rows = np.arange(10, 211)
    for _ in range(50):
        gains = sorted((random.uniform(-3, 0) for _ in range(200)), reverse=True)
        seconds = cost.trial(rows)
        rates = (10 + np.cumsum([0.0, *np.exp(gains)])) / (seconds[0] + (1 + CAUTION) * (seconds - seconds[0]))
        count = best_count(gains, cost, base_gain=10, base_rows=10)
        assert rates[count] == rates.max()
        assert best_count(gains[: count + 1], cost, base_gain=10, base_rows=10) == count
        assert (np.diff(rates[: count + 1]) > 0).all()


def test_nothing_to_choose_from_and_nothing_known() -> None:
    assert best_count([], StepCost(())) == 0
    assert StepCost(())(5) > 0
    assert best_count([-1.0, -2.0], StepCost(())) == 2
    assert best_count([-0.01] * 50, StepCost([(1, 0.01)]), base_gain=1, base_rows=1, floor=1.0) == 50


def test_what_a_step_takes_is_reckoned_once_and_anew_with_every_new_curve() -> None:
    cost = StepCost([(1, 0.01), (16, 0.02), (64, 0.08)])
    before = step_seconds(20, cost, base_rows=3)
    assert step_seconds(20, cost, base_rows=3) is before
    with pytest.raises(ValueError, match="read-only"):
        before[0] = 1.0  # others have it too
    for _ in range(60):
        cost.learn(16, 0.03)
    after = step_seconds(20, cost, base_rows=3)
    assert after[13] > 1.2 * before[13]
    assert after == pytest.approx(step_seconds(21, cost, base_rows=3)[:-1])
    for rows in range(1000):
        step_seconds(20, cost, base_rows=rows)
    assert len(cost.reckoned) <= ASKED
