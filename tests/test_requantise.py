"""Requantising: a real model through the real quantiser, and what goes wrong with it."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import gguf
import llama_cpp
import pytest
from paceline.protocol.errors import EngineError
from paceline.quant.landing import DiskError
from paceline.quant.requantise import Kind, RequantiseError, requantise
from paceline.quant.vocab import CorruptModelError, write_vocabulary


def tensor_kinds(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def test_a_rounded_draft_is_of_the_kinds_it_says(smollm2_rounded_path: Path) -> None:
    kinds = tensor_kinds(smollm2_rounded_path)
    assert kinds.pop("token_embd.weight") == "Q8_0"
    matrices = {kind for name, kind in kinds.items() if "norm" not in name}
    assert "IQ4_NL" in matrices
    assert matrices <= {"IQ4_NL", "Q5_K"}  # llama.cpp itself widens a few of the down projections
    assert sum(kind == "IQ4_NL" for kind in kinds.values()) > 0.9 * sum("norm" not in name for name in kinds)


def test_a_rounded_draft_computes(smollm2_rounded_path: Path) -> None:
    model = llama_cpp.Llama(str(smollm2_rounded_path), n_ctx=128, n_threads=2, verbose=False)
    reply = model.create_completion("The capital of France is", max_tokens=3, temperature=0.0)
    assert "Paris" in reply["choices"][0]["text"]


def test_a_model_cut_off_in_its_weights_is_refused(smollm2_path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with smollm2_path.open("rb") as file:
        cut.write_bytes(file.read(20_000_000))
    with pytest.raises(RequantiseError, match=r"cut\.gguf.*not within the file bounds"):
        requantise(cut, tmp_path / "draft.gguf", Kind.IQ4_NL)
    assert [path.name for path in tmp_path.iterdir()] == ["cut.gguf"]


def test_what_is_no_model_is_refused(smollm2_path: Path, tmp_path: Path) -> None:
    write_vocabulary(smollm2_path, tmp_path / "v.gguf")
    with pytest.raises(CorruptModelError, match="no weights"):
        requantise(tmp_path / "v.gguf", tmp_path / "draft.gguf", Kind.Q8_0)
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(EngineError, match="not begin with GGUF"):
        requantise(tmp_path / "text.gguf", tmp_path / "draft.gguf", Kind.Q8_0)


def test_a_full_disk_keeps_the_old_draft(smollm2_path: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(b"the old draft")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(DiskError, match="disk is full"):
            requantise(smollm2_path, draft, Kind.IQ4_NL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert draft.read_bytes() == b"the old draft"
    assert [path.name for path in tmp_path.iterdir()] == ["draft.gguf"]


def test_the_rest_of_a_killed_run_is_swept_away(smollm2_path: Path, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    (tmp_path / f"v.gguf.{child.pid}.part").write_bytes(b"half a file")
    (tmp_path / f"v.gguf.{os.getppid()}.part").write_bytes(b"somebody is still at it")
    write_vocabulary(smollm2_path, tmp_path / "v.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.gguf", f"v.gguf.{os.getppid()}.part"]
