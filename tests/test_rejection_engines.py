"""The rule `rejection` on engines with real forwards: steps that mix sessions with draws and without, and what they choose."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from paceline.cloud.engine import Engine, Work
from paceline.cloud.engines.llamacpp import LlamaEngine
from paceline.protocol.cloud_session import Plan, Walk
from paceline.protocol.proposal import Proposal, draws
from paceline.protocol.sampling import Sampling
from small_models import write_folder
from test_rejection import fits

KEPT = 4  # top-k: so many tokens there are to choose from


def top(engine: Engine, prompt: Sequence[int]) -> tuple[list[int], npt.NDArray[np.float64]]:
    """The KEPT likeliest tokens after a prompt and their probabilities among each other, as the engine reports them."""
    handle = engine.open(prompt)
    [walk] = engine.verify([Work(handle, tuple(prompt)[engine.length(handle) :], Plan(), Sampling(), logprobs=KEPT)])
    engine.close(handle)
    assert isinstance(walk, Walk)
    ids, logp = zip(*walk.logprobs[0][1:], strict=True)
    p = np.exp(np.array(logp))
    return list(ids), p / p.sum()


def plan_of(ids: Sequence[int], random: np.random.Generator) -> Plan:
    """Two of three tokens, drawn without replacement from a q of its own, and a picked child below the first."""
    counts = np.array([1, 4, 5])
    support = (ids[1], ids[2], 7)  # one that the filter rules out
    first, second = random.choice(3, 2, replace=False, p=counts / counts.sum())
    drawn = (support[first], support[second])
    family = draws(drawn, Proposal(2, support, bytes(counts.tolist())))
    return Plan((1, 2, 3), (drawn[0], 11, drawn[1]), (-1, 0, -1), draws=(family[0], None, family[1]))


def first_tokens(engine: Engine, prompt: Sequence[int], count: int) -> tuple[Counter[int], int]:
    """What is chosen first, for as many seeds, beside a session without draws; and how often a draw was accepted."""
    ids, _ = top(engine, prompt)
    random, seen, accepted = np.random.default_rng(3), Counter[int](), 0
    for seed in range(count):
        handles = [engine.open(prompt), engine.open(prompt)]
        params = Sampling(seed=seed, temperature=1.0, top_k=KEPT)
        news = [tuple(prompt)[engine.length(h) :] for h in handles]
        plan = plan_of(ids, random)
        beside, walk = engine.verify(
            [Work(handles[0], news[0], Plan((1,), (ids[0],), (-1,)), params), Work(handles[1], news[1], plan, params)]
        )
        assert isinstance(beside, Walk)
        assert isinstance(walk, Walk)
        path = [*(plan.tokens[i] for i in walk.accepted), walk.token]
        assert engine.length(handles[1]) <= len(prompt) + len(walk.accepted)
        seen[path[0]] += 1
        accepted += bool(walk.accepted)
        for handle in handles:
            engine.close(handle)
    return seen, accepted


def demand_the_targets_distribution(engine: Engine, prompt: Sequence[int], count: int) -> None:
    ids, p = top(engine, prompt)
    seen, accepted = first_tokens(engine, prompt, count)
    assert getattr(engine, "rejects", False)
    assert set(seen) <= set(ids)
    assert count / 20 < accepted < count
    assert fits(np.array([float(seen[i]) for i in ids]), p)


def test_torch(tmp_path: Path) -> None:
    from paceline.cloud.torch_target import Options, bring_up

    folder = write_folder(tmp_path / "model", "llama3")
    engine = bring_up(folder, Options(device="cpu", free_width=0, cache_bytes=2**22, exact=True))
    demand_the_targets_distribution(engine, [3, 14, 15, 92, 65, 35], 600)


def test_llamacpp(smollm2_path: Path) -> None:
    engine = LlamaEngine(smollm2_path, context=64, slots=2, threads=1)
    try:
        demand_the_targets_distribution(engine, [1, 504, 3575, 282], 120)
    finally:
        engine.shut()
