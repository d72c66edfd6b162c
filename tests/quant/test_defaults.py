"""Making a shipped draft from end to end, on a target small enough to train in seconds."""

import json
from pathlib import Path

import pytest
from paceline.quant import defaults, folder, patch
from paceline.quant.errors import RecipeError
from paceline.quant.shipped import PATCH


def test_a_draft_is_built_trained_measured_and_packed(tiny: Path, tmp_path: Path) -> None:
    prompts, said = tmp_path / "held-out.jsonl", []
    prompts.write_text(json.dumps({"prompt": "the inner thin"}))
    ship = defaults.make("default", tiny, tmp_path / "work", 0.02, 48, prompts, said.append)
    made = tmp_path / "work" / "default"
    assert {p.name for p in ship.iterdir()} == {"NOTICE", folder.CARD, PATCH}
    patch.apply(ship / PATCH, tiny, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (made / folder.DRAFT).read_bytes()
    card = folder.verify(made)
    assert card.recipe["training"]["steps"] > 0
    assert 0 < card.evaluation["mean"]["top1"] <= card.evaluation["mean"]["top4"] <= 1
    assert any("mean over categories" in line for line in said)
    again = defaults.make("default", tiny, tmp_path / "work", 0.02, 48, say=said.append)
    assert again == ship
    assert said.count("building default") == 1  # taken up where it stopped


def test_an_unknown_recipe_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no recipe 'huge'"):
        defaults.make("huge", tiny, tmp_path)
