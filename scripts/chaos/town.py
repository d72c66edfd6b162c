"""Verifiers and edges in virtual time, with hostile links between them: thousands of answers a minute of real time.

Everything but the links, the draft and the target is the real thing. Verifiers are killed without a word, drained and
started again empty; edges are restarted from what their state files would hold; their clocks jump.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from paceline.cloud.connection import Connection, House
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.scheduler import Scheduler
from paceline.edge.agent import Agent
from paceline.edge.generation import Generation
from paceline.edge.policies import policy
from paceline.edge.predictor import Predictor
from paceline.protocol.channel import Channel
from paceline.protocol.errors import PacelineError
from paceline.scripts.chaos.answers import Question, Tally
from paceline.scripts.chaos.guess import GuessingDraft
from paceline.scripts.chaos.wire import Faults, HostileChannel, Rates
from paceline.scripts.lab.virtual import MemoryChannel, draft_runner, run, run_engine

VERIFY_SECONDS = 0.03
FIRST_ROW, MORE_ROWS = 0.02, 0.002  # seconds of a draft step
PATIENCE_SECONDS = 900.0  # an answer that takes longer is lost


@dataclass(frozen=True)
class Plan:
    """A campaign. Intervals are mean virtual seconds between two of a kind, over the whole town; 0: never."""

    answers: int
    seed: int = 0
    edges: int = 6
    verifiers: int = 2
    rates: Rates = field(default_factory=Rates)
    kill_every: float = 4.0
    drain_every: float = 15.0
    restart_every: float = 10.0  # of an edge
    jump_every: float = 10.0  # of a clock, at either end


class Verifier:
    """One that can be killed: nothing of it is left then, and its edges see their links end."""

    def __init__(self, target: ToyEngine) -> None:
        self.target, self.down, self.leaving, self.clock_error = target, True, False, 0.0
        self.start()

    def start(self) -> None:
        loop = asyncio.get_running_loop()

        def clock() -> float:
            return loop.time() + self.clock_error

        self.scheduler = Scheduler(self.target, run_engine, clock, floor=VERIFY_SECONDS)
        own = self.target
        self.house = House(self.scheduler, own.name, own.vocabulary, own.context, clock=clock)
        self._tasks: list[asyncio.Task[None]] = [asyncio.create_task(self.scheduler.run())]
        self._ends: list[MemoryChannel] = []
        self.down = self.leaving = False

    def connect(self) -> Channel:
        if self.down or self.house.draining:
            raise ConnectionRefusedError("nobody listens")
        mine, other = MemoryChannel.pair()
        self._ends.append(other)
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(Connection(other, self.house).serve()))
        return mine

    async def kill(self) -> None:
        self.down = True
        for task in self._tasks:
            task.cancel()
        for end in self._ends:
            await end.close()

    async def drain(self, seconds: float) -> None:
        self.leaving = True
        self.house.drain(seconds)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.scheduler.idle.wait(), seconds)
        await self.kill()


class Town:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.random = plan, Random(plan.seed)
        self.faults, self.tally = Faults(Random(plan.seed + 1), plan.rates), Tally()
        self._targets = [ToyEngine() for _ in range(plan.verifiers)]
        self._verifiers: list[Verifier] = []
        self._asked = 0
        self._edges: list[Edge] = []

    async def live(self) -> None:
        """Ask until `plan.answers` were asked for, each of them answered or lost."""
        self._verifiers = [Verifier(target) for target in self._targets]
        self._edges = [Edge(self, i) for i in range(self.plan.edges)]
        trouble = [
            asyncio.create_task(self._now_and_then(every, act))
            for every, act in (
                (self.plan.kill_every, self._kill),
                (self.plan.drain_every, self._drain),
                (self.plan.restart_every, self._restart),
                (self.plan.jump_every, self._jump),
            )
            if every
        ]
        await asyncio.gather(*(edge.live() for edge in self._edges for _ in range(2)))
        for task in trouble:
            task.cancel()
            if task.done() and not task.cancelled():
                task.result()
        for edge in self._edges:
            await edge.kill()
        for verifier in self._verifiers:
            await verifier.kill()

    def next_question(self) -> Question | None:
        if self._asked >= self.plan.answers:
            return None
        self._asked += 1
        return Question.drawn(self.random, self._targets[0].vocabulary.size)

    async def connect(self, turn: int) -> Channel:
        await asyncio.sleep(0.01)
        inner = self._verifiers[turn % len(self._verifiers)].connect()
        return HostileChannel(inner, self.faults, self.random.choice([0.0, 0.01, 0.04]))

    async def _now_and_then(self, every: float, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await asyncio.sleep(self.random.expovariate(1 / every))
            await act()

    async def _kill(self) -> None:
        verifier = self.random.choice(self._verifiers)
        if not verifier.down and not verifier.leaving:
            self.faults.done["kill of a verifier"] += 1
            await verifier.kill()
            await asyncio.sleep(self.random.uniform(0.0, 2.0))
            verifier.start()

    async def _drain(self) -> None:
        verifier = self.random.choice(self._verifiers)
        if not verifier.down and not verifier.leaving:
            self.faults.done["drain of a verifier"] += 1
            await verifier.drain(self.random.choice([0.0, 0.5, 3.0]))
            verifier.start()

    async def _restart(self) -> None:
        self.faults.done["restart of an edge"] += 1
        edge = self.random.choice(self._edges)
        await edge.kill()
        await asyncio.sleep(self.random.uniform(0.0, 1.0))
        await edge.start()

    async def _jump(self) -> None:
        clocks: list[Edge | Verifier] = [*self._edges, *self._verifiers]
        whose = self.random.choice(clocks)
        self.faults.done[f"jump of {'an edge' if isinstance(whose, Edge) else 'a verifier'}'s clock"] += 1
        whose.clock_error += self.random.choice([-3600.0, -1.0, 1.0, 30.0, 86400.0])


class Edge:
    """A device that asks one question after another, twice at the same time, and starts again when it was killed."""

    def __init__(self, town: Town, number: int) -> None:
        self._town, self._turn, self.clock_error = town, number, 1e6
        self.plain = number % 3 == 2  # these do not draft
        self._agent: Agent | None = None
        self._alive = asyncio.Event()
        self._channels: list[Channel] = []
        self._target = ToyEngine()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        run_draft = draft_runner(FIRST_ROW, MORE_ROWS)
        agent = Agent(
            self._connect,
            self._target.vocabulary,
            policy("ar" if self.plain else "stream"),
            GuessingDraft(self._target),
            Predictor(),
            run_draft,
            clock=lambda: loop.time() + self.clock_error,
            random=Random(self._town.random.random()),
        )
        await agent.__aenter__()
        self._agent = agent
        self._alive.set()

    async def kill(self) -> None:
        """Like kill -9: the links end, and nothing is said any more."""
        agent, self._agent = self._agent, None
        self._alive.clear()
        for channel in self._channels:
            await channel.close()
        self._channels.clear()
        if agent is not None:
            await agent.__aexit__(None, None, None)

    async def live(self) -> None:
        if self._agent is None:
            await self.start()
        while (question := self._town.next_question()) is not None:
            await self._ask(question)

    async def _connect(self) -> Channel:
        self._turn += 1
        channel = await self._town.connect(self._turn)
        self._channels = [*self._channels[-3:], channel]
        return channel

    async def _ask(self, question: Question) -> None:
        right, tally, random = question.answer(self._target), self._town.tally, self._town.random
        stop_after = random.randrange(len(right) + 1) if random.random() < 0.1 else None
        got: list[int] = []
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not await self._go_on(question, got, stop_after):
                    pass  # the process was killed: the next one goes on from what is held
        except (PacelineError, TimeoutError) as e:
            tally.lose(f"{type(e).__name__}: {e} after {len(got)} of {len(right)} tokens")
        else:
            tally.count(got, right, stopped=stop_after is not None)

    async def _go_on(self, question: Question, got: list[int], stop_after: int | None) -> bool:
        """Stream into `got` until the answer ends, or is stopped. False if the process was killed meanwhile."""
        await self._alive.wait()
        agent, begun = self._agent, list[Generation]()
        assert agent is not None
        events = agent.generate(question, begun.append, held=tuple(got))
        try:
            async for event in events:
                got.extend(event.tokens)
                if stop_after is not None and len(got) >= stop_after:
                    return True
        except PacelineError:
            if self._agent is agent:
                raise
        finally:
            await events.aclose()
        self._town.tally.crippled += not self.plain and agent.draft is None
        return self._agent is agent


def campaign(plan: Plan) -> Town:
    """Run it in virtual time; the town tells what was done and what came of it."""

    async def main() -> Town:
        town = Town(plan)
        await town.live()
        return town

    return run(main())
