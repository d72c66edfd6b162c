"""Building by named layers: what is asked for is what is kept, and what cannot be is refused by name."""

from pathlib import Path

import pytest
from paceline.kernels.gguf_file import GgufFile
from paceline.quant import factory
from paceline.quant.errors import RecipeError


def test_layers_can_be_named(tiny: Path, tmp_path: Path) -> None:
    report = factory.build(tiny, tmp_path / "d", factory.Options("0,2", quant="q8_0", rounding="plain"))
    assert report["layers"] == [0, 2]
    theirs, ours = GgufFile(tiny).array("blk.2.ffn_up.weight"), GgufFile(tmp_path / "d" / "draft.gguf")
    assert abs(ours.array("blk.1.ffn_up.weight") - theirs).max() < 0.02 * abs(theirs).max()


@pytest.mark.parametrize("layers", ["2,0", "0,0", "0,3", "-1,0", "0,x", "0,"])
def test_layers_that_cannot_be_are_refused(tiny: Path, tmp_path: Path, layers: str) -> None:
    with pytest.raises(RecipeError, match="--layers"):
        factory.build(tiny, tmp_path / "d", factory.Options(layers, quant="q8_0", rounding="plain"))
    assert not (tmp_path / "d").exists()


def test_the_report_says_how_far_each_map_is_from_the_targets(tiny: Path, tmp_path: Path) -> None:
    fine = factory.build(tiny, tmp_path / "a", factory.Options(quant="q8_0", rounding="plain"))[
        "relative_squared_error"
    ]
    rough = factory.build(tiny, tmp_path / "b", factory.Options(quant="q4_0", rounding="plain"))[
        "relative_squared_error"
    ]
    assert len(fine) == 3 * 7 + 1
    for name in fine:
        if name.startswith("blk."):
            assert 0 < fine[name] < 1e-3 < rough[name] < 0.05
