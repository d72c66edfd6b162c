"""The claim on real models: agent, draft, sessions, scheduler and engine together write what the target alone writes.

Everything but the network is real; time is virtual, so that a link of 25 ms costs nothing to wait for. What it is held
against comes from `plain_llama`, which shares no line with the engine. There is no exception on the CPU: not a token
may differ. The benchmark `order` shows that without the order of cells some do.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline.cloud.engines.llamacpp import LlamaEngine
from paceline.edge.drafts.files import FileDraft, open_draft
from paceline.edge.generation import Generation
from paceline.edge.text import Text
from paceline.protocol.sampling import Sampling
from paceline.scripts.lab.virtual import run
from plain_llama import PlainModel
from rig import Verifier, agent_of, answer

GREEDY = Sampling()
SEEDED = Sampling(seed=20, temperature=0.8)
FILTERED = Sampling(seed=3, temperature=1.0, top_k=60, top_p=0.92, min_p=0.02)
PENALISED = Sampling(
    seed=4, temperature=0.8, repetition_penalty=1.15, presence_penalty=0.4, frequency_penalty=0.3,
    logit_bias=((28, -3.0), (260, 1.0)),
)  # fmt: skip
OWN = {
    "why is the sky blue": GREEDY,
    "Write a haiku about a slow river.": SEEDED,
    "List three uses for an old newspaper.": FILTERED,
    "Tell me about Ada Lovelace.": PENALISED,
}


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> Iterator[PlainModel]:
    model = PlainModel(smollm2_path, 2048)
    yield model
    model.close()


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[LlamaEngine]:
    made = LlamaEngine(smollm2_path, threads=1)
    made.step_cost = [(1, 0.03), (8, 0.033)]  # and a step what the floor says, however busy this machine is
    yield made
    made.shut()


@pytest.fixture(scope="module")
def text(smollm2_path: Path) -> Text:
    return Text(smollm2_path)


@pytest.fixture(scope="module", params=["llamacpp", "onnx"])
def draft(request: pytest.FixtureRequest, text: Text) -> Iterator[FileDraft]:
    name = {"llamacpp": "smollm2_draft_path", "onnx": "smollm2_onnx_path"}[request.param]
    if request.param == "onnx":
        pytest.importorskip("onnxruntime")
    made = open_draft(request.getfixturevalue(name), text.vocabulary, threads=1)
    made.step_cost = [(1, 0.005), (2, 0.0055), (8, 0.0085)]  # in virtual time it costs what `draft_runner` says
    yield made
    made.shut()


def speculate(
    engine: LlamaEngine,
    draft: FileDraft,
    prompts: list[list[int]],
    sampling: Sampling,
    count: int,
    stop: tuple[int, ...],
) -> list[tuple[list[int], Generation, int]]:
    """Per prompt, answered side by side in pairs: tokens, what happened, bytes up a token of the whole run."""

    async def main() -> list[tuple[list[int], Generation, int]]:
        verifier, made = Verifier(engine), list[Generation]()
        out = []
        async with agent_of(verifier, draft, rtt=0.025) as agent:
            for i in range(0, len(prompts), 2):
                some = (
                    answer(agent, p, sampling, count, stop_ids=stop, report=made.append) for p in prompts[i : i + 2]
                )
                out += await asyncio.gather(*some)
            total = sum(map(len, out))
            up = agent.link.traffic.up // total
        verifier.stepping.cancel()
        return [(tokens, generation, up) for tokens, generation in zip(out, made, strict=True)]

    return run(main())


@pytest.mark.parametrize("question", OWN)
def test_the_text_is_what_the_target_writes_alone(
    question: str, plain: PlainModel, engine: LlamaEngine, draft: FileDraft, text: Text
) -> None:
    prompt, sampling = text.prompt([{"role": "user", "content": question}]), OWN[question]
    expected, _ = plain.text(prompt, sampling, 40, text.end_tokens)
    ((tokens, generation, _),) = speculate(engine, draft, [prompt], sampling, 40, text.end_tokens)
    assert tokens == expected
    assert generation.figures.accepted > len(tokens) // 8  # it did speculate
    assert generation.figures.drafted > generation.figures.accepted


def benchmark_prompts() -> list[str]:
    path = os.environ.get("PACELINE_PROMPTS")
    if not path:
        pytest.skip("name a file of prompts, one JSON object with `turns` a line, in PACELINE_PROMPTS")
    lines = Path(path).read_text().splitlines()
    step = max(len(lines) // 40, 1)
    return [json.loads(line)["turns"][0] for line in lines[::step]][:40]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "sampling", [GREEDY, SEEDED, FILTERED, PENALISED], ids=["greedy", "seeded", "filtered", "penalised"]
)
def test_forty_benchmark_prompts(
    sampling: Sampling, plain: PlainModel, engine: LlamaEngine, draft: FileDraft, text: Text
) -> None:
    questions = benchmark_prompts()
    prompts = [text.prompt([{"role": "user", "content": q}])[-160:] for q in questions]
    assert len(prompts) == 40
    ours = speculate(engine, draft, prompts, sampling, 48, text.end_tokens)
    different = []
    for question, prompt, (tokens, _, _) in zip(questions, prompts, ours, strict=True):
        expected, _ = plain.text(prompt, sampling, 48, text.end_tokens)
        if tokens != expected:
            different.append(question)
    total = sum(len(tokens) for tokens, _, _ in ours)
    accepted = sum(g.figures.accepted for _, g, _ in ours)
    print(f"\n{total} tokens, {accepted} of them drafted, {ours[0][2]} bytes up a token, {len(different)} texts differ")
    assert not different
    assert accepted > total // 5
