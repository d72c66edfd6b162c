"""The predictor: it learns what is really taken, keeps it, and survives what happens to files."""

import json
from pathlib import Path

import numpy as np
import pytest
from paceline.edge.draft import Candidates
from paceline.edge.predictor import CEILING, FLOOR, Predictor


def offered(*confidence: float) -> Candidates:
    return Candidates(np.arange(10, 10 + len(confidence)), np.array(confidence))


def test_it_begins_with_the_drafts_own_confidence() -> None:
    assert Predictor().probabilities(offered(0.6, 0.3), seeded=False) == pytest.approx([0.6, 0.3])


@pytest.mark.parametrize("truth", [0.95, 0.5, 0.1])
def test_it_learns_how_often_a_candidate_is_taken(truth: float) -> None:
    """Confidence 0.6, taken in a share of `truth`: after 500 outcomes it says so."""
    predictor, hits = Predictor(), np.random.default_rng(0).random(500) < truth
    for hit in hits:
        predictor.learn(offered(0.6, 0.3), 10 if hit else 99, seeded=False)
    first, second = predictor.probabilities(offered(0.6, 0.3), seeded=False)
    assert first == pytest.approx(hits.mean(), abs=0.06)
    assert second < 0.05


def test_kinds_of_choice_are_apart() -> None:
    predictor = Predictor()
    for _ in range(200):
        predictor.learn(offered(0.6, 0.3), 10, seeded=False)
    assert predictor.probabilities(offered(0.6, 0.3), seeded=True) == pytest.approx([0.6, 0.3])


@pytest.mark.parametrize("sharper", [0.6, 1.0, 2.5])
def test_it_is_calibrated_after_two_thousand_outcomes(sharper: float) -> None:
    """A target that takes candidate j with probability q_j^sharper / sum, none of them counting as one of many."""
    predictor, rng, error = Predictor(), np.random.default_rng(3), list[float]()
    for n in range(4000):
        q = np.sort(rng.dirichlet(np.full(9, 0.3)))[::-1]
        q = np.clip(q, 2e-3, None) / np.clip(q, 2e-3, None).sum()
        truth = q**sharper / (q**sharper).sum()
        found = offered(*q[:8])
        if n >= 2000:
            error.append(predictor.probabilities(found, seeded=False)[0] - truth[0])
        predictor.learn(found, 10 + int(rng.choice(9, p=truth)), seeded=False)
    assert np.abs(error).mean() < 0.02


def test_one_surprise_does_not_turn_it_over() -> None:
    predictor = Predictor()
    predictor.learn(offered(0.97, 0.01), 99, seeded=False)
    assert predictor.probabilities(offered(0.6, 0.3), seeded=False)[0] > 0.3


def test_fewer_candidates_than_ranks_are_learned_from_too() -> None:
    predictor = Predictor()
    for _ in range(300):
        predictor.learn(offered(0.5), 10, seeded=True)
    assert predictor.probabilities(offered(0.5), seeded=True)[0] > 0.9


def test_probabilities_are_probabilities() -> None:
    rng = np.random.default_rng(1)
    predictor = Predictor()
    for _ in range(300):
        confidence = np.sort(rng.dirichlet(np.ones(8)))[::-1]
        predictor.learn(offered(*confidence), int(rng.integers(10, 19)), seeded=bool(rng.integers(2)))
        p = predictor.probabilities(offered(*confidence), seeded=False)
        assert p.sum() <= 1 + 1e-9
        assert (p > 0).all()
        assert (p <= CEILING).all()
    assert predictor.probabilities(offered(0.0), seeded=False)[0] >= FLOOR * 0.5


def test_it_forgets() -> None:
    predictor = Predictor()
    for _ in range(3000):
        predictor.learn(offered(0.6), 10, seeded=False)
    for _ in range(6000):
        predictor.learn(offered(0.6), 99, seeded=False)
    assert predictor.probabilities(offered(0.6), seeded=False)[0] < 0.15


def test_switched_off_it_believes_the_draft() -> None:
    predictor = Predictor(enabled=False)
    for _ in range(100):
        predictor.learn(offered(0.6), 99, seeded=False)
    assert predictor.probabilities(offered(0.6), seeded=False) == pytest.approx([0.6])


def test_a_table_is_kept(tmp_path: Path) -> None:
    first, second = Predictor(), Predictor()
    for _ in range(50):
        first.learn(offered(0.6, 0.3), 11, seeded=False)
    first.save(tmp_path / "new" / "table.json")
    second.load(tmp_path / "new" / "table.json")
    want = first.probabilities(offered(0.6, 0.3), seeded=False)
    assert second.probabilities(offered(0.6, 0.3), seeded=False) == pytest.approx(want)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["table.json"]


@pytest.mark.parametrize("content", [
    None, "", "not JSON", "[]", "{}", '{"weights": 3, "curvature": 4, "damping": 5}', '{"offered": [[1]], "taken": [[1]]}',
    json.dumps({"weights": [[float("nan")] * 6] * 2, "curvature": [[[0.0] * 6] * 6] * 2, "damping": [8.0] * 2}), "\x00\xff",
])  # fmt: skip
def test_a_damaged_table_is_ignored(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    predictor = Predictor()
    predictor.load(path)
    assert predictor.probabilities(offered(0.6, 0.3), seeded=False) == pytest.approx([0.6, 0.3])
