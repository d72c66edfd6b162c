"""Many edges on many verifiers in virtual time: what a fleet makes, and what it costs.

The verifiers are real (connections, sessions, scheduler, limits) on recorded targets whose steps cost what a table says of their
rows; the edges are `crowd`'s. Prompts count as read, at both ends, as in the lab's other measurements. The verifiers' own code
takes no virtual time; what it takes on this machine is measured beside it.
"""

import asyncio
import hashlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from paceline.cloud.connection import Connection, House
from paceline.cloud.engine import Work
from paceline.cloud.engines.replay import ReplayEngine
from paceline.cloud.limits import Bounds
from paceline.protocol.cloud_session import Walk
from paceline.protocol.errors import EngineError
from paceline.protocol.messages import Hello
from paceline.protocol.vocabulary import Vocabulary
from paceline.scripts.lab.book import Book
from paceline.scripts.lab.crowd import CrowdEdge
from paceline.scripts.lab.edges import EdgeCost
from paceline.scripts.lab.load import Clocked
from paceline.scripts.lab.steps import StepTable
from paceline.scripts.lab.virtual import MemoryChannel, Meter, run

WIDTH = 1024  # nodes that a step takes along, at most
ARRIVALS = 0.5  # seconds within which the edges come
WARM = 0.25  # share of the time that is not counted


@dataclass(frozen=True)
class Setting:
    """Times in seconds. `balance`: even, as by least connections; hash, as by a consistent hash of the edge's name."""

    verifiers: int
    edges: int
    costs: StepTable
    edge: EdgeCost
    seconds: float = 4.0
    round_trip: float = 0.05
    drafts: bool = True
    balance: str = "even"
    seed: int = 0


@dataclass(frozen=True)
class Made:
    """What came of it, after the warm-up. Rates in tokens a virtual second; `rows` of a step, `nodes` of a session in it."""

    verifiers: int
    edges: int
    drafts: bool
    tokens_a_second: float
    tokens_a_second_an_edge: float
    p50_between_commits: float
    p99_between_commits: float
    gpu_seconds_per_1000: float  # of steps, not of waiting for something to do
    busy: float  # share of the verifiers' time that steps take
    step: float  # mean seconds
    rows: float
    nodes: float
    tokens_a_step: float  # of one session
    fullest: int  # edges at the verifier that has most
    own_in_step: float  # median CPU seconds of the verifier's own code on this machine
    whole: int  # answers that are the target's text
    altered: int


class PricedEngine(ReplayEngine):
    """A recorded target whose steps cost what a table says; the prompt is in its cache."""

    def __init__(self, books: Sequence[Book], vocabulary: Vocabulary, costs: StepTable, meter: Meter) -> None:
        recordings = {(book.case.prompt, book.case.sampling): book.case.text for book in books}
        super().__init__("target", vocabulary, recordings, max_width=WIDTH)
        self.step_cost = costs.measured_at_start
        self._costs, self._meter = costs, meter

    def open(self, tokens: Sequence[int]) -> int:
        handle = super().open(tokens)
        sequence = self._sequences[handle]
        sequence.tokens.extend(sequence.prompt[:-1])
        return handle

    def verify(self, batch: Sequence[Work]) -> list[Walk | EngineError | None]:
        self._meter.charge(self._costs(sum(len(work.tokens) + len(work.plan.nodes) for work in batch)))
        return super().verify(batch)


class Verifier:
    """One of the fleet, in the running loop's time."""

    def __init__(self, books: Sequence[Book], vocabulary: Vocabulary, setting: Setting) -> None:
        clock, meter = asyncio.get_running_loop().time, Meter()
        engine = PricedEngine(books, vocabulary, setting.costs, meter)
        # What a step has cost so far has not passed yet while it is charged.
        self.scheduler = Clocked(engine, meter.run, lambda: clock() + meter.seconds)
        self.scheduler.begin()
        bounds = Bounds(connections=setting.edges, slots=setting.edges, messages_a_second=1e9, idle_seconds=1e9)
        self.house = House(self.scheduler, engine.name, vocabulary, engine.context, clock=clock, bounds=bounds)
        self.tasks = [asyncio.ensure_future(self.scheduler.run())]
        self.edges = 0
        self._before = (0, 0.0, 0, 0, 0, 0)

    def connect(self) -> MemoryChannel:
        near, far = MemoryChannel.pair()
        self.tasks.append(asyncio.ensure_future(Connection(far, self.house).serve()))
        self.edges += 1
        return near

    def warm(self) -> None:
        """What was so far is not counted."""
        self._before = self._totals()
        del self.scheduler.own[:-1]  # a step may be under way

    def totals(self) -> tuple[float, ...]:
        """Steps, seconds in them, rows, tokens, sessions' steps, nodes, since it was warm. Raises what ended the scheduler."""
        if self.tasks[0].done():
            self.tasks[0].result()
        return tuple(now - then for now, then in zip(self._totals(), self._before, strict=True))

    def _totals(self) -> tuple[int, float, int, int, int, int]:
        f = self.scheduler.figures
        return f.steps, f.step_seconds, f.rows, f.tokens, f.session_steps, f.verified


def fleet(setting: Setting, books: Sequence[Book], vocabulary: Vocabulary, done: Callable[[], None]) -> Made:
    """Run it; `done` is called as each tenth of it has passed. The timeline is the same every time, `own_in_step` is not."""
    return run(_run(setting, books, vocabulary, done))


async def _run(setting: Setting, books: Sequence[Book], vocabulary: Vocabulary, done: Callable[[], None]) -> Made:
    verifiers = [Verifier(books, vocabulary, setting) for _ in range(setting.verifiers)]
    hello = Hello((1,), vocabulary.name[:256], vocabulary.size, vocabulary.fingerprint)
    edges, tasks = [], []
    for i in range(setting.edges):
        random = Random(f"{setting.seed} {i}")
        channel = verifiers[place(setting, i)].connect()
        asked = _asked(books, random)
        edge = CrowdEdge(channel, asked, setting.edge, setting.round_trip / 2, drafts=setting.drafts)
        edges.append(edge)
        tasks.append(asyncio.ensure_future(edge.talk(hello, random.uniform(0, ARRIVALS))))
    begin = WARM * setting.seconds
    await asyncio.sleep(begin)
    for verifier in verifiers:
        verifier.warm()
    for _ in range(10):
        await asyncio.sleep((setting.seconds - begin) / 10)
        done()
    made = _figures(setting, verifiers, edges)
    for task in [*tasks, *(task for verifier in verifiers for task in verifier.tasks)]:
        task.cancel()
    return made


def place(setting: Setting, edge: int) -> int:
    """The verifier of an edge. `hash` is the one whose name scores highest with the edge's (rendezvous hashing)."""
    if setting.balance == "even":
        return edge % setting.verifiers
    scores = (hashlib.blake2b(f"{edge}|{v}".encode(), digest_size=8).digest() for v in range(setting.verifiers))
    return max(enumerate(scores), key=lambda score: score[1])[0]


def _asked(books: Sequence[Book], random: Random) -> Iterator[Book]:
    order = list(books)
    random.shuffle(order)
    return itertools.cycle(order)


def _figures(setting: Setting, verifiers: Sequence[Verifier], edges: Sequence[CrowdEdge]) -> Made:
    begin, seconds = WARM * setting.seconds, (1 - WARM) * setting.seconds
    steps, busy, rows, tokens, session_steps, nodes = (
        sum(column) for column in zip(*(verifier.totals() for verifier in verifiers), strict=True)
    )
    got = sum(n for edge in edges for at, n in edge.diary.commits if at >= begin)
    gaps = sorted(gap for edge in edges for gap in _gaps(edge, begin))
    own = [spent for verifier in verifiers for spent in verifier.scheduler.own]
    return Made(
        verifiers=setting.verifiers,
        edges=setting.edges,
        drafts=setting.drafts,
        tokens_a_second=got / seconds,
        tokens_a_second_an_edge=got / seconds / setting.edges,
        p50_between_commits=gaps[len(gaps) // 2],
        p99_between_commits=gaps[int(0.99 * len(gaps))],
        gpu_seconds_per_1000=1000 * busy / tokens,
        busy=busy / seconds / setting.verifiers,
        step=busy / steps,
        rows=rows / steps,
        nodes=nodes / session_steps,
        tokens_a_step=tokens / session_steps,
        fullest=max(verifier.edges for verifier in verifiers),
        own_in_step=statistics.median(own),
        whole=sum(edge.diary.whole for edge in edges),
        altered=sum(edge.diary.altered + edge.diary.refused for edge in edges),
    )


def _gaps(edge: CrowdEdge, begin: float) -> Iterator[float]:
    """Seconds between two commits of one answer."""
    commits, breaks = edge.diary.commits, edge.diary.breaks
    for i in range(1, len(commits)):
        if i not in breaks and commits[i - 1][0] >= begin:
            yield commits[i][0] - commits[i - 1][0]
