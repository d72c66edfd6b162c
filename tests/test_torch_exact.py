"""Exact mode: a row's logits are the same bits alone, in a tree, and beside 64 sessions; so speculative text is plain text."""

import random
from pathlib import Path

import pytest
import torch
from paceline.cloud.engines.torch import TorchEngine
from paceline.cloud.product import HEIGHTS, Tiled, agreeing_heights, tiles
from paceline.cloud.torch_target import Options, bring_up
from paceline.cloud.witness import demand_exactness, row_logits
from paceline.protocol.cloud_session import Plan
from paceline.protocol.errors import EngineError
from paceline.protocol.sampling import Sampling
from small_models import write_folder
from trees import generate, random_plan

SAMPLINGS = [
    Sampling(),
    Sampling(seed=11, temperature=0.8),
    Sampling(seed=12, temperature=1.0, top_k=20, top_p=0.9, min_p=0.02),
    Sampling(seed=13, temperature=0.7, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.2),
    Sampling(seed=14, temperature=1.2, top_p=0.8, temperature_last=True, logit_bias=((3, 4.0), (7, -100.0))),
]


@pytest.fixture(scope="module", params=["llama3", "gemma3", "mistral"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    folder = write_folder(tmp_path_factory.mktemp(request.param), request.param)
    return bring_up(folder, Options(device="cpu", exact=True, cache_bytes=2**24, free_width=0, dtype="float32"))


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(150) for _ in range(count)]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_a_row_is_the_same_bits_alone_in_a_tree_and_beside_64_sessions(engine: TorchEngine, length: int) -> None:
    rng = random.Random(length)
    text, truth = words(rng, length), words(rng, 3)
    plan = random_plan(rng, 24, 150, truth)
    path = {(): -1} | {tuple(_path(plan, i)): i for i in range(24)}
    others = [(words(rng, rng.randint(1, 90)), random_plan(rng, rng.randint(0, 9), 150)) for _ in range(63)]
    tree = row_logits(engine, [(text, plan)], [length - 1])
    beside = row_logits(engine, [*others[:40], (text, plan), *others[40:]], [0] * 40 + [length // 2] + [0] * 23)
    first = sum(1 + len(p.tokens) for _, p in others[:40])
    assert torch.equal(tree, beside[first : first + 25])
    for tokens, node in list(path.items())[:8]:
        sequence = text + list(tokens)
        alone = row_logits(engine, [(sequence, Plan())], [len(sequence) - 1])[0]
        whole = row_logits(engine, [(sequence, Plan())], [0])[0]
        assert torch.equal(alone, tree[node + 1])
        assert torch.equal(whole, tree[node + 1])


def _path(plan: Plan, node: int) -> list[int]:
    return [] if node < 0 else [*_path(plan, plan.parents[node]), plan.tokens[node]]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_speculative_text_is_plain_text(engine: TorchEngine, sampling: Sampling) -> None:
    rng = random.Random(5)
    prompt = words(rng, 70)
    plain = generate(engine, prompt, sampling, 40)
    for nodes in (1, 6, 20):
        assert generate(engine, prompt, sampling, 40, rng, plain, nodes) == plain


def test_trees_do_get_accepted(engine: TorchEngine) -> None:
    """The test above shows nothing if every draft is refused."""
    prompt = words(random.Random(6), 20)
    plain = generate(engine, prompt, Sampling(), 12)
    handle = engine.open(prompt)
    chain = Plan(tuple(range(8)), tuple(plain[:8]), tuple(range(-1, 7)))
    from paceline.cloud.engine import Work
    from paceline.protocol.cloud_session import Walk

    walk = engine.verify([Work(handle, tuple(prompt), chain, Sampling())])[0]
    engine.close(handle)
    assert isinstance(walk, Walk)
    assert walk.accepted == tuple(range(8))
    assert walk.token == plain[8]


def test_without_exact_mode_the_same_rows_do_differ(tmp_path: Path) -> None:
    """The control: if plain torch gave equal bits here, the tests above could not fail."""
    loose = bring_up(write_folder(tmp_path, "llama3"), Options(device="cpu", cache_bytes=2**24, free_width=0))
    rng = random.Random(1)
    text, plan = words(rng, 70), random_plan(rng, 24, 150)
    tree = row_logits(loose, [(text, plan)], [69])[0]
    alone = row_logits(loose, [(text, Plan())], [69])[0]
    assert not torch.equal(tree, alone)
    torch.testing.assert_close(tree, alone, rtol=1e-3, atol=1e-3)
    object.__setattr__(loose.decoder, "exact", False)
    with pytest.raises(EngineError, match="not exact"):
        demand_exactness(loose)


@pytest.mark.parametrize(
    ("rows", "cut"), [(1, [4]), (4, [4]), (5, [4, 4]), (9, [16]), (20, [16, 4]), (40, [64]), (150, [64, 64, 16, 4, 4])]
)
def test_tiles_cover_the_rows_with_little_left_over(rows: int, cut: list[int]) -> None:
    assert tiles(rows, (4, 16, 64)) == cut


def test_heights_agree_on_every_row_of_a_tile() -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(3))
    heights = agreeing_heights(weight)
    assert heights[0] == HEIGHTS[0]
    x = torch.randn(150, 64, generator=torch.Generator().manual_seed(4))
    product = Tiled(weight, None, heights)
    whole = product(x)
    assert torch.equal(whole, torch.cat([product(row[None]) for row in x]))
    torch.testing.assert_close(whole, x @ weight.T)


def test_smollm2_rows_are_the_same_bits(smollm2_path: Path) -> None:
    """At the real size: `bring_up` itself compares a row alone, in a tree and in a batch, and raises where they differ."""
    options = Options(device="cpu", exact=True, cache_bytes=2**27, free_width=0, context=512)
    engine = bring_up(smollm2_path, options)
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    plain = generate(engine, prompt, Sampling(seed=3, temperature=0.8), 12)
    again = generate(engine, prompt, Sampling(seed=3, temperature=0.8), 12, random.Random(2), plain, 6)
    assert again == plain
