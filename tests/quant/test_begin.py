"""Training that goes on from a draft's file alone: it reads back what was written, and what it cannot read it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from paceline.kernels.gguf_file import GgufFile
from paceline.quant import factory, folder, schooling
from paceline.quant.begin import student_of
from paceline.quant.errors import DraftError, RecipeError
from paceline.quant.target import open_target

KINDS = {
    "whole": factory.Options(rounding="corrected", conversations=24),
    "narrow": factory.Options("0,2", "192", "q4_0", "q4_0", neurons=64, rounding="corrected", conversations=24),
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_a_draft_is_read_back_as_it_was_written(options: factory.Options, tiny: Path, tmp_path: Path) -> None:
    target = open_target(tiny)
    factory.build(tiny, tmp_path / "draft", options, cache=tmp_path / "text")
    file = GgufFile(tmp_path / "draft" / folder.DRAFT)
    student = student_of(file, target, folder.read_card(tmp_path / "draft").recipe["layers"])
    factory.write_student(student, target, tmp_path / "again.gguf")
    again = GgufFile(tmp_path / "again.gguf")
    assert again.tensors.keys() == file.tensors.keys()
    for name in file.tensors:
        assert np.array_equal(again.raw(name), file.raw(name)), name
    assert again.metadata.keys() == file.metadata.keys()


def test_training_goes_on_without_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    factory.build(tiny, draft, KINDS["narrow"], cache=tmp_path / "text")
    (draft / factory.CHECKPOINT).unlink()
    options = schooling.Options(0.02, 1e-3, conversations=24)
    result = schooling.distil(tiny, draft, options, cache=tmp_path / "text")
    assert result["steps"] > 0
    assert (draft / factory.CHECKPOINT).exists()
    folder.verify(draft)


def test_what_cannot_be_trained_is_refused(tiny: Path, other: Path, tmp_path: Path) -> None:
    draft, target = tmp_path / "draft", open_target(tiny)
    factory.build(tiny, draft, factory.Options(quant="q8_0"))
    with pytest.raises(RecipeError, match="matrices in Q8_0; training goes on from Q4_0 or IQ4_NL alone"):
        schooling.begun(target, draft)
    with pytest.raises(RecipeError, match="has 3 layers; its card names 2"):
        student_of(GgufFile(draft / folder.DRAFT), target, [0, 1])
    with pytest.raises(DraftError, match="not for other"):
        schooling.begun(open_target(other), draft)
    (draft / folder.DRAFT).unlink()
    with pytest.raises(DraftError, match=r"neither training\.pt nor draft\.gguf"):
        schooling.begun(target, draft)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize(("device", "why"), [("cuda", "sees no CUDA device"), ("tpu", "cpu or cuda, not 'tpu'")])
def test_a_device_that_is_not_there_is_named(device: str, why: str, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=why):
        schooling.distil(tiny, tmp_path, schooling.Options(device=device))
