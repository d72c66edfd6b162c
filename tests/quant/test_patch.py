"""A draft as a patch of its target: the same bytes come back, and nothing else is ever taken for them."""

import lzma
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
from paceline.quant import factory, patch
from paceline.quant.errors import DraftError


@pytest.fixture(scope="module")
def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("patch")
    factory.build(
        tiny,
        folder / "d",
        factory.Options(quant="iq4_nl", rounding="corrected", conversations=16),
        cache=folder / "cache",
    )
    patch.make(folder / "d" / "draft.gguf", tiny, folder / "draft.patch", [0, 1, 2])
    return folder / "d" / "draft.gguf", folder / "draft.patch"


def test_applying_gives_the_draft_back_byte_for_byte(pair: tuple[Path, Path], tiny: Path, tmp_path: Path) -> None:
    patch.apply(pair[1], tiny, tmp_path / "draft.gguf")
    assert (tmp_path / "draft.gguf").read_bytes() == pair[0].read_bytes()
    assert pair[1].stat().st_size < pair[0].stat().st_size


@pytest.mark.parametrize("kind", ["Q4_0", "IQ4_NL"])
def test_blocks_unpack_as_ggml_reads_them(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    raw = np.random.default_rng(0).integers(0, 256, (7, 18), dtype=np.uint8)
    raw[:, 1] = 0x2C  # a scale near 0.06
    scales, places = patch.unpacked(raw.reshape(-1))
    expected = scales.astype(np.float32)[:, None] * np.array(patch.CODES[number.value], np.float32)[places]
    assert np.array_equal(gguf.quants.dequantize(raw, number), expected)
    assert np.array_equal(patch.repacked(scales, places), raw.reshape(-1))


def test_another_target_is_refused_by_name(pair: tuple[Path, Path], other: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftError, match=r"another file than other\.gguf"):
        patch.apply(pair[1], other, tmp_path / "draft.gguf")
    assert not list(tmp_path.iterdir())


def test_damage_anywhere_is_refused_and_leaves_nothing(pair: tuple[Path, Path], tiny: Path, tmp_path: Path) -> None:
    data, rng = pair[1].read_bytes(), random.Random(0)
    broken = tmp_path / "broken.patch"
    cuts = [data[:n] for n in (0, 5, 30, len(data) // 2, len(data) - 1)]
    flips = []
    for _ in range(40):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        flips.append(bytes(changed))
    for content in cuts + flips:
        broken.write_bytes(content)
        with pytest.raises(DraftError):
            patch.apply(broken, tiny, tmp_path / "out" / "draft.gguf")
        assert not (tmp_path / "out" / "draft.gguf").exists()


def test_a_blob_that_expands_further_than_promised_is_not_followed() -> None:
    bomb = lzma.compress(bytes(50_000_000))
    with pytest.raises(ValueError, match="instead of 100"):
        patch._unpack(bomb, 100)
