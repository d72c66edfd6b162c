"""On-policy text: the draft's words, the target's opinion of them."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from paceline.quant import build as making
from paceline.quant import decoder, distil, factory, schooling, store
from paceline.quant import text as own_text
from paceline.quant.chat import chat_of
from paceline.quant.grids import Q4_0
from paceline.quant.refresh import answers, on_policy, scored
from paceline.quant.target import Target, open_target
from paceline.quant.text import OwnText
from paceline.quant.trim import Trim, trim


@pytest.fixture(scope="module")
def text(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> OwnText:
    return store.text(open_target(tiny), tiny, 24, root=tmp_path_factory.mktemp("text"), rows=48, length=160)


def weights(target: Target) -> dict[str, torch.Tensor]:
    return {n: (t.bfloat16() if t.dim() > 1 else t) for n in target.names() for t in (target.tensor(n),)}


def test_scoring_the_targets_own_text_gives_back_what_it_said(tiny: Path, text: OwnText) -> None:
    target = open_target(tiny)
    again = scored(target.shape, weights(target), text)
    assert (again.ti[:, 0] == text.ti[:, 0]).mean() > 0.97
    assert np.abs(np.exp(again.tv.astype(np.float32)) - np.exp(text.tv.astype(np.float32))).mean() < 0.01


def test_the_draft_writes_and_the_target_judges(tiny: Path, text: OwnText) -> None:
    target = open_target(tiny)
    table = target.tensor(decoder.EMBEDDING)
    cut: Trim = trim(table, torch.arange(0, len(table) - 60))
    student = making.rebuilt(target, making.Recipe([0, 2], cut, Q4_0, Q4_0), text.rows(np.arange(len(text)), 60, 8))
    every = np.arange(len(text))
    raw = answers(student, chat_of(tiny)[0], text, every, seed=5)
    judged = on_policy(target, tiny, student, text, every, seed=5)
    assert np.array_equal(raw.toks, judged.toks)
    said = np.concatenate([raw.conversation(i)[raw.rs[i] :] for i in range(len(raw))])
    assert set(said) <= set(cut.to_target.tolist())
    assert (judged.ti != raw.ti).any()
    prompts = {tuple(text.conversation(i)[: text.rs[i]]) for i in range(len(text))}
    assert all(tuple(raw.conversation(i)[: raw.rs[i]]) in prompts for i in range(len(raw)))


def test_training_turns_to_the_drafts_own_text_late_and_keeps_it(tiny: Path, text: OwnText, tmp_path: Path) -> None:
    own_text.save(tmp_path / "text.npz", text)
    factory.build(
        tiny,
        tmp_path / "draft",
        factory.Options("2", quant="q4_0", rounding="corrected"),
        text_file=tmp_path / "text.npz",
    )
    target, said = open_target(tiny), []
    student, place = schooling.load(tmp_path / "draft" / factory.CHECKPOINT, target)
    train, held = factory.split(text)
    trainer = distil.Trainer(student, text, train, distil.Pace(rate=1e-3, tokens=600), place)
    session = schooling.Session(
        trainer, target, tmp_path / "draft", held, said.append, partial(on_policy, target, tiny)
    )
    place.elapsed = 0.8  # of one second: late, with a step or more to go
    session.run(1.0, lambda done, total: None)
    trainer.close()
    assert len(trainer.text) > len(text)
    assert set(trainer.train) >= set(range(len(text), len(trainer.text)))
    assert any("join the text" in line for line in said)
    kept = own_text.load(tmp_path / "draft" / schooling.REFRESHED)
    assert np.array_equal(kept.toks, trainer.text.toks[len(text.toks) :])


def test_the_end_looks_at_as_much_held_out_text_as_the_training_was_long_enough_for() -> None:
    quick = schooling.QUICK
    assert schooling.affordable(1.0, 120.0, 96) == 96  # a quick machine: all of it
    assert schooling.affordable(80.0, 120.0, 96) == quick  # two minutes on a slow one: what was looked at anyway
    assert schooling.affordable(30.0, 120.0, 96) == 2 * quick
    assert schooling.affordable(80.0, 3600.0, 96) == 96
    assert schooling.affordable(0.0, 0.0, 7) == 7
