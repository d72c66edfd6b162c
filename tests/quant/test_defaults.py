"""Making a shipped draft from end to end, on a target small enough to train in seconds."""

import json
from pathlib import Path

import pytest
from paceline.quant import defaults, factory, folder, patch
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


def test_heads_are_left_out_on_the_way(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = factory.Options("0,2", "192", "q4_0", "q4_0", neurons=64, rounding="corrected", sweeps=0)
    monkeypatch.setitem(defaults.RECIPES, "narrow", defaults.Shipped(options, 1.0, 1e-3, False, heads=3))
    said: list[str] = []
    ship = defaults.make("narrow", tiny, tmp_path / "work", 0.03, 48, say=said.append)
    assert {p.name for p in ship.iterdir()} == {"NOTICE", folder.CARD, folder.DRAFT}
    recipe = folder.verify(tmp_path / "work" / "narrow").recipe
    assert sum(recipe["thinned"]["heads_by_layer"]) == 3
    trained = [json.loads(line)["steps"] for line in said if "held_out_conversations" in line]
    assert 0 < trained[0] < trained[1]
    defaults.make("narrow", tiny, tmp_path / "work", 0.03, 48, say=said.append)
    assert sum("heads_by_layer" in line for line in said) == 1  # taken up where it stopped


def test_an_unknown_recipe_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no recipe 'huge'"):
        defaults.make("huge", tiny, tmp_path)
