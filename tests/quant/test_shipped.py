"""The drafts that come with the package: put in place beside their target, and better than plain rounding."""

from pathlib import Path

import pytest
from paceline.quant import folder, shipped
from paceline.quant.errors import DraftError
from paceline.quant.evaluate import DraftView, agreement, see_all
from paceline.quant.target import GgufTarget, open_target, vocabulary
from paceline.quant.traces import Trace, chat


@pytest.fixture(scope="module")
def installed(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shipped") / "default"
    shipped.install("default", smollm2_path, out)
    return out


def test_the_default_draft_is_whole_and_its_targets(installed: Path, smollm2_path: Path) -> None:
    card = folder.verify(installed, vocabulary(open_target(smollm2_path)))
    assert "Apache" in card.licence or "apache" in card.licence
    assert card.evaluation["mean"]["top4"] > 0.98


def test_a_draft_in_place_is_left_alone(installed: Path, smollm2_path: Path) -> None:
    before = (installed / "draft.gguf").stat().st_mtime_ns
    shipped.install("default", smollm2_path, installed)
    assert (installed / "draft.gguf").stat().st_mtime_ns == before


def test_it_chooses_as_its_target_nearly_always(installed: Path, smollm2_path: Path) -> None:
    target = open_target(smollm2_path)
    assert isinstance(target, GgufTarget)
    whole = DraftView(smollm2_path)
    prompt = whole.model.tokenize(chat(target.metadata["tokenizer.chat_template"], "Why is the sky blue?"))
    text = whole.model.greedy(prompt, 48, whole.model.stops())
    whole.model.close()
    seen = agreement(see_all(DraftView(installed / "draft.gguf"), [Trace("all", prompt, text)]))
    assert seen["mean"]["top1"] > 0.75
    assert seen["mean"]["top4"] > 0.9


def test_another_target_or_an_unknown_name_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftError, match=r"another file than tiny\.gguf"):
        shipped.install("default", tiny, tmp_path / "d")
    with pytest.raises(DraftError, match="No draft 'huge'"):
        shipped.install("huge", tiny, tmp_path / "d")
