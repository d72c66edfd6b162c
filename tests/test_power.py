"""Energy: a draft that becomes slower is noticed and planned with, and low power runs the rows that become text."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from paceline.cloud.engines.toy import ToyEngine
from paceline.edge.agent import Agent
from paceline.edge.delay import DelayedChannel
from paceline.edge.draft import Extended
from paceline.edge.policies import policy, with_power
from paceline.edge.predictor import Predictor
from paceline.protocol.channel import Channel
from paceline.protocol.cost import StepCost
from paceline.protocol.errors import PacelineError
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling
from paceline.scripts.lab.virtual import run
from rig import Verifier, plain
from toy_draft import ToyDraft

PROMPT = (3, 1, 4, 1, 5)
COOL, HOT = 0.004, 0.080  # seconds of a row


@dataclass
class Device:
    """Runs draft steps at a cost that may change, as of a CPU that is slowed down when it is hot; notes every step."""

    row: float = COOL
    steps: list[tuple[float, int]] = field(default_factory=list)  # when it began, rows

    async def __call__(self, work: Callable[[], Extended]) -> Extended:
        done = work()
        if done.ran:
            self.steps.append((asyncio.get_running_loop().time(), done.ran))
            await asyncio.sleep(self.row * (1 + 0.1 * (done.ran - 1)))
        return done

    def rows(self, begin: float, end: float) -> int:
        return sum(rows for at, rows in self.steps if begin <= at < end)


def agent_on(device: Device, verifier: Verifier, draft: ToyDraft, name: str = "stream") -> Agent:
    async def connect() -> Channel:
        return DelayedChannel(await verifier.connect(), 0.05)

    return Agent(
        connect, draft.vocabulary, policy(name), draft, Predictor(), device,
        clock=asyncio.get_running_loop().time, random=Random(0),
    )  # fmt: skip


def test_a_draft_that_is_slowed_down_is_planned_with_as_it_is() -> None:
    """Cool, hot, cool again, in one answer: the cost is re-measured, fewer rows are run while it is hot, and more again.

    Without the text's repeats: the toy's are so many that it would be over before a second row was tried.
    """

    async def talk() -> None:
        verifier, device = Verifier(), Device()
        loop, marks, costs = asyncio.get_running_loop(), list[float](), list[float]()
        draft = ToyDraft(verifier.engine, noise=0.3)  # type: ignore[arg-type]
        async with agent_on(device, verifier, draft, "stream:repeats=0") as agent:
            tokens: list[int] = []
            async for event in agent.generate(GenerationRequest(PROMPT, Sampling(), 900)):
                tokens.extend(event.tokens)
                if len(tokens) >= 300 * (len(marks) + 1):
                    marks.append(loop.time())
                    costs.append(agent.drafter.cost(1))
                    device.row = HOT if len(marks) == 1 else COOL
        engine = ToyEngine()
        assert tokens == plain(engine, PROMPT, Sampling(), 900)
        cool, hot, again = costs[:3]
        assert hot > 5 * cool
        assert again < 2 * cool
        spans = list(pairwise([0.0, *marks]))
        used = [device.rows(begin, end) / 300 for begin, end in spans]  # rows a token
        assert used[1] < 0.5 * used[0]
        assert used[2] > 2 * used[1]
        await verifier.stop()

    run(talk())


@pytest.mark.parametrize("noise", [0.3, 0.8])
def test_low_power_runs_fewer_rows_and_more_of_them_become_text(noise: float) -> None:
    async def talk(name: str) -> tuple[list[int], int, int]:
        verifier, device, made = Verifier(), Device(), []
        async with agent_on(device, verifier, ToyDraft(verifier.engine, noise=noise), name) as agent:  # type: ignore[arg-type]
            tokens: list[int] = []
            async for event in agent.generate(GenerationRequest(PROMPT, Sampling(), 400), made.append):
                tokens.extend(event.tokens)
        figures = made[0].figures
        await verifier.stop()
        return tokens, figures.rows, figures.accepted

    full, low = run(talk("stream")), run(talk(with_power("stream", "low")))
    assert full[0] == low[0] == plain(ToyEngine(), PROMPT, Sampling(), 400)
    assert low[1] < 0.7 * full[1]
    assert low[2] / low[1] > full[2] / full[1]


def test_power_is_a_word_for_a_policy() -> None:
    assert with_power("stream", "full") == "stream"
    assert policy(with_power("stream:width=4", "low")).thrift > 0
    assert with_power("ar", "low") == "ar"
    for name, power, said in (
        ("stream", "medium", "full and low"),
        ("sync", "low", "rows of its rounds"),
        ("stream:thrift=100", "full", "percentage"),
    ):
        with pytest.raises(PacelineError, match=said):
            with_power(name, power)


def test_one_slow_step_is_a_hiccup_and_three_are_a_machine_that_is_slower() -> None:
    def after(*seconds: float) -> float:
        cost = StepCost([(1, 0.01), (2, 0.01), (4, 0.01), (8, 0.01)])
        for _ in range(60):
            cost.learn(1, 0.01)
        for s in seconds:
            cost.learn(1, s)
        return cost(1)

    assert after(0.1) < 0.0125
    assert after(0.1, 0.01, 0.1, 0.01) < 0.015
    assert after(*[0.1] * 10) > 0.05
    assert after(*[0.001] * 10) < 0.006
    assert 0.01 < after(*[0.01, 0.04] * 30) < 0.04  # two kinds of steps: between them
