"""One answer under the virtual clock: the real agent, sessions, planner and scheduler, with modelled costs.

The draft's rows come from a memo, a batch of n rows costs what the edge's preset says, a verification what `verify` says,
and the link delays frames. The target is a recording; under the rule `rejection`, where the text depends on what was drawn, it
is the real one, at the same modelled cost. What happened is a `Run`, and every event if one asks for them.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paceline.cloud.backup import Ngram, TopUp
from paceline.cloud.connection import Connection, House
from paceline.cloud.engine import Engine
from paceline.cloud.engines.replay import ReplayEngine
from paceline.cloud.scheduler import Scheduler
from paceline.edge.agent import Agent
from paceline.edge.draft import Extended
from paceline.edge.drafter import Runner
from paceline.edge.generation import Generation
from paceline.edge.policies import Policy
from paceline.edge.predictor import Predictor
from paceline.protocol.channel import Channel
from paceline.protocol.errors import PacelineError
from paceline.protocol.messages import REJECTION
from paceline.protocol.ngrams import Ngrams
from paceline.protocol.vocabulary import Vocabulary
from paceline.scripts.lab.cases import Case
from paceline.scripts.lab.edges import EdgeCost
from paceline.scripts.lab.memo import Memo, MemoBackup, MemoDraft
from paceline.scripts.lab.network import Carried, LinkChannel, LinkSpec
from paceline.scripts.lab.virtual import MemoryChannel, Meter, run

BACKUPS = ("none", "ngram", "draft", "both")
SETTLE = 1.0  # seconds before the question: the link's round trip is then known


@dataclass(frozen=True)
class Setting:
    """Everything but the question. `verify` in seconds."""

    policy: Policy
    edge: EdgeCost
    link: LinkSpec
    verify: float = 0.03
    predictor: bool = True
    width: int | None = None  # nodes the verifier takes along in a step, at most
    learns: bool = False  # what the predictor learns stays in the bench's


@dataclass(frozen=True)
class Run:
    """What one answer took. Times in seconds from the question."""

    tokens: int
    seconds: float
    first_token: float
    steps: int
    hits: int
    accepted: int
    rows: int
    drafted: int
    stale: int
    offered: int
    matched: int
    up: int
    down: int
    messages_up: int
    largest: int
    same: bool | None  # is it the target's own text? None: drawn texts differ


@dataclass
class Events:
    """What a trace is made of: draft steps (begin, end, rows) and frames, in virtual seconds."""

    steps: list[tuple[float, float, int]] = field(default_factory=list)
    frames: list[Carried] = field(default_factory=list)
    asked: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True)
class Bench:
    """What an answer is made with: the pair's vocabulary, a memo for the question, a learned predictor to begin with."""

    vocabulary: Vocabulary
    memo: Memo
    predictor: Predictor
    target: Callable[[], Engine] | None = None  # the real one, for texts that cannot be recorded
    ngrams: Ngrams | None = None  # what the target is known to write


def answer(bench: Bench, case: Case, setting: Setting, events: Events | None = None) -> Run:
    """Answer `case` once. Deterministic. Raises what the agent raises."""
    return run(_answer(bench, case, setting, events or Events()))


async def _answer(bench: Bench, case: Case, setting: Setting, events: Events) -> Run:
    clock = asyncio.get_running_loop().time
    drawn = setting.policy.rule == REJECTION and not case.sampling.greedy
    engine = _live(bench) if drawn else _recorded(bench, case)
    meter = Meter()
    top_ups = _top_ups(bench, case, setting, meter)
    scheduler = Scheduler(
        engine,
        meter.run,
        clock,
        floor=setting.verify,
        width=setting.width,
        top_ups=top_ups,
        recycles=setting.policy.recycles,
    )
    house = House(scheduler, engine.name, bench.vocabulary, engine.context, clock=clock)
    tasks = [asyncio.create_task(scheduler.run())]

    async def connect() -> Channel:
        near, far = MemoryChannel.pair()
        tasks.append(asyncio.create_task(Connection(far, house).serve()))
        return LinkChannel(near, setting.link, random.Random(1), events.frames.append)

    draft = MemoDraft("draft", bench.vocabulary, bench.memo, case, setting.edge.table)
    predictor = bench.predictor if setting.learns else bench.predictor.copy(enabled=setting.predictor)
    agent = Agent(
        connect,
        bench.vocabulary,
        setting.policy,
        draft,
        predictor,
        _runner(setting.edge, events),
        clock=clock,
        random=random.Random(0),
        ngrams=bench.ngrams,
    )
    try:
        async with agent:
            await asyncio.sleep(SETTLE)
            run = await ask(agent, case, clock, events)
            return replace(run, same=None) if drawn else run
    finally:
        for task in tasks:
            task.cancel()


async def ask(agent: Agent, case: Case, clock: Callable[[], float], events: Events) -> Run:
    """Answer `case` through an agent whose link is up."""
    made: list[Generation] = []
    tokens: list[int] = []
    traffic = replace(agent.link.traffic)
    agent.link.traffic.largest = 0
    events.asked = clock()
    async for event in agent.generate(case.request, made.append):
        tokens.extend(event.tokens)
    events.ended = clock()
    f, now = made[0].figures, agent.link.traffic
    if not tokens or f.first_token is None:
        raise PacelineError(f"the answer to {case.name} is empty")
    return Run(
        tokens=len(tokens),
        seconds=events.ended - events.asked,
        first_token=f.first_token,
        steps=f.steps,
        hits=f.hits,
        accepted=f.accepted,
        rows=f.rows,
        drafted=f.drafted,
        stale=f.stale,
        offered=f.offered,
        matched=f.matched,
        up=now.up - traffic.up,
        down=now.down - traffic.down,
        messages_up=now.frames_up - traffic.frames_up,
        largest=now.largest,
        same=tuple(tokens) == case.text,
    )


def _recorded(bench: Bench, case: Case) -> Engine:
    return ReplayEngine("target", bench.vocabulary, {(case.prompt, case.sampling): case.text})


def _live(bench: Bench) -> Engine:
    if bench.target is None:
        raise PacelineError("the rule rejection needs the target itself, and here there is only a recording")
    return bench.target()


def _top_ups(bench: Bench, case: Case, setting: Setting, meter: Meter) -> list[TopUp]:
    """The policy's backup. A draft model beside the target is the edge's own draft, at the edge's own cost."""
    kind, length = setting.policy.backup, setting.policy.backup_length
    if kind not in BACKUPS:
        raise PacelineError(f"backup {kind!r} is not known; there are {', '.join(BACKUPS)}")
    found = list[TopUp]()
    if kind in ("draft", "both"):
        found.append(TopUp(MemoBackup(bench.memo, case, setting.edge.first, meter), length))
    if kind in ("ngram", "both"):
        found.append(TopUp(Ngram(bench.ngrams if setting.policy.ngrams else None)))
    return found


def _runner(cost: EdgeCost, events: Events) -> Runner:
    async def run_draft(work: Callable[[], Extended]) -> Extended:
        begin = asyncio.get_running_loop().time()
        done = work()
        if done.ran:
            await asyncio.sleep(cost(done.ran))
            events.steps.append((begin, begin + cost(done.ran), done.ran))
        return done

    return run_draft
