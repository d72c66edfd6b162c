"""`paceline bench load`: many sessions on one verifier, in virtual time: who gets how much, and what the server costs.

The verifier is the real one (connections, sessions, scheduler, limits) on a recorded target whose step takes `verify` seconds;
the edges are recorded: each keeps a chain of drafted nodes ahead of the text, right with the chance `agree` a node, and answers
every commit. A session's fair share is what the same edge gets alone on a verifier with its part of the width.

Times of the timeline are virtual. What the server itself costs is measured, as CPU seconds of its own code: between two steps,
where the engine waits for it (texts grow, nodes are chosen), and beside one, while the engine works (commits are told and
learned from, frames are read). Sockets are not in it.
"""

import asyncio
import json
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Annotated

import typer
from paceline.cloud.connection import Connection, House
from paceline.cloud.engine import Work
from paceline.cloud.engines.replay import ReplayEngine
from paceline.cloud.limits import Bounds
from paceline.cloud.scheduler import Scheduler, Seat
from paceline.kernels.heap import keep_small
from paceline.protocol.channel import ChannelClosed
from paceline.protocol.cloud_session import Walk
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.edge_session import EdgeSession, Phase
from paceline.protocol.errors import EngineError, PacelineError
from paceline.protocol.messages import Hello
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling
from paceline.protocol.tree import State
from paceline.protocol.vocabulary import Vocabulary
from paceline.scripts import options
from paceline.scripts.lab.virtual import MemoryChannel, run, run_engine

LIES = 60  # wrong nodes that a liar adds to its chain each time
WORDS = 1000  # size of the recorded vocabulary


@dataclass(frozen=True)
class Setting:
    """Times in seconds. `ahead` nodes are held in front of the text; `liars` sessions send only wrong nodes, as sure ones."""

    sessions: int
    seconds: float = 20.0
    verify: float = 0.03
    round_trip: float = 0.05
    agree: float = 0.8
    ahead: int = 8
    width: int = 256
    liars: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Load:
    """What came of it. Rates in tokens a virtual second, of the honest sessions; `fairness`: the least over its fair share."""

    sessions: int
    tokens_a_second: float
    mean: float
    least: float
    fairness: float
    p50_between_commits: float
    p99_between_commits: float
    step: float
    tokens_a_step: float  # of one session
    engine_seconds_per_1000: float
    plain_engine_seconds_per_1000: float
    own_in_step: float  # CPU seconds between two steps, median
    own_share: float  # of the time that a step takes
    told_in_step: float  # CPU seconds beside a step for telling what came of the last one
    frames_in_step: float  # CPU seconds beside a step for reading the frames that came


class Clocked(Scheduler):
    """Counts the CPU time that a step takes outside the engine: what it waits for, and what is done meanwhile."""

    def begin(self) -> None:
        self.own: list[float] = []  # between steps
        self.told = self.frames = 0.0  # while the engine works
        self._looking = 0.0  # for who may begin a step, the last time

    def _due(self) -> tuple[list[Seat], float]:
        begin = time.thread_time()
        try:
            return super()._due()
        finally:
            self._looking = time.thread_time() - begin

    def _plan(self, seats: Sequence[Seat]) -> list[tuple[Seat, Work]]:
        begin = time.thread_time()
        try:
            return super()._plan(seats)
        finally:
            self.own.append(time.thread_time() - begin + self._looking)

    def _deliver(
        self, batch: Sequence[tuple[Seat, Work]], results: Sequence[Walk | EngineError | None], step: float, now: float
    ) -> None:
        begin = time.thread_time()
        super()._deliver(batch, results, step, now)
        self.own[-1] += time.thread_time() - begin

    def _catch_up(self) -> None:
        begin = time.thread_time()
        super()._catch_up()
        self.told += time.thread_time() - begin


class ClockedConnection(Connection):
    spent = 0.0

    def _handle_frame(self, frame: bytes | str) -> bool:
        begin = time.thread_time()
        try:
            return super()._handle_frame(frame)
        finally:
            ClockedConnection.spent += time.thread_time() - begin


class RecordedEdge:
    """An edge that knows the text: keeps `ahead` nodes in front of it, of which a share is wrong."""

    def __init__(
        self, channel: MemoryChannel, text: Sequence[int], setting: Setting, random: Random, *, lies: bool
    ) -> None:
        self._channel, self._text, self._setting, self._lies = channel, text, setting, lies
        self._wrong = [random.random() >= setting.agree for _ in text]
        self.session = EdgeSession(GenerationRequest(tuple(text[:1]), Sampling(), len(text) - 1))
        self.commits: list[tuple[float, int]] = []  # when, and how many tokens
        self._tip = self.session.tree.root

    async def talk(self, hello: Hello) -> None:
        await self._channel.send(encode(hello))
        await self._channel.receive()
        await self._channel.send(encode(self.session.open(1)))
        loop = asyncio.get_running_loop()
        with suppress(ChannelClosed):
            while True:
                frame = await self._channel.receive()
                loop.call_later(self._setting.round_trip / 2, self._receive, frame)

    def _receive(self, frame: bytes | str) -> None:
        events = self.session.receive(decode_from_cloud(frame))
        now = asyncio.get_running_loop().time()
        self.commits += [(now, len(e.tokens)) for e in events]
        if self.session.phase is Phase.RUNNING:
            self._grow()

    def _grow(self) -> None:
        fresh = self._chain()
        if self._lies:  # wrong nodes that are held all the same, as they hang on right ones
            fresh += [self.session.tree.add(self._tip, WORDS - 2 - i, 0.0) for i in range(LIES)]
        for message in self.session.send(fresh):
            asyncio.get_running_loop().call_later(self._setting.round_trip / 2, self._send, encode(message))

    def _send(self, frame: bytes) -> None:
        with suppress(ChannelClosed):
            self._channel.put(frame)

    def _chain(self) -> list[int]:
        """Nodes that lengthen the chain to `ahead`; the draft is wrong at some places, and what follows is wrong with it."""
        tree = self.session.tree
        if tree.state(self._tip) is not State.LIVE:
            self._tip = tree.root
        fresh = []
        while (depth := tree.position(self._tip) - tree.position(tree.root)) < self._setting.ahead:
            at = len(self.session.committed) + 1 + depth
            if at >= len(self._text):
                break
            token = WORDS - 1 if self._wrong[at] and not self._lies else self._text[at]
            self._tip = tree.add(self._tip, token, 0.0 if self._lies else math.log(self._setting.agree))
            fresh.append(self._tip)
        return fresh


def load(setting: Setting) -> Load:
    """Run it, and each session alone. The timeline is the same every time; the CPU figures are this machine's."""
    scheduler, edges = run(_run(setting, range(setting.sessions)))
    part = replace(setting, width=max(setting.width // setting.sessions, 1))
    alone = [rate(setting, run(_run(part, [i]))[1][0]) for i in range(setting.liars, setting.sessions)]
    return _figures(setting, scheduler, edges[setting.liars :], alone)


async def _run(setting: Setting, who: Sequence[int]) -> tuple[Clocked, list[RecordedEdge]]:
    """So many seconds of these sessions together."""
    clock = asyncio.get_running_loop().time
    vocabulary = Vocabulary.of("words", [f"w{i}" for i in range(WORDS)])
    length = int(setting.seconds / setting.verify) * (setting.ahead + 2) + 2
    texts = {i: (i, *Random(setting.seed + i).choices(range(WORDS // 2), k=length)) for i in who}
    recordings: dict[tuple[tuple[int, ...], Sampling], Sequence[int]] = {
        (text[:1], Sampling()): text[1:] for text in texts.values()
    }
    engine = ReplayEngine("words", vocabulary, recordings, context=length + 16, max_width=setting.width)
    scheduler = Clocked(engine, run_engine, clock, floor=setting.verify)
    scheduler.begin()
    bounds = Bounds(slots=setting.sessions, messages_a_second=1e6)
    house = House(scheduler, engine.name, vocabulary, engine.context, clock=clock, bounds=bounds)
    ClockedConnection.spent = 0.0
    tasks = [asyncio.ensure_future(scheduler.run()), asyncio.ensure_future(keep_small())]
    edges = []
    for i, text in texts.items():
        near, far = MemoryChannel.pair()
        tasks.append(asyncio.ensure_future(ClockedConnection(far, house).serve()))
        edge = RecordedEdge(near, text, setting, Random(setting.seed + i), lies=i < setting.liars)
        edges.append(edge)
        tasks.append(asyncio.ensure_future(edge.talk(Hello((1,), "words", WORDS, vocabulary.fingerprint))))
    await asyncio.sleep(setting.seconds)
    for task in tasks:
        task.cancel()
    scheduler.frames = ClockedConnection.spent
    return scheduler, edges


def rate(setting: Setting, edge: RecordedEdge) -> float:
    """Tokens a second after the beginning."""
    begin = setting.seconds / 4
    return sum(n for at, n in edge.commits if at >= begin) / (setting.seconds - begin)


def _figures(setting: Setting, scheduler: Clocked, honest: Sequence[RecordedEdge], alone: Sequence[float]) -> Load:
    rates = [rate(setting, edge) for edge in honest]
    gaps = sorted(b[0] - a[0] for e in honest for a, b in zip(e.commits, e.commits[1:], strict=False))
    f = scheduler.figures
    own = statistics.median(scheduler.own)
    step = f.step_seconds / f.steps
    return Load(
        sessions=setting.sessions,
        tokens_a_second=f.tokens / setting.seconds,
        mean=statistics.mean(rates),
        least=min(rates),
        fairness=min(got / fair for got, fair in zip(rates, alone, strict=True)),
        p50_between_commits=gaps[len(gaps) // 2],
        p99_between_commits=gaps[int(0.99 * len(gaps))],
        step=step,
        tokens_a_step=f.tokens / f.session_steps,
        engine_seconds_per_1000=1000 * f.step_seconds / f.tokens,
        plain_engine_seconds_per_1000=1000 * f.step_seconds / f.session_steps,
        own_in_step=own,
        own_share=own / step,
        told_in_step=scheduler.told / f.steps,
        frames_in_step=scheduler.frames / f.steps,
    )


def command(
    sessions: Annotated[str, typer.Option(help="Numbers of sessions to run, as in 1,8,64.")] = "1,2,4,8,16,32,64",
    seconds: Annotated[float, typer.Option(min=1, help="Virtual seconds of each run.")] = 20.0,
    verify: Annotated[float, typer.Option(min=0.001, help="Seconds of a verification step.")] = 0.03,
    rtt: Annotated[float, typer.Option("--rtt", min=0, help="Round trip in seconds.")] = 0.05,
    agree: Annotated[float, typer.Option(min=0, max=1, help="How often a drafted node is right.")] = 0.8,
    width: Annotated[int, typer.Option(min=1, help="Nodes that a step takes along, over all sessions.")] = 256,
    liars: Annotated[int, typer.Option(min=0, help="Sessions that send wrong nodes only, and call them sure.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a run.")] = False,
) -> None:
    """Load a verifier with recorded edges on a recorded target, in virtual time, and see who gets what."""
    counts = options.whole_numbers(sessions)
    if liars >= min(counts):
        raise PacelineError(f"--liars {liars}: of {min(counts)} sessions at least one is honest")
    if not as_json:
        typer.echo(
            f"recorded target and edges, virtual time, a step takes {1000 * verify:.0f} ms; own time measured here"
        )
        typer.echo(
            "sessions  tokens/s  a session  fairness  p50 ms  p99 ms  engine s/1000 (plain)  own ms a step  share  beside it"
        )
    for count in counts:
        made = load(Setting(count, seconds, verify, rtt, agree, width=width, liars=liars))
        typer.echo(json.dumps(asdict(made)) if as_json else _row(made))


def _row(m: Load) -> str:
    return (
        f"{m.sessions:8}  {m.tokens_a_second:8.0f}  {m.mean:9.1f}  {m.fairness:8.3f}"
        f"  {1000 * m.p50_between_commits:6.0f}  {1000 * m.p99_between_commits:6.0f}"
        f"  {m.engine_seconds_per_1000:10.2f} ({m.plain_engine_seconds_per_1000:.2f})"
        f"  {1000 * m.own_in_step:13.2f}  {m.own_share:5.1%}  {1000 * (m.told_in_step + m.frames_in_step):9.2f}"
    )
