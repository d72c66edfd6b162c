"""Rounding with correction: each claim against the plain way."""

from pathlib import Path

import torch
from paceline.quant import decoder
from paceline.quant.grids import IQ4_NL, Q4_0, rounded, scales
from paceline.quant.prune import keep_neurons
from paceline.quant.reconstruct import Plan, Rebuilder
from paceline.quant.rounding import Inputs, moment, refit, second_order
from paceline.quant.target import open_target


def correlated(n: int, width: int) -> torch.Tensor:
    return torch.randn(n, width) @ torch.randn(width, width) / width**0.5


def test_second_order_loses_less_of_the_output_than_plain_rounding() -> None:
    torch.manual_seed(0)
    w, x = torch.randn(48, 64), correlated(2_000, 64)
    out, latent = second_order(w, Inputs(moment(x, x)), Q4_0)
    plain = rounded(w, scales(w, Q4_0), Q4_0)
    assert ((out - w) @ x.T).pow(2).sum() < 0.7 * ((plain - w) @ x.T).pow(2).sum()
    assert torch.equal(rounded(latent.value, latent.scales, Q4_0), out)


def test_a_sweep_of_coordinate_descent_loses_less_again() -> None:
    torch.manual_seed(0)
    w, x = torch.randn(48, 96), correlated(2_000, 96)
    inputs = Inputs(moment(x, x))
    once, refined = second_order(w, inputs, IQ4_NL, 0)[0], second_order(w, inputs, IQ4_NL, 2)
    assert ((refined[0] - w) @ x.T).pow(2).sum() < 0.95 * ((once - w) @ x.T).pow(2).sum()
    assert torch.equal(rounded(refined[1].value, refined[1].scales, IQ4_NL), refined[0])


def test_refit_makes_up_for_a_known_miss() -> None:
    torch.manual_seed(1)
    w, x, change = torch.randn(8, 32), correlated(500, 32), torch.randn(8, 32)
    assert torch.allclose(refit(w, Inputs(moment(x, x), damp=1e-9), moment(x, x @ change.T)), w + change, atol=1e-2)


def test_the_neurons_kept_are_those_that_carry_the_output() -> None:
    torch.manual_seed(2)
    down, x = torch.randn(16, 40), torch.randn(400, 40)
    x[:, 7] = x[:, 3]  # one of a pair of twins is free to lose
    down[:, [5, 11]] = 1e-4  # and these say nothing
    kept = keep_neurons(down, x, 37, damp=1e-4).tolist()
    assert 5 not in kept
    assert 11 not in kept
    assert len({3, 7} & set(kept)) == 1


def drift(target_path: Path, strength: float, drop: int | None = None) -> float:
    target = open_target(target_path)
    torch.manual_seed(3)
    tokens = torch.randint(0, 200, (24, 48))
    stream = decoder.embed(target.shape, target.tensor(decoder.EMBEDDING), tokens)
    walk = Rebuilder(target.shape, Plan(Q4_0, strength), stream, stream.clone())
    to = iter(range(99))
    for i in range(target.shape.layers):
        w = {n: target.tensor(n) for n in target.names() if n.startswith(f"blk.{i}.")}
        walk.layer(i, w, None if i == drop else next(to))
    return walk.drift()


def test_correction_keeps_the_stream_nearer_to_the_targets(tiny: Path) -> None:
    assert drift(tiny, 0.9) < 0.8 * drift(tiny, 0.0)


def test_later_layers_make_up_for_a_dropped_one(tiny: Path) -> None:
    assert drift(tiny, 0.9, drop=1) < 0.9 * drift(tiny, 0.0, drop=1)
