"""`draft build` and `draft verify` end to end: every option gives a draft that llama.cpp runs, a wrong one is refused by name."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from paceline.kernels.gguf_file import GgufFile
from paceline.quant import factory, folder
from paceline.quant.cli import app
from paceline.quant.errors import DraftError, RecipeError, WeightsError
from paceline.quant.evaluate import DraftView, agreement, see_all
from paceline.quant.target import open_target, vocabulary
from paceline.quant.traces import Trace
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def trimmed(tiny: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("drafts") / "trimmed"
    factory.build(
        tiny, out, factory.Options(layers="2", vocab="96", quant="q4_0", table="q4_0", conversations=16), cache=cache
    )
    return out


@pytest.mark.parametrize("quant", ["q4_0", "iq4_nl", "q8_0"])
@pytest.mark.parametrize("rounding", ["plain", "corrected"])
def test_a_whole_draft_mostly_agrees(quant: str, rounding: str, tiny: Path, cache: Path, tmp_path: Path) -> None:
    report = factory.build(
        tiny, tmp_path / "d", factory.Options(quant=quant, rounding=rounding, conversations=16), cache=cache
    )
    assert report["layers"] == [0, 1, 2]
    assert max(report["relative_squared_error"].values()) < (1e-3 if quant == "q8_0" else 0.2)
    folder.verify(tmp_path / "d", vocabulary(open_target(tiny)))
    view, target = DraftView(tmp_path / "d" / "draft.gguf"), DraftView(tiny)
    prompt = [1, 50, 60, 70, 80]
    text = target.model.greedy(prompt, 40, set())
    seen = agreement(see_all(view, [Trace("all", prompt, text)]))
    assert seen["mean"]["top4"] > 0.5


def test_a_trimmed_draft_speaks_the_targets_ids(trimmed: Path, tiny: Path) -> None:
    folder.verify(trimmed, vocabulary(open_target(tiny)))
    view = DraftView(trimmed / "draft.gguf")
    assert view.model.rows == 96
    assert {0, 1, 2} <= set(view.to_target.tolist())  # the special tokens
    assert len(view.to_row) == 263
    assert (view.to_target[view.to_row[view.to_target]] == view.to_target).all()


def test_a_draft_for_another_target_is_refused_by_name(trimmed: Path, other: Path) -> None:
    with pytest.raises(DraftError, match="draft for tiny, not for other"):
        folder.verify(trimmed, vocabulary(open_target(other)))


@pytest.mark.parametrize("name", ["draft.gguf", "vocab.gguf"])
def test_a_damaged_file_is_refused_by_name(name: str, trimmed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(trimmed, tmp_path / "copy")
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(DraftError, match=name):
        folder.verify(copy)
    (copy / name).unlink()
    with pytest.raises(DraftError, match=f"lacks {name}"):
        folder.verify(copy)


@pytest.mark.parametrize("card", ["", "[]", "{}", '{"format": 9}', '{"name": 1, "target": {}, "files": {}}'])
def test_a_broken_card_is_refused(card: str, trimmed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(trimmed, tmp_path / "copy")
    (copy / "draft.json").write_text(card)
    with pytest.raises(DraftError, match="draft"):
        folder.verify(copy)


def test_a_card_may_not_name_files_outside_its_folder(trimmed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(trimmed, tmp_path / "copy")
    card = json.loads((copy / "draft.json").read_text())
    card["files"]["../outside"] = "0" * 64
    (copy / "draft.json").write_text(json.dumps(card))
    with pytest.raises(DraftError, match="outside"):
        folder.verify(copy)


def maps(rows: int, token_map: list[int], input_map: list[int], tmp_path: Path) -> GgufFile:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("paceline.token_map", token_map)
    writer.add_array("paceline.input_map", input_map)
    writer.add_tensor("token_embd.weight", np.zeros((rows, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("token_map", "input_map", "why"),
    [
        ([0, 2], [0, 1, 1, 0], "each of its 3 rows"),
        ([0, 2, 2], [0, 1, 1, 0], "each of its 3 rows"),
        ([0, 2, 4], [0, 1, 1, 0], "outside the target's 4"),
        ([0, 2, 3], [0, 1, 1], "does not lead"),
        ([0, 2, 3], [0, 1, 1, 3], "does not lead"),
        ([0, 2, 3], [0, 1, 2, 2], "contradict"),
    ],
)
def test_maps_that_do_not_fit_are_refused(token_map: list[int], input_map: list[int], why: str, tmp_path: Path) -> None:
    with pytest.raises(DraftError, match=why):
        folder.check_maps(maps(3, token_map, input_map, tmp_path), 4)


def test_what_a_target_cannot_give_is_said(tiny: Path, cache: Path, tmp_path: Path) -> None:
    for options, why in (
        (factory.Options(layers="4"), "between 1 and 3"),
        (factory.Options(layers="many"), "number or `auto`"),
        (factory.Options(vocab="2", conversations=16), "special tokens"),
        (factory.Options(quant="q3"), "Unknown --quant"),
        (factory.Options(rounding="plain", neurons=64), "corrected"),
    ):
        with pytest.raises(RecipeError, match=why):
            factory.build(tiny, tmp_path / "d", options, cache=cache)
    with pytest.raises(WeightsError, match="no model at"):
        factory.build(tmp_path / "nothing.gguf", tmp_path / "d", factory.Options())


def test_the_commands_build_train_and_check(tiny: Path, other: Path, tmp_path: Path) -> None:
    run = CliRunner()
    common = ["--cache", str(tmp_path / "cache"), "--conversations", "32"]
    built = run.invoke(
        app, ["build", str(tiny), "-o", str(tmp_path / "d"), "--layers", "2", "--quant", "iq4_nl", *common]
    )
    assert built.exit_code == 0, built.output
    trained = run.invoke(
        app,
        [
            "distill",
            "--target",
            str(tiny),
            "--draft",
            str(tmp_path / "d"),
            "--minutes",
            "0.05",
            "--rate",
            "0.001",
            *common,
        ],
    )
    assert trained.exit_code == 0, trained.output
    assert json.loads(trained.stdout)["steps"] > 0
    assert (tmp_path / "d" / "training.svg").read_text().startswith("<svg")
    assert run.invoke(app, ["verify", str(tmp_path / "d"), "--target", str(tiny)]).exit_code == 0
    refused = run.invoke(app, ["verify", str(tmp_path / "d"), "--target", str(other)])
    assert refused.exit_code == 1
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"category": "a", "turns": ["hello in there"]}\n{"prompt": "and here"}\n')
    arguments = [
        "--target",
        str(tiny),
        "--draft",
        str(tmp_path / "d"),
        "--prompts",
        str(prompts),
        "--tokens",
        "12",
        "--json",
    ]
    measured = run.invoke(app, ["eval", *arguments])
    assert measured.exit_code == 0, measured.output
    result = json.loads(measured.stdout)
    assert set(result["categories"]) == {"a", "all"}
    assert folder.read_card(tmp_path / "d").evaluation["mean"] == result["mean"]
