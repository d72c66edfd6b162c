"""Weights of four and eight bits: near the dense product, smaller, and exact where exact mode asks for it."""

import random
from pathlib import Path

import pytest
import torch
from paceline.cloud.product import Dense
from paceline.cloud.quantised import SCHEMES, quantiser
from paceline.cloud.torch_target import Options, bring_up
from paceline.protocol.errors import EngineError
from paceline.protocol.sampling import Sampling
from small_models import write_folder
from trees import generate

CPU = torch.device("cpu")


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    if request.param != "w4":
        pytest.importorskip("bitsandbytes")
    return str(request.param)


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_products_are_near_the_dense_one(scheme: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(96, 128, generator=generator), torch.randn(96, generator=generator)
    x = torch.randn(rows, 128, generator=generator)
    dense = Dense(weight, bias)(x)
    error = (quantiser(scheme, CPU, False)(weight, bias)(x) - dense).square().mean() / dense.square().mean()
    limit = {"nf4": 0.02, "int8": 0.001, "w4": 0.02}[scheme]
    assert 0 < error < limit


def test_exact_products_give_a_row_the_same_bits(scheme: str) -> None:
    generator = torch.Generator().manual_seed(1)
    product = quantiser(scheme, CPU, True)(torch.randn(96, 128, generator=generator), None)
    x = torch.randn(37, 128, generator=generator)
    whole = product(x)
    assert all(torch.equal(product(row[None])[0], out) for row, out in zip(x, whole, strict=True))


def test_a_quantised_target_speculates_exactly(scheme: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "qwen2", hidden_size=64, intermediate_size=128)
    options = Options(device="cpu", exact=True, quant=scheme, cache_bytes=2**22, free_width=0)
    engine, rng = bring_up(folder, options), random.Random(0)
    prompt, sampling = [rng.randrange(150) for _ in range(70)], Sampling(seed=2, temperature=0.8)
    plain = generate(engine, prompt, sampling, 10)
    assert generate(engine, prompt, sampling, 10, rng, plain, 8) == plain


def test_an_unknown_scheme_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match="q5"):
        quantiser("q5", CPU, False)
