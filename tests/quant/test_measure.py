"""Measuring a draft: along greedy and drawn text, against the target's own cost, kept in the folder with its picture."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from paceline.quant import factory, folder, measure
from paceline.quant.llama import sampler
from paceline.quant.traces import Prompt, record


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": "the inner thin", "category": "a & b"}, {"prompt": "her", "category": "c"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_draft_is_measured_along_both_texts_and_the_folder_keeps_it(
    tiny: Path, prompts: Path, tmp_path: Path
) -> None:
    factory.build(tiny, tmp_path / "draft", factory.Options(quant="q8_0", rounding="plain"))
    options = measure.Options(tokens=24, temperature=0.9)
    result = measure.evaluate(tiny, tmp_path / "draft", prompts, options, tmp_path / "cache")
    assert result["mean"]["top1"] > 0.8  # eight bits are near the target
    assert set(result["sampled"]["categories"]) == {"a & b", "c"}
    assert result["sampled"]["mean"]["top1"] < result["mean"]["top1"]  # a drawn token is often not the likeliest
    assert result["sampled"]["mean"]["top8"] > result["sampled"]["mean"]["top1"]
    assert set(result["step_of_target_at_q4_0"]) == {"1", "4", "8"}
    assert set(result["predicted_by_device"]) == {"laptop", "small-gpu", "pi"}
    assert folder.read_card(tmp_path / "draft").evaluation == json.loads(json.dumps(result))
    picture = ElementTree.parse(tmp_path / "draft" / measure.PICTURE)
    assert any(e.text == "a & b" for e in picture.iter())
    assert "temperature 0.9" in measure.table(result)


def test_drawn_text_is_the_same_at_every_call_and_not_the_greedy_one(tiny: Path) -> None:
    asked = [Prompt("all", "the inner")]
    drawn = [record(tiny, asked, 32, temperature=1.5)[0].text for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != record(tiny, asked, 32)[0].text


def test_a_cached_recording_does_not_serve_another_temperature(tiny: Path, tmp_path: Path) -> None:
    asked = [Prompt("all", "the inner")]
    greedy, drawn = (record(tiny, asked, 32, tmp_path, temperature=t)[0].text for t in (0.0, 1.5))
    assert greedy != drawn
    assert record(tiny, asked, 32, tmp_path)[0].text == greedy


def test_a_draw_follows_the_softmax() -> None:
    logits = np.log(np.array([1, 3, 12], np.float32))
    assert {sampler(0.01, 3)(logits) for _ in range(20)} == {2}
    draw = sampler(2.0, 3)
    share = np.bincount([draw(logits) for _ in range(4000)], minlength=3) / 4000
    expected = np.sqrt([1, 3, 12]) / np.sqrt([1, 3, 12]).sum()
    assert np.abs(share - expected).max() < 0.04
