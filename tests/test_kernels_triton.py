"""The Triton kernels against their torch references: compiled where there is a CUDA device, else in Triton's interpreter."""

import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about infinities, in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from kernel_cases import attention_case, attention_share, choice_case, naive_attention  # noqa: E402
from paceline.cloud.batch import lay_out  # noqa: E402
from paceline.cloud.engines.torch import TorchEngine  # noqa: E402
from paceline.cloud.graphs import bucket  # noqa: E402
from paceline.cloud.torch_target import Options, bring_up  # noqa: E402
from paceline.cloud.witness import row_logits  # noqa: E402
from paceline.kernels import (  # noqa: E402
    attention_triton,
    candidates,
    candidates_triton,
    choice,
    choice_triton,
    gate,
    gate_triton,
    norm,
    norm_triton,
    product4,
    product4_triton,
    rotary,
    rotary_triton,
    suite,
)
from paceline.kernels.choice import Adjustment, Choices, Forest  # noqa: E402
from paceline.kernels.layout import PAGE, prefix_slots  # noqa: E402
from paceline.protocol.cloud_session import Plan  # noqa: E402
from paceline.protocol.sampling import Sampling  # noqa: E402
from small_models import write_folder  # noqa: E402
from torch import Tensor  # noqa: E402
from trees import generate, random_plan  # noqa: E402

VECTORS = json.loads((Path(__file__).parent / "vectors" / "philox_gumbel.json").read_text())
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DOT_DTYPES = DTYPES if DEVICE == "cuda" else DTYPES[:2]  # the interpreter multiplies the bits of bfloat16 as integers
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(ours: Tensor, theirs: Tensor) -> None:
    limit = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.float(), theirs.float().to(ours.device), rtol=limit, atol=limit)


def there(x: Forest | Choices) -> Forest | Choices:
    """A forest, or choices, on the device."""
    if isinstance(x, Forest):
        return replace(x, **{k: v.to(DEVICE) for k, v in vars(x).items() if isinstance(v, Tensor)})
    if x.adjustment is None:
        return x
    return replace(x, adjustment=Adjustment(*(v.to(DEVICE) for v in vars(x.adjustment).values())))


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("case", range(8))
def test_attention(case: int, dtype: torch.dtype) -> None:
    c = attention_case(case, dtype, DEVICE)
    windows = (0, (5, 70)[case % 2]) if dtype == torch.float32 else (0,)
    plan = attention_triton.upload(c.layout, frozenset(windows), torch.device(DEVICE), exact=c.in_order, group=c.group)
    for window in windows:
        close(attention_triton.attend(c.q, c.keys, c.values, plan, window, 0.3), naive_attention(c, window, 0.3))


@pytest.mark.parametrize("run", [1, 2, 3])
def test_attention_in_runs_of_tiles(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    c = attention_case(7, torch.float32, DEVICE)
    monkeypatch.setattr(attention_triton, "EXACT_RUN", run)
    plan = attention_triton.upload(c.layout, frozenset(), torch.device(DEVICE), exact=False, group=c.group)
    whole = attention_triton.attend(c.q, c.keys, c.values, plan, 0, 0.3)
    close(attention_triton.attend(c.q, c.keys, c.values, replace(plan, exact=True), 0, 0.3)[:1], whole[:1])


@pytest.mark.parametrize("seed", [s if s % 2 == 0 else pytest.param(s, marks=pytest.mark.slow) for s in range(12)])
def test_walks(seed: int) -> None:
    logits, forest, choices, _ = choice_case(seed)
    theirs = choice.walk(logits, forest, choices)
    ours = choice_triton.walk(logits.to(DEVICE), there(forest), there(choices))  # type: ignore[arg-type]
    for name in ("rows", "count", "token", "finite"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda c: f"{c['seed']}-{c['position']}")
def test_noise_is_that_of_the_vectors(case: dict[str, Any]) -> None:
    """Of two tokens with the noise's difference between their logits, the choice flips as the difference passes zero."""
    tokens = [t for t in case["tokens"] if t < 4096][:2]
    a, b = (case["gumbel"][case["tokens"].index(t)] for t in tokens)
    forest = Forest(*(torch.zeros(1, dtype=torch.int64) for _ in range(5)), deepest=0)
    forest = replace(forest, parents=torch.tensor([-1]), positions=torch.tensor([case["position"]]))
    choices = Choices((Sampling(seed=case["seed"], temperature=1.0),))
    for nudge, winner in ((1e-4, tokens[0]), (-1e-4, tokens[1])):
        logits = torch.full((1, max(tokens) + 3), -100.0)
        logits[0, tokens[0]], logits[0, tokens[1]] = b - a + nudge, 0.0
        assert choice_triton.walk(logits.to(DEVICE), there(forest), choices).token.tolist() == [winner]  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
def test_rows_that_are_not_finite(damage: float) -> None:
    logits, forest, choices, _ = choice_case(1)
    logits[int(forest.roots[2]), 3] = damage
    ours = choice_triton.walk(logits.to(DEVICE), there(forest), there(choices))  # type: ignore[arg-type]
    assert ours.finite.tolist() == [True, True, False, True]


def test_choice_over_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_triton, "PIECE", 128)
    monkeypatch.setattr(choice_triton, "BLOCK", 128)
    for seed in (0, 9):
        test_walks(seed)


def test_thresholds_keep_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, -1.0, 0.0, 2.0, -5.0]], device=DEVICE)
    forest = Forest(*(torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(5)), deepest=0)
    for kept in ({"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}):
        params = Choices((Sampling(temperature=1.0, **kept),))  # type: ignore[arg-type]
        filters = choice_triton.parameters(params, torch.device(DEVICE)).filters
        assert filters is not None
        least = choice_triton.thresholds(logits, forest, filters)
        assert 1.0 < least.item() <= 2.0
        assert (logits >= least[:, None]).sum() == 4


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("vocabulary", "f"), [(203, 5), (9, 8), (5000, 4)])
def test_candidates(vocabulary: int, f: int, temperature: float) -> None:
    rows = 3
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    table = candidates.Calibration(torch.rand(f, 6, generator=generator), 1.5)
    seeds, positions = torch.tensor([1, 2**62 + 5, 3]), torch.tensor([0, 2**34, 9])
    heat = torch.full((rows,), temperature)
    theirs = candidates.candidates(logits, seeds, positions, heat, table)
    on = replace(table, chance=table.chance.to(DEVICE))
    ours = candidates_triton.candidates(*(t.to(DEVICE) for t in (logits, seeds, positions, heat)), on)
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    close(ours.log_q, theirs.log_q)
    assert ours.chance.tolist() == theirs.chance.tolist()


def test_candidates_of_equal_logits_are_the_lowest_ids() -> None:
    table = candidates.Calibration(torch.ones(4, 2, device=DEVICE), 1.0)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    ours = candidates_triton.candidates(
        torch.ones(1, 9000, device=DEVICE), zero, zero, torch.zeros(1, device=DEVICE), table
    )
    assert ours.tokens.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 576), (5, 100)])
def test_norms(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, delta = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[1])
    on = [t.to(DEVICE) for t in (x, delta, weight)]
    close(norm_triton.rms_norm(on[0], on[2], 1e-5), norm.rms_norm(x, weight, 1e-5))
    for ours, theirs in zip(
        norm_triton.add_rms_norm(*on, 1e-5), norm.add_rms_norm(x, delta, weight, 1e-5), strict=True
    ):
        close(ours, theirs)


def test_norm_of_heads_inside_a_wider_row() -> None:
    wide = torch.randn(3, 5 * 16)
    weight = torch.randn(16)
    heads = wide[:, 16:64].unflatten(-1, (3, 16))
    close(
        norm_triton.rms_norm(wide.to(DEVICE)[:, 16:64].unflatten(-1, (3, 16)), weight.to(DEVICE), 1e-6),
        norm.rms_norm(heads, weight, 1e-6),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 16), (3, 1, 24), (1, 1, 64)])
def test_rotation_and_write(heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> None:
    rows = 5
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * d).to(dtype)
    turns = rotary.table(1.0 / 10000 ** (torch.arange(d // 2) / (d // 2)), 100)
    positions, slots = torch.tensor([0, 1, 7, 99, 50]), torch.tensor([3, 70, 1, 0, 127])
    results = []
    for device, code in (("cpu", rotary.rotate_and_store), (DEVICE, rotary_triton.rotate_and_store)):
        parts = torch.split(qkv.to(device), [heads * d, kv_heads * d, kv_heads * d], dim=-1)
        q, k, v = (p.unflatten(-1, (-1, d)) for p in parts)
        keys, values = (torch.zeros(kv_heads, 128, d, dtype=dtype, device=device) for _ in range(2))
        out = code(q, k, v, turns.to(device), positions.to(device), slots.to(device), keys, values)
        results.append((out, keys, values))
    for theirs, ours in zip(*results, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
def test_gates(gelu: bool, dtype: torch.dtype) -> None:
    for rows, width in ((1, 96), (3, 1100)):
        x = (torch.randn(rows, 2 * width) * 3).to(dtype)
        close(gate_triton.gate(x.to(DEVICE), gelu), gate.gate(x, gelu))


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 64, 64), (5, 100, 192), (17, 70, 576), (64, 64, 128), (65, 64, 128)])
def test_products_with_four_bits(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    packed = product4.pack(torch.randn(n, k).to(dtype))
    x = (torch.randn(rows, k) / k**0.5).to(dtype)
    on = product4.Packed(*(t.to(DEVICE) for t in (packed.bits, packed.scale, packed.minimum)))
    close(product4_triton.product4(x.to(DEVICE), on), product4.product4(x, packed))


# ---- all together


def tiny(folder: Path, family: str, exact: bool) -> TorchEngine:
    """A decoder of one layer: the interpreter takes a second for what a GPU does in a microsecond."""
    kinds = {"layer_types": ["full_attention"]} if family == "gemma3" else {}
    write_folder(folder, family, num_hidden_layers=1, **kinds)
    return bring_up(folder, Options(device=DEVICE, dtype="float32", exact=exact, cache_bytes=2**20, free_width=0))


@pytest.mark.parametrize("family", ["gemma3", "qwen2"])
def test_a_decoder_on_triton_is_the_decoder_on_torch(family: str, tmp_path: Path) -> None:
    engine, rng = tiny(tmp_path, family, False), random.Random(0)
    sequences = [([rng.randrange(150) for _ in range(n)], random_plan(rng, 3, 150)) for n in (1, 4)]
    logits = []
    for kernels in (suite.reference(False), suite.triton(False, 2)):
        object.__setattr__(engine.decoder, "suite", kernels)
        logits.append(row_logits(engine, sequences, [0, 2]))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_exact_attention_gives_a_row_the_same_bits_in_a_tree_and_alone() -> None:
    """A path of nodes over a page's end, against the same tokens in a plain sequence whose cache holds the same keys."""
    plan = Plan(tuple(range(5)), (1, 2, 3, 4, 5), (-1, -1, 0, 2, 1))  # 0, 2, 3 is the path
    tree, line = attention_share(62, 1, plan), attention_share(62, 4, Plan())
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 64 * 4, 16, generator=generator) for _ in range(2))
    q = torch.randn(6, 2, 16, generator=generator)
    there, here = tree.slots()[[0, 1, 3, 4]], line.slots()
    for cache in (keys, values):
        kept = cache[:, there].clone()
        cache[:, here + 2 * PAGE] = kept  # the plain sequence lies two pages further on, its last keys in order
        cache[:, 2 * PAGE : 2 * PAGE + 62] = cache[:, :62]
    rows = [0, 1, 3, 4]
    outs = []
    for share, asked, offset in ((tree, q, 0), (line, q[rows], 2)):
        moved = replace(share, pages=share.pages + offset)
        layout = lay_out([moved], True).layout
        on = attention_triton.upload(layout, frozenset(), torch.device(DEVICE), exact=True, group=2)
        outs.append(attention_triton.attend(*(t.to(DEVICE) for t in (asked, keys, values)), on, 0, 0.3))
    assert torch.equal(outs[0][rows], outs[1])


def test_exact_speculation_on_triton_is_plain_text(tmp_path: Path) -> None:
    engine, rng = tiny(tmp_path, "smollm2", True), random.Random(3)
    object.__setattr__(engine.decoder, "suite", suite.triton(True, 4))
    prompt, sampling = [5, 6, 7], Sampling(seed=1, temperature=0.9, top_p=0.95)
    plain = generate(engine, prompt, sampling, 3)
    assert generate(engine, prompt, sampling, 3, rng, plain, 3) == plain


@pytest.mark.parametrize("case", [0, 2, 5])
def test_a_plan_padded_to_a_bucket_means_the_same(case: int) -> None:
    c = attention_case(case, torch.float32, DEVICE)
    sizes = bucket(c.layout, c.group, c.in_order)
    assert sizes is not None
    flat = torch.from_numpy(attention_triton.tables(c.layout, sizes, c.group, c.in_order)).to(DEVICE)
    padded = torch.cat((c.q, c.q.new_zeros(sizes.rows - len(c.q), *c.q.shape[1:])))
    plan = attention_triton.plan_over(flat, sizes, c.in_order)
    ours = attention_triton.attend(padded, c.keys, c.values, plan, 0, 0.3)[: len(c.q)]
    close(ours, naive_attention(c, 0, 0.3))


def test_a_long_text_with_trees_of_every_size_meets_a_few_shapes() -> None:
    """What is captured once is replayed: 600 steps of as many natural shapes fall into a dozen buckets."""
    rng, natural, buckets = random.Random(1), set(), set()
    for length in range(10, 1210, 2):
        plan = random_plan(rng, rng.randrange(16), 50)
        layout = lay_out([attention_share(length, 1, plan)], False).layout
        natural.add(attention_triton.natural_sizes(layout, 4, False))
        sizes = bucket(layout, 4, False)
        assert sizes is not None
        assert sizes.rows >= layout.rows
        buckets.add(sizes)
    assert len(natural) > 150
    assert len(buckets) <= 16


def test_steps_too_large_for_every_bucket_have_none() -> None:
    share = attention_share(0, 300, Plan())
    assert bucket(lay_out([share], False).layout, 1, False) is None


def test_what_an_unused_slot_holds_does_not_matter() -> None:
    """The rest of a sequence's last page may hold what a broken session left there."""
    c = attention_case(2, torch.float32, DEVICE)
    plan = attention_triton.upload(c.layout, frozenset(), torch.device(DEVICE), exact=False, group=c.group)
    expected = naive_attention(c, 0, 0.3)
    used = torch.zeros(c.keys.shape[1], dtype=torch.bool)
    for block in c.layout.blocks:
        used[torch.from_numpy(np.concatenate((prefix_slots(block.pages, block.prefix), block.extra)))] = True
    for cache in (c.keys, c.values):
        cache[:, ~used.to(DEVICE)] = torch.nan
    close(attention_triton.attend(c.q, c.keys, c.values, plan, 0, 0.3), expected)
