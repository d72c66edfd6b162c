"""GGUF blocks as `MatMulNBits` blocks: exact where they can be, and the nearest codes elsewhere."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from paceline.kernels.gguf_file import GgufFile
from paceline.quant.errors import WeightsError
from paceline.quant.nbits import Blocks, blocks_of, error, holds, joined, nearest

ROWS, COLUMNS = 24, 512
HALVES = {"Q4_0": 1, "Q4_1": 2, "Q4_K": 2, "Q8_0": 1, "IQ4_NL": 1}  # float16 numbers at the start of a block


def written(path: Path, kind: str, columns: int = COLUMNS) -> GgufFile:
    """A file with one matrix of random blocks: every code, and scales of both signs."""
    rng = np.random.default_rng(0)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (ROWS, columns // block, size), np.uint8)
    scales = rng.normal(0, 0.1, (ROWS, columns // block, HALVES[kind])).astype(np.float16)
    raw[..., : 2 * HALVES[kind]] = scales.view(np.uint8).reshape(ROWS, columns // block, -1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("m", raw.reshape(ROWS, -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q4_K", 4), ("Q8_0", 8), ("IQ4_NL", 8)])
def test_values_are_kept_to_the_last_bit_or_the_offsets_rounding(kind: str, bits: int, tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf", kind)
    w, found = file.array("m"), blocks_of(file, "m")
    assert found.bits == bits
    assert holds(kind, bits)
    assert holds(kind, 8)
    for blocks in (found, blocks_of(file, "m", 8)):
        if blocks.offsets is None:
            np.testing.assert_array_equal(blocks.values(), w)
        else:
            np.testing.assert_allclose(blocks.values(), w, atol=1e-6 * float(abs(w).max()))


@pytest.mark.parametrize("kind", ["Q8_0", "IQ4_NL"])
def test_four_bits_of_what_needs_eight_lose_what_is_said(kind: str, tmp_path: Path) -> None:
    file = written(tmp_path / "m.gguf", kind)
    assert not holds(kind, 4)
    blocks = blocks_of(file, "m", 4)
    assert blocks.bits == 4
    assert 1e-4 < error(file.array("m"), blocks) < 0.02


def test_packing_puts_the_first_of_two_codes_into_the_low_half() -> None:
    codes = np.arange(32, dtype=np.uint8).reshape(1, 1, 32) % 16
    packed = Blocks(4, codes, np.ones((1, 1), np.float32)).packed
    assert packed.shape == (1, 1, 16)
    assert packed[0, 0, 0] == 0x10
    assert packed[0, 0, 1] == 0x32


def test_matrices_of_different_widths_are_joined_without_loss(tmp_path: Path) -> None:
    files = [written(tmp_path / f"{kind}.gguf", kind) for kind in ("Q4_0", "Q4_1", "IQ4_NL")]
    whole = joined([blocks_of(f, "m") for f in files])
    assert whole.bits == 8
    np.testing.assert_allclose(whole.values(), np.concatenate([f.array("m") for f in files]), atol=1e-5)


def test_the_nearest_codes_are_better_than_those_of_the_largest_weight() -> None:
    w = np.random.default_rng(1).normal(size=(64, 256)).astype(np.float32)
    plain = w.reshape(-1, 32)
    scale = abs(plain).max(1, keepdims=True) / 7
    naive = np.clip(np.rint(plain / scale), -8, 7) * scale
    assert error(w, nearest(w, 4)) < 0.8 * float(((naive - plain) ** 2).sum() / (plain**2).sum())
    assert error(w, nearest(w, 8)) < 5e-5
    zero = np.zeros((2, 64), np.float32)
    np.testing.assert_array_equal(nearest(zero, 4).values(), zero)


def test_rows_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("m", np.zeros((4, 40), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match="do not divide into blocks of 32"):
        blocks_of(GgufFile(tmp_path / "m.gguf"), "m")
