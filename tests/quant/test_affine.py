"""Q4_K: the bytes are what ggml reads, and a matrix that lies on such a grid hardly changes."""

import gguf
import numpy as np
from paceline.quant.affine import q4_k

Q4_K, Q4_1 = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q4_1


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a - b) ** 2).sum() / (b**2).sum())


def test_ordinary_weights_come_back_to_four_bits() -> None:
    w = np.random.default_rng(0).standard_normal((16, 512)).astype(np.float32)
    back = gguf.quants.dequantize(q4_k(w), Q4_K)
    assert back.shape == w.shape
    assert relative(back, w) < 0.008


def test_weights_from_a_grid_with_offsets_hardly_change() -> None:
    w = np.random.default_rng(1).standard_normal((32, 768)).astype(np.float32) * 0.05
    on_grid = gguf.quants.dequantize(gguf.quants.quantize(w, Q4_1), Q4_1)
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    symmetric = gguf.quants.dequantize(gguf.quants.quantize(on_grid, q4_0), q4_0)
    kept = relative(gguf.quants.dequantize(q4_k(on_grid), Q4_K), on_grid)
    assert kept < 0.001
    assert kept < 0.1 * relative(symmetric, on_grid)


def test_empty_and_one_sided_blocks_are_well_defined() -> None:
    w = np.zeros((2, 256), np.float32)
    w[1] = np.linspace(0.5, 1.5, 256)
    back = gguf.quants.dequantize(q4_k(w), Q4_K)
    assert (back[0] == 0).all()
    assert np.abs(back[1] - w[1]).max() < 0.08
