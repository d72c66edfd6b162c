"""The statistics of scripts/test_vllm, held to tables; and that they see a sampler which favours the drafted text."""

from collections import Counter

import numpy as np
import pytest
from paceline.scripts.vllm_draws import LEAST, chi_square, upper_tail


@pytest.mark.parametrize(
    ("statistic", "degrees", "chance"),
    [
        (3.841, 1, 0.05),
        (11.07, 5, 0.05),
        (15.086, 5, 0.01),
        (18.307, 10, 0.05),
        (37.566, 20, 0.01),
        (59.703, 30, 0.001),
    ],
)
def test_the_upper_tail_is_that_of_the_tables(statistic: float, degrees: int, chance: float) -> None:
    assert upper_tail(statistic, degrees) == pytest.approx(chance, rel=0.06)


def drawn(seed: int, favour: float = 0.0) -> Counter[tuple[int, ...]]:
    """400 of 12 texts; with that chance the first one, whatever its probability."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1.0, 13.0) / 78
    picks = np.where(rng.random(400) < favour, 0, rng.choice(12, 400, p=weights))
    return Counter((int(i),) for i in picks)


def test_samples_of_one_distribution_pass_and_a_favoured_text_does_not() -> None:
    chances = [upper_tail(*chi_square(drawn(i), drawn(1000 + i))) for i in range(60)]
    assert min(chances) > 1e-4
    assert sum(c < 0.5 for c in chances) > 15, "and are no better than chance has them"
    assert max(upper_tail(*chi_square(drawn(i), drawn(1000 + i, 0.15))) for i in range(20)) < 1e-4


def test_rare_texts_share_a_cell() -> None:
    rare = Counter({(i,): 1 for i in range(LEAST - 1)})
    one, other = Counter({(100,): 50}) + rare, Counter({(100,): 50}) + rare
    assert chi_square(one, other) == (0.0, 1)
