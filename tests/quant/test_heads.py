"""Leaving heads out: what is left computes as if the others were silent, wherever it runs; the idle ones go first."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from paceline.kernels.gguf_file import GgufFile
from paceline.quant import build as making
from paceline.quant import decoder, factory, folder, heads, store, writer
from paceline.quant.cli import app
from paceline.quant.decoder import EMBEDDING
from paceline.quant.errors import RecipeError
from paceline.quant.families import draft_shape
from paceline.quant.grids import Q4_0
from paceline.quant.student import Student
from paceline.quant.target import Target, open_target
from paceline.quant.text import OwnText
from paceline.quant.trim import whole
from small_models import write_folder
from typer.testing import CliRunner

KEPT = ([1], [], [0, 1])  # of the three layers' two groups


@pytest.fixture(scope="module")
def target(tiny: Path) -> Target:
    return open_target(tiny)


@pytest.fixture(scope="module")
def text(tiny: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> OwnText:
    return store.text(target, tiny, 24, root=tmp_path_factory.mktemp("text"), rows=48, length=160)


@pytest.fixture
def student(target: Target, text: OwnText) -> Student:
    rows = target.extents(EMBEDDING)[0]
    return making.rebuilt(target, making.Recipe([0, 1, 2], whole(rows), Q4_0), text.rows(np.arange(len(text)), 60, 8))


def silence(student: Student, i: int, group: int) -> None:
    """Let nothing of a group reach the stream."""
    span = student.shape.heads // student.shape.kv_heads * student.shape.head_dim
    student.parameters[f"blk.{i}.attn_output.weight"].value[:, group * span : (group + 1) * span] = 0


def logits(student: Student, tokens: torch.Tensor) -> torch.Tensor:
    """[B, S, V] of tokens [B, S], in float32."""
    w = {name: t.float() for name, t in student.weights().items()}
    return decoder.hidden(student.shape, w, decoder.embed(student.shape, w[EMBEDDING], tokens)) @ decoder.head(w).T


def thinned(student: Student) -> Student:
    for i, kept in enumerate(KEPT):
        heads.keep_groups(student, i, kept)
    assert student.layout().kv_heads == [1, 0, 2]
    return student


def test_a_head_left_out_is_as_if_it_were_silent(student: Student, text: OwnText) -> None:
    tokens = torch.from_numpy(np.stack([text.conversation(i)[:40] for i in range(3)]).astype(np.int64))
    for i, kept in enumerate(KEPT):
        for group in {0, 1} - set(kept):
            silence(student, i, group)
    silent = logits(student, tokens)
    torch.testing.assert_close(logits(thinned(student), tokens), silent, atol=1e-4, rtol=1e-4)


def test_idle_heads_go_first(student: Student, text: OwnText) -> None:
    silence(student, 0, 0)
    silence(student, 2, 1)
    found = heads.worth(student, text, range(8))
    assert found[0][0] == found[2][1] == 0
    heads.thin(student, 4, text, range(8))
    assert student.layout().kv_heads == [1, 2, 1]
    heads.thin(student, 1, text, range(8))
    assert sum(student.layout().kv_heads) == 1


@pytest.mark.parametrize("count", [0, 7])
def test_as_many_heads_as_there_are_not_are_refused(count: int, student: Student, text: OwnText) -> None:
    with pytest.raises(RecipeError, match="has 6 heads of keys"):
        heads.thin(student, count, text, range(8))


def test_it_writes_as_it_reads(student: Student, text: OwnText) -> None:
    """One position at a time through the caches gives what whole sequences do."""
    w, shape = {n: t.float() for n, t in thinned(student).weights().items()}, student.shape
    tokens = torch.from_numpy(text.conversation(0)[None, :20].astype(np.int64))
    cache = writer.Cache(shape, w, 1, 20)
    steps = torch.stack([writer.step(shape, w, cache, tokens[:, at], at) for at in range(20)], 1)
    torch.testing.assert_close(steps, logits(student, tokens), atol=1e-3, rtol=1e-3)


def test_llama_cpp_runs_layers_that_differ(student: Student, target: Target, text: OwnText, tmp_path: Path) -> None:
    from paceline.quant.llama import LlamaModel

    factory.write_student(thinned(student), target, tmp_path / "draft.gguf")
    tokens = text.conversation(0)[:40].tolist()
    model = LlamaModel(tmp_path / "draft.gguf")
    model.decode(tokens, 0, [True] * len(tokens))
    theirs = np.stack([model.last(i) for i in range(len(tokens))])
    model.close()
    ours = logits(student, torch.tensor([tokens]))[0].numpy()
    assert (ours.argmax(1) == theirs.argmax(1)).mean() > 0.8
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.999  # it rounds activations to 8 bits


def test_onnx_runtime_runs_layers_that_differ(student: Student, target: Target, tiny: Path, tmp_path: Path) -> None:
    """With float activations only the order of sums differs, in one batch as in a session's cells a few rows at a time."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from paceline.kernels.onnx_session import Cache, OnnxModel
    from paceline.quant.onnx_export import Rounding, model_bytes, open_source
    from paceline.quant.onnx_graph import FLOAT_ACTIVATIONS
    from plain_onnx import PlainOnnx

    tokens = [1, 5, 80, 81, 3, *range(20, 60)]
    factory.write_student(thinned(student), target, tmp_path / "draft.gguf")
    file = GgufFile(tmp_path / "draft.gguf")
    w, shape = {n: torch.from_numpy(file.array(n)) for n in file.tensors}, draft_shape(file.metadata, "draft")
    stream = decoder.hidden(shape, w, decoder.embed(shape, w[EMBEDDING], torch.tensor([tokens])))
    theirs = (stream[0] @ decoder.head(w).T).numpy()
    path = tmp_path / "draft.onnx"
    path.write_bytes(model_bytes(open_source(file.path, tiny), Rounding(), accuracy=FLOAT_ACTIVATIONS))
    near = 2e-3 * float(theirs.std())
    np.testing.assert_allclose(PlainOnnx(path).after(tokens), theirs, atol=near)
    model = OnnxModel(path)
    assert model.layout.caches == {"keys.0": 1, "values.0": 1, "keys.2": 2, "values.2": 2}
    cache = Cache(model, 64)
    for at in range(0, len(tokens), 9):
        rows = range(at, at + 9)
        seen = [np.arange(i + 1) for i in rows]
        out = cache.step([tokens[i] for i in rows], list(rows), list(rows), seen, [True] * len(rows))
        np.testing.assert_allclose(out, theirs[rows], atol=near)


def test_a_draft_is_thinned_and_trained_on(tiny: Path, tmp_path: Path) -> None:
    draft, run = tmp_path / "draft", CliRunner()
    cache = ["--cache", str(tmp_path / "text"), "--conversations", "24"]
    made = run.invoke(app, ["build", str(tiny), "-o", str(draft), "--quant", "q4_0", "--rounding", "corrected", *cache])
    assert made.exit_code == 0, made.output
    about = ["--target", str(tiny), "--draft", str(draft)]
    done = run.invoke(app, ["thin", *about, "--heads", "4", *cache])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert sum(report["heads_by_layer"]) == 4
    assert 0 < report["held_out_top1"]["after"] <= 1
    trained = run.invoke(app, ["distill", *about, "--minutes", "0.02", *cache])
    assert trained.exit_code == 0, trained.output
    assert json.loads(trained.stdout)["steps"] > 0
    card = folder.verify(draft)
    assert card.recipe["thinned"]["heads_by_layer"] == report["heads_by_layer"]
    refused = run.invoke(app, ["thin", *about, "--heads", "5", *cache])
    assert refused.exit_code == 1
    assert "has 4 heads of keys" in " ".join(refused.output.split())


def test_families_that_llama_cpp_cannot_run_so_are_refused(tmp_path: Path) -> None:
    target = write_folder(tmp_path / "target", "qwen3")
    factory.build(target, tmp_path / "draft", factory.Options(quant="q4_0", rounding="plain"))
    done = CliRunner().invoke(
        app, ["thin", "--target", str(target), "--draft", str(tmp_path / "draft"), "--heads", "1"]
    )
    assert done.exit_code == 1
    assert "heads can be left out of Llama drafts alone" in " ".join(done.output.split())
