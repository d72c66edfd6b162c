"""Training through the rounding: it learns, it resumes exactly, and what is exported is what was trained."""

from pathlib import Path

import numpy as np
import pytest
import torch
from paceline.quant import build as making
from paceline.quant import decoder, distil, factory, store
from paceline.quant.distil import Pace, Place, Trainer
from paceline.quant.errors import RecipeError, WeightsError
from paceline.quant.grids import Q4_0, Q8_0
from paceline.quant.loss import candidates, divergence
from paceline.quant.student import Parameter, Student, step_parameter
from paceline.quant.target import Target, open_target
from paceline.quant.text import OwnText
from paceline.quant.trim import whole

PACE = Pace(rate=2e-3, tokens=600, workers=2, warm=3)


@pytest.fixture(scope="module")
def text(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> OwnText:
    return store.text(open_target(tiny), tiny, 24, root=tmp_path_factory.mktemp("text"), rows=48, length=160)


def student(target: Target, text: OwnText, table: object = Q8_0, layers: int = 2) -> Student:
    rows = target.extents(decoder.EMBEDDING)[0]
    recipe = making.Recipe(list(range(layers)), whole(rows), Q4_0, Q4_0 if table is Q4_0 else Q8_0)
    return making.rebuilt(target, recipe, text.rows(np.arange(len(text)), 60, 8))


@pytest.mark.parametrize("table", [Q8_0, Q4_0], ids=["frozen table", "trained table"])
def test_a_draft_with_a_layer_less_learns_to_choose_as_its_target(tiny: Path, text: OwnText, table: object) -> None:
    target = open_target(tiny)
    trainer = Trainer(student(target, text, table), text, np.arange(len(text)), PACE)
    before = trainer.agreement(np.arange(len(text)))
    losses = [trainer.step(0.0) for _ in range(25)]
    after = trainer.agreement(np.arange(len(text)))
    trainer.close()
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert after[0] > before[0]


def test_a_resumed_run_goes_on_as_if_never_stopped(tiny: Path, text: OwnText, tmp_path: Path) -> None:
    target, train = open_target(tiny), np.arange(len(text))

    def frozen(name: str, ids: torch.Tensor, layers: list[int]) -> torch.Tensor:
        return making.frozen_tensor(target, name, ids, layers)

    through = Trainer(student(target, text), text, train, PACE)
    for _ in range(6):
        through.step(0.1)
    first = Trainer(student(target, text), text, train, PACE)
    for _ in range(3):
        first.step(0.1)
    first.place.log.append((1.0, first.place.seen, *first.agreement(train)))
    through.place.log.append(first.place.log[0])
    distil.save(tmp_path / "training.pt", first.student, first.place)
    kept, place = distil.load(tmp_path / "training.pt", frozen)
    second = Trainer(kept, text, train, PACE, place)
    for _ in range(3):
        second.step(0.1)
    for name, p in through.student.parameters.items():
        assert torch.equal(p.value, second.student.parameters[name].value), name
    assert second.place == through.place
    for trainer in (through, first, second):
        trainer.close()


def test_a_draft_that_was_never_trained_takes_no_room_for_moments_and_trains_from_its_checkpoint(
    tiny: Path, text: OwnText, tmp_path: Path
) -> None:
    target, path, train = open_target(tiny), tmp_path / "training.pt", np.arange(len(text))
    fresh = student(target, text)
    weights = sum(p.value.numel() for p in fresh.parameters.values())
    distil.save(path, fresh, distil.Place())
    fixed = 60_000 + 8 * len(fresh.trim.to_row)  # names and shapes; the map of rows
    assert 4 * weights < path.stat().st_size < 5 * weights + fixed
    kept, _ = distil.load(path, lambda name, ids, layers: making.frozen_tensor(target, name, ids, layers))
    trainers = [Trainer(one, text, train, PACE) for one in (fresh, kept)]
    for trainer in trainers:
        trainer.step(0.1)
        trainer.close()
    assert all(torch.equal(p.value, kept.parameters[name].value) for name, p in fresh.parameters.items())
    distil.save(path, fresh, distil.Place())
    assert path.stat().st_size > 8 * weights  # what has been trained keeps its moments


def test_a_broken_checkpoint_says_so(tmp_path: Path) -> None:
    path = tmp_path / "training.pt"
    path.write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(WeightsError, match=r"training\.pt is not a usable checkpoint"):
        distil.load(path, lambda name, ids, layers: ids)


def test_divergence_is_zero_for_the_target_itself_and_counts_missing_rows() -> None:
    torch.manual_seed(0)
    scores = torch.randn(5, 40) * 3
    logp, row = torch.log_softmax(scores, 1).topk(16)
    assert divergence(scores, row, logp).item() == pytest.approx(0.0, abs=1e-4)
    assert divergence(scores + torch.randn(5, 40), row, logp) > 0.1
    row[:, 3] = -1
    assert divergence(scores, row, logp).item() >= -1e-4


def test_the_softmax_over_candidates_sees_every_likely_row_and_leads_to_the_same_loss() -> None:
    torch.manual_seed(0)
    scores = torch.randn(6, 9_000) * 4
    logp, row = torch.log_softmax(scores + torch.randn(6, 9_000), 1).topk(16)
    row[2, 5] = -1
    rows, place, weight = candidates(row, 9_000, torch.Generator().manual_seed(1))
    assert set(row[row >= 0].tolist()) <= set(rows.tolist())
    assert len(rows) < 9_000
    there = row >= 0
    assert torch.equal(rows[place[there]], row[there])
    assert (place[~there] == -1).all()
    whole, few = divergence(scores, row, logp), divergence(scores[:, rows] + weight, place, logp)
    assert few.item() == pytest.approx(whole.item(), rel=0.15)


def test_the_gradient_reaches_weights_and_scales() -> None:
    torch.manual_seed(1)
    latent, goal = torch.randn(16, 64), torch.randn(16, 64)
    p = Parameter.matrix(latent, latent.reshape(16, 2, 32).abs().amax(2) / 7)
    errors = []
    for step in range(1, 120):
        rounded = p.rounded(Q4_0).float()
        errors.append(float((rounded - goal).pow(2).mean()))
        step_parameter(p, Q4_0, rounded - goal, 0.02, step)
    assert errors[-1] < 0.1 * errors[0]
    assert p.log is not None
    assert p.log.abs().max() > 1e-3


def test_the_exported_draft_computes_what_was_trained(tiny: Path, text: OwnText, tmp_path: Path) -> None:
    target = open_target(tiny)
    trainer = Trainer(student(target, text, layers=3), text, np.arange(len(text)), PACE)
    trainer.step(0.0)
    factory.write_student(trainer.student, target, tmp_path / "draft.gguf")
    from paceline.quant.llama import LlamaModel, log_softmax

    tokens = [int(t) for t in text.conversation(0)[:40]]
    model = LlamaModel(tmp_path / "draft.gguf")
    model.decode(tokens, 0, [True] * len(tokens))
    theirs = np.stack([log_softmax(model.last(i)) for i in range(len(tokens))])
    model.close()
    w, s = {n: t.float() for n, t in trainer.student.weights().items()}, trainer.student.shape
    x = decoder.embed(s, w[decoder.EMBEDDING], torch.tensor([tokens]))
    ours = torch.log_softmax(decoder.hidden(s, w, x)[0] @ decoder.head(w).T, -1).numpy()
    trainer.close()
    assert (ours.argmax(1) == theirs.argmax(1)).mean() > 0.8
    assert np.abs(np.exp(ours) - np.exp(theirs)).mean() < 2e-3


def test_too_little_text_is_an_error_not_a_loop(tiny: Path, text: OwnText) -> None:
    target = open_target(tiny)
    trainer = Trainer(student(target, text), text, np.arange(1), PACE)
    with pytest.raises(RecipeError, match="too little text"):
        trainer.step(0.0)
    trainer.close()


def test_place_survives_a_round_trip_with_its_log() -> None:
    place = Place(3, 1.5, 100, 0, 6, [(1.0, 50, 0.5, 0.7)])
    assert Place(**vars(place)) == place
