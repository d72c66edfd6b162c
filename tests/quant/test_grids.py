"""Block grids: the bytes written are what ggml reads, and the scales found are better than its plain ones."""

import gguf
import numpy as np
import pytest
import torch
from paceline.quant.grids import GRIDS, IQ4_NL, Q4_0, Grid, packed, rounded, scales


@pytest.mark.parametrize("name", GRIDS)
def test_packed_bytes_dequantise_to_the_rounded_values(name: str) -> None:
    torch.manual_seed(0)
    w, grid = torch.randn(24, 96), GRIDS[name]
    w[3, 32:64] = 0
    d = scales(w, grid)
    read = gguf.quants.dequantize(packed(w, d, grid), gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(np.asarray(read), rounded(w, d, grid).numpy())


@pytest.mark.parametrize("grid", [Q4_0, IQ4_NL], ids=lambda g: g.name)
def test_nearest_is_the_nearest(grid: Grid) -> None:
    x = torch.cat([torch.linspace(-140, 140, 20_001), torch.randn(5_000) * 40])
    table = grid.table()
    brute = (x[:, None] - table[None]).abs().min(1).values
    assert torch.allclose((grid.nearest(x) - x).abs(), brute, atol=1e-5)


def test_searched_scales_beat_ggmls_own_rounding() -> None:
    torch.manual_seed(1)
    w = torch.randn(64, 256)
    plain = gguf.quants.dequantize(
        gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType.Q4_0), gguf.GGMLQuantizationType.Q4_0
    )
    ours = rounded(w, scales(w, Q4_0), Q4_0)
    assert (ours - w).pow(2).sum() < 0.95 * float(((plain - w.numpy()) ** 2).sum())


def test_weights_on_the_grid_stay_where_they_are() -> None:
    torch.manual_seed(2)
    codes = torch.tensor(IQ4_NL.codes)[torch.randint(0, 16, (8, 64))].float()
    codes[:, 0], codes[:, 32] = -127, -127  # the peak fixes the scale
    w = codes * 0.001
    d = torch.full((8, 2), 0.001).half().float()
    assert torch.allclose(rounded(w, d, IQ4_NL), codes * d.repeat_interleave(32, 1))
