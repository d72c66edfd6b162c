"""`draft export --format onnx`: every family's graph computes what the torch decoder does, and what it lost is said."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paceline.quant
import pytest
import torch
from numpy.typing import NDArray
from paceline.kernels.gguf_file import GgufFile
from paceline.kernels.onnx_file import read_onnx
from paceline.quant import decoder, factory, folder
from paceline.quant.cli import app
from paceline.quant.errors import DraftError, RecipeError
from paceline.quant.families import gguf_shape
from paceline.quant.target import open_target, vocabulary
from small_models import write_folder
from typer.testing import CliRunner

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from paceline.quant.onnx_export import Rounding, export, model_bytes, open_source
from paceline.quant.onnx_graph import FLOAT_ACTIVATIONS
from plain_onnx import PlainOnnx

TOKENS = [1, 5, 80, 81, 3, *range(20, 60), 7, 7, 2]


@pytest.fixture(scope="module")
def draft(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("drafts") / "tiny"
    factory.build(tiny, out, factory.Options(quant="q4_0", rounding="plain"))
    return out


def decoded(file: GgufFile, tokens: list[int]) -> NDArray[np.float32]:
    """Logits [S, rows] of the torch decoder on the very values in the file."""
    shape = gguf_shape(file.metadata, "draft")
    w = {name: torch.from_numpy(file.array(name)) for name in file.tensors}
    x = decoder.embed(shape, w[decoder.EMBEDDING], torch.tensor([tokens]))
    return np.asarray((decoder.hidden(shape, w, x)[0] @ decoder.head(w).T).numpy(), np.float32)


def plain(draft: Path, tmp_path: Path, **how: Any) -> PlainOnnx:
    path = tmp_path / "plain.onnx"
    path.write_bytes(model_bytes(open_source(draft, None), Rounding(), **how))
    read_onnx(path)
    return PlainOnnx(path)


@pytest.mark.parametrize("family", ["llama2", "smollm2", "mistral", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("quant", ["q4_0", "iq4_nl"])
def test_every_family_computes_what_the_decoder_does(family: str, quant: str, tmp_path: Path) -> None:
    """With float activations only the order of sums differs; gemma's window is shorter than the text."""
    target = write_folder(tmp_path / "target", family)
    factory.build(target, tmp_path / "d", factory.Options(quant=quant, rounding="plain"))
    theirs = decoded(GgufFile(tmp_path / "d" / "draft.gguf"), TOKENS)
    ours = plain(tmp_path / "d", tmp_path, accuracy=FLOAT_ACTIVATIONS).after(TOKENS)
    np.testing.assert_allclose(ours, theirs, atol=2e-3 * float(theirs.std()))


def test_activations_of_eight_bits_stay_near(draft: Path, tmp_path: Path) -> None:
    theirs = decoded(GgufFile(draft / "draft.gguf"), TOKENS)
    ours = plain(draft, tmp_path).after(TOKENS)
    assert np.sqrt(((ours - theirs) ** 2).mean()) < 0.05 * theirs.std()
    assert np.abs(ours - theirs).max() > 0  # they are rounded


def test_the_command_makes_a_folder_that_verifies(draft: Path, tiny: Path, other: Path, tmp_path: Path) -> None:
    run, out = CliRunner(), tmp_path / "out"
    done = run.invoke(app, ["export", "--format", "onnx", str(draft), "-o", str(out)])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["opset"], report["com.microsoft"]) == (20, 1)
    assert report["rounded"] == 0
    assert report["matrices"] == {"Q8_0 in 8": 1, "Q4_0 in 4": 21}
    card = folder.verify(out, vocabulary(open_target(tiny)))
    assert set(card.files) == {"draft.onnx", "vocab.gguf"}
    assert card.recipe["export"] == report
    assert run.invoke(app, ["verify", str(out), "--target", str(tiny)]).exit_code == 0
    refused = run.invoke(app, ["verify", str(out), "--target", str(other)])
    assert refused.exit_code == 1
    assert "not for other" in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(["--format", "gguf"], "no --format gguf"), (["--bits", "5"], "exact, 4, 8"), (["--target", "nowhere"], "nowhere")],
)  # fmt: skip
def test_what_cannot_be_exported_is_said(arguments: list[str], why: str, draft: Path, tmp_path: Path) -> None:
    source = draft / "draft.gguf" if "--target" in arguments else draft
    done = CliRunner().invoke(app, ["export", str(source), "-o", str(tmp_path / "out"), *arguments])
    assert done.exit_code == 1
    assert why in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_four_bits_where_eight_are_needed_say_their_error(tiny: Path, tmp_path: Path) -> None:
    factory.build(tiny, tmp_path / "d", factory.Options(quant="iq4_nl", rounding="plain"))
    exact, rounded = export(tmp_path / "d", tmp_path / "exact"), export(tmp_path / "d", tmp_path / "four", 4)
    assert exact["rounded"] == 0
    assert exact["relative_squared_error"]["worst"] == 0
    assert rounded["rounded"] == 21
    assert 1e-3 < rounded["relative_squared_error"]["mean"] <= rounded["relative_squared_error"]["worst"] < 0.02
    assert rounded["bytes"] < exact["bytes"]


def test_a_file_needs_its_target_and_the_right_one(draft: Path, tiny: Path, other: Path, tmp_path: Path) -> None:
    file = draft / "draft.gguf"
    with pytest.raises(DraftError, match="--target"):
        export(file, tmp_path / "out")
    with pytest.raises(DraftError, match="another target than other"):
        export(file, tmp_path / "out", target=other)
    export(file, tmp_path / "out", target=tiny)
    assert folder.verify(tmp_path / "out").target["name"] == "tiny"


def test_an_onnx_draft_is_no_source_of_another(draft: Path, tmp_path: Path) -> None:
    export(draft, tmp_path / "out")
    with pytest.raises(DraftError, match=r"holds no draft\.gguf"):
        export(tmp_path / "out", tmp_path / "again")
    with pytest.raises(DraftError, match="is an ONNX draft"):
        factory.draft_file(tmp_path / "out")
    with pytest.raises(RecipeError, match="the draft itself"):
        export(draft, draft)


def test_a_damaged_or_exchanged_file_is_refused(draft: Path, tmp_path: Path) -> None:
    export(draft, tmp_path / "out")
    data = bytearray((tmp_path / "out" / "draft.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "out" / "draft.onnx").write_bytes(data)
    with pytest.raises(DraftError, match=r"draft\.onnx is not the file"):
        folder.verify(tmp_path / "out")
    both = shutil.copytree(draft, tmp_path / "both")
    shutil.copyfile(tmp_path / "out" / "draft.onnx", both / "draft.onnx")
    folder.write_card(both, folder.read_card(both))
    with pytest.raises(DraftError, match=r"names 2 of draft\.gguf and draft\.onnx"):
        folder.verify(both)


def test_without_the_onnx_package_it_says_what_to_install(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "paceline.quant.onnx_graph")
    monkeypatch.delattr(paceline.quant, "onnx_graph")
    with pytest.raises(RecipeError, match=r"onnx-export"):
        export(draft, tmp_path / "out")
