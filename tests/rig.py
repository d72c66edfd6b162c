"""Whole systems in virtual time for tests: a verifier with the toy engine, links of any length, cuts, and an agent."""

import asyncio
from collections.abc import Sequence
from random import Random

from paceline.cloud.backup import TopUp
from paceline.cloud.connection import Connection, House
from paceline.cloud.engine import Engine
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.metrics import exposition, registry
from paceline.cloud.scheduler import Scheduler
from paceline.edge.agent import Agent
from paceline.edge.delay import DelayedChannel
from paceline.edge.draft import Draft
from paceline.edge.generation import Report
from paceline.edge.policies import policy
from paceline.edge.predictor import Predictor
from paceline.protocol.channel import Channel
from paceline.protocol.ngrams import Ngrams
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import History, Sampling, choose
from paceline.scripts.lab.virtual import MemoryChannel, draft_runner, run_engine

FLOOR = 0.03  # seconds a verification takes
CACHE = "paceline_kv_cache_"


class Verifier:
    """A verifier in memory. `connect` gives an edge its end of a new link; `cut` breaks all there are."""

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        floor: float = FLOOR,
        session_ttl: float = 60.0,
        sessions: int = 64,
        top_ups: Sequence[TopUp] = (),
    ) -> None:
        loop = asyncio.get_running_loop()
        self.engine = engine or ToyEngine()
        self.scheduler = Scheduler(self.engine, run_engine, loop.time, floor=floor, top_ups=top_ups)
        vocabulary, context = self.engine.vocabulary, self.engine.context
        self.house = House(
            self.scheduler,
            self.engine.name,
            vocabulary,
            context,
            clock=loop.time,
            session_ttl=session_ttl,
            sessions=sessions,
        )
        self.stepping = loop.create_task(self.scheduler.run())
        self.ends: list[MemoryChannel] = []
        self.serving: list[asyncio.Task[None]] = []
        self.down = False

    async def connect(self) -> Channel:
        if self.down:
            raise ConnectionRefusedError("nobody listens")
        mine, other = MemoryChannel.pair()
        self.ends.append(other)
        self.serving.append(asyncio.get_running_loop().create_task(Connection(other, self.house).serve()))
        return mine

    async def cut(self) -> None:
        for end in self.ends:
            await end.close()
        self.ends.clear()

    async def stop(self) -> None:
        """The process ends: links, sessions and caches are gone."""
        self.down = True
        self.stepping.cancel()
        await self.cut()


def shown(engine: Engine) -> dict[str, float]:
    """What a verifier with this engine tells Prometheus of its KV cache; the names without their prefix."""
    house = House(Scheduler(engine, run_engine, float), engine.name, engine.vocabulary, engine.context)
    lines = exposition(registry(house)).decode().splitlines()
    pairs = (line.removeprefix(CACHE).split(" ") for line in lines if line.startswith(CACHE))
    return {name: float(value) for name, value in pairs}


def agent_of(
    verifier: Verifier,
    draft: Draft | None = None,
    *,
    rtt: float = 0.05,
    attempts: int | None = None,
    name: str = "stream",
    row: float = 0.005,
    ngrams: Ngrams | None = None,
) -> Agent:
    """`row`: seconds of a step of the draft over one row."""

    async def connect() -> Channel:
        channel = await verifier.connect()
        return DelayedChannel(channel, rtt) if rtt else channel

    return Agent(
        connect,
        verifier.engine.vocabulary,
        policy(name if draft is not None else "ar"),
        draft,
        Predictor(),
        draft_runner(row, row / 10),
        clock=asyncio.get_running_loop().time,
        random=Random(0),
        attempts=attempts,
        ngrams=ngrams,
    )


async def answer(
    agent: Agent,
    prompt: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    stop_ids: Sequence[int] = (),
    report: Report | None = None,
) -> list[int]:
    tokens: list[int] = []
    async for event in agent.generate(GenerationRequest(tuple(prompt), sampling, max_tokens, tuple(stop_ids)), report):
        tokens.extend(event.tokens)
    return tokens


def plain(
    engine: ToyEngine, prompt: Sequence[int], sampling: Sampling, max_tokens: int, stop: Sequence[int] = ()
) -> list[int]:
    """What the toy target writes alone."""
    text: list[int] = []
    while len(text) < max_tokens and not (text and text[-1] in stop):
        sequence = [*prompt, *text]
        history = History(prompt, text) if sampling.penalised else None
        text.append(choose(engine.logits(sequence), sampling, len(sequence), history))
    return text
