"""The torch references of the kernels against slow obvious code: NumPy's choices, dense attention, arithmetic by hand."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import attention_case, choice_case, naive_attention
from paceline.kernels import attention, gate, philox, product4, rotary
from paceline.kernels.choice import walk
from paceline.kernels.layout import pack_bits
from paceline.kernels.norm import add_rms_norm, rms_norm
from paceline.protocol import philox as numpy_philox
from paceline.protocol.sampling import choose

CPU = torch.device("cpu")
VECTORS = json.loads((Path(__file__).parent / "vectors" / "philox_gumbel.json").read_text())
SEEDS = [(0, 0), (1, 2), (2**63 - 1, 2**40 + 7), (123456789012345, 77)]


@pytest.mark.parametrize(("seed", "position"), SEEDS)
def test_noise_is_that_of_the_protocol(seed: int, position: int) -> None:
    ids = np.concatenate((np.arange(4099), [2**31 - 1, 262143]))
    of = (torch.tensor(seed), torch.tensor(position), torch.from_numpy(ids))
    assert (philox.words(*of).numpy() == numpy_philox.words(seed, position, ids)).all()
    np.testing.assert_allclose(philox.gumbel(*of).numpy(), numpy_philox.gumbel(seed, position, ids), rtol=0, atol=2e-15)


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda c: f"{c['seed']}-{c['position']}")
def test_noise_is_that_of_the_vectors(case: dict[str, Any]) -> None:
    seed, position = torch.tensor(case["seed"]), torch.tensor(case["position"])
    tokens = torch.tensor(case["tokens"])
    assert philox.words(seed, position, tokens).tolist() == case["words"]
    np.testing.assert_allclose(philox.gumbel(seed, position, tokens).numpy(), case["gumbel"], rtol=0, atol=4e-15)
    quick = -philox.minus_all_gumbel(seed[None], position[None], 1024)[0]
    low = tokens < 1024
    np.testing.assert_allclose(quick[tokens[low]].numpy(), np.array(case["gumbel"])[low.numpy()], rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [0, 5, 70])
@pytest.mark.parametrize("case", range(8))
def test_attention_is_the_naive_sum(case: int, window: int) -> None:
    c = attention_case(case, torch.float32)
    plain = attention.attend(c.q, c.keys, c.values, attention.see(c.layout, frozenset({window}), CPU), window, 0.3)
    lined_up = attention.line_up(c.layout, frozenset({window}), CPU)
    exact = attention.attend_exact(c.q, c.keys, c.values, lined_up, window, 0.3) if c.in_order else plain
    expected = naive_attention(c, window, 0.3)
    torch.testing.assert_close(plain, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_walks_choose_as_numpy_does(seed: int) -> None:
    logits, forest, choices, histories = choice_case(seed)
    paths = walk(logits, forest, choices)
    for s, params in enumerate(choices.params):
        here = int(forest.roots[s])
        for k in range(int(paths.count[s])):
            assert int(paths.rows[s, k]) == here
            token = choose(logits[here].numpy(), params, int(forest.positions[here]), histories[here])
            below = [i for i in range(len(logits)) if int(forest.parents[i]) == here and int(forest.tokens[i]) == token]
            if not below:
                break
            here = below[0]
        assert k == int(paths.count[s]) - 1
        assert int(paths.token[s]) == token
        assert bool(paths.finite[s])


@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_told_from_the_others(damage: float) -> None:
    logits, forest, choices, _ = choice_case(1)
    bad = int(forest.roots[1])
    logits[bad, 3] = damage
    finite = walk(logits, forest, choices).finite
    assert not finite[1]
    assert finite[torch.arange(len(finite)) != 1].all()


def test_rms_norm_is_its_formula() -> None:
    x, w = torch.randn(3, 10, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w
    torch.testing.assert_close(rms_norm(x.float(), w.float(), 1e-5), expected.float())
    total, normed = add_rms_norm(x.float(), x.float(), w.float(), 1e-5)
    torch.testing.assert_close(total, 2 * x.float())
    torch.testing.assert_close(normed, rms_norm(2 * x.float(), w.float(), 1e-5))


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    turns = rotary.table(1.0 / 10000 ** (torch.arange(8) / 8), 200)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def product(i: int, j: int) -> float:
        return float((rotary.rotate(q, turns[i : i + 1]) * rotary.rotate(k, turns[j : j + 1])).sum())

    assert product(5, 3) == pytest.approx(product(150, 148), abs=1e-4)
    assert product(5, 3) != pytest.approx(product(5, 4), abs=1e-3)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("width", [96, 100])
def test_exact_gate_gives_a_row_the_same_bits_anywhere(width: int, gelu: bool) -> None:
    x = torch.randn(777, 2 * width)
    whole = gate.gate_exact(x, gelu)
    torch.testing.assert_close(whole, gate.gate(x, gelu))
    for row in (0, 1, 400, 776):
        assert torch.equal(gate.gate_exact(x[row : row + 1], gelu)[0], whole[row])


def test_packed_masks_hold_each_bit() -> None:
    mask = np.random.default_rng(0).random((7, 75)) < 0.5
    packed = pack_bits(mask, 3)
    for r, e in random.Random(0).choices([(r, e) for r in range(7) for e in range(75)], k=100):
        assert bool((int(packed[r, e // 32]) >> (e % 32)) & 1) == mask[r, e]


def test_four_bits_round_to_the_nearest_level() -> None:
    weight = torch.randn(24, 192)
    back = product4.unpack(product4.pack(weight))
    step = (weight.view(24, 3, 64).amax(-1) - weight.view(24, 3, 64).amin(-1)) / 15
    assert ((back - weight).view(24, 3, 64).abs() <= step[..., None] / 2 + 1e-6).all()
    torch.testing.assert_close(product4.unpack(product4.pack(back)), back, rtol=1e-5, atol=1e-5)
    assert torch.equal(product4.unpack(product4.pack(torch.full((2, 64), 3.0))), torch.full((2, 64), 3.0))
