"""The torch engine on a real model: in exact mode, drafted text is bit by bit what the same engine writes one token a step."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline.cloud.engines.torch import TorchEngine
from paceline.cloud.torch_target import Options, bring_up
from paceline.edge.drafts.llamacpp import LlamaDraft
from paceline.edge.generation import Generation
from paceline.edge.text import Text
from paceline.protocol.sampling import Sampling
from paceline.scripts.lab.virtual import run
from rig import Verifier, agent_of, answer
from test_real_exactness import FILTERED, GREEDY, PENALISED, SEEDED, benchmark_prompts


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> TorchEngine:
    return bring_up(smollm2_path, Options(device="cpu", exact=True, cache_bytes=2**28, free_width=4))


@pytest.fixture(scope="module")
def text(smollm2_path: Path) -> Text:
    return Text(smollm2_path)


@pytest.fixture(scope="module")
def draft(smollm2_draft_path: Path, text: Text) -> Iterator[LlamaDraft]:
    made = LlamaDraft(smollm2_draft_path, text.vocabulary, threads=1)
    made.step_cost = [(1, 0.005), (2, 0.0055), (8, 0.0085)]  # in virtual time it costs what `draft_runner` says
    yield made
    made.shut()


def write(
    engine: TorchEngine,
    draft: LlamaDraft | None,
    prompt: list[int],
    sampling: Sampling,
    count: int,
    stop: tuple[int, ...],
) -> tuple[list[int], Generation]:
    """One answer, in virtual time; without a draft it takes a step a token."""

    async def main() -> tuple[list[int], Generation]:
        verifier, made = Verifier(engine), list[Generation]()
        async with agent_of(verifier, draft, rtt=0.025, name="stream" if draft else "ar") as agent:
            out = await answer(agent, prompt, sampling, count, stop_ids=stop, report=made.append)
        verifier.stepping.cancel()
        return out, made[0]

    return run(main())


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_drafted_text_is_plain_text(engine: TorchEngine, draft: LlamaDraft, text: Text, sampling: Sampling) -> None:
    prompt = text.prompt([{"role": "user", "content": "Why is the sky blue?"}])
    expected, alone = write(engine, None, prompt, sampling, 24, text.end_tokens)
    tokens, generation = write(engine, draft, prompt, sampling, 24, text.end_tokens)
    assert tokens == expected
    assert alone.figures.steps == len(expected)
    assert generation.figures.accepted > len(tokens) // 8


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "sampling", [GREEDY, SEEDED, FILTERED, PENALISED], ids=["greedy", "seeded", "filtered", "penalised"]
)
def test_forty_benchmark_prompts(engine: TorchEngine, draft: LlamaDraft, text: Text, sampling: Sampling) -> None:
    prompts = [text.prompt([{"role": "user", "content": q}])[-160:] for q in benchmark_prompts()]
    total, accepted, different = 0, 0, 0
    for prompt in prompts:
        expected, _ = write(engine, None, prompt, sampling, 48, text.end_tokens)
        tokens, generation = write(engine, draft, prompt, sampling, 48, text.end_tokens)
        total, accepted = total + len(tokens), accepted + generation.figures.accepted
        different += tokens != expected
    print(f"\n{total} tokens, {accepted} of them drafted, {different} texts differ")
    assert not different
    assert accepted > total // 5
