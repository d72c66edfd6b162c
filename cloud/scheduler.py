"""Which sessions and nodes go into the next step.

One loop, one engine step at a time over every session that has something to do: a plain step for those without nodes,
a tree for those with, a chunk of the prompt for those being prefilled. Sessions take turns at being first when rows
are short. How many nodes a step takes along is the number that makes expected tokens per second largest, from the
nodes' probabilities and the measured cost of a step. Sockets and messages are the server's business.

Between two steps the engine waits, so nothing is done there but what the next one needs: texts grow, nodes are chosen.
What else a step leaves to do (commits to send, figures, what is learned from it) is done while the next one runs.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import msgspec
from msgspec.structs import replace
from paceline.cloud.backup import Drafted, Grown, Stub, TopUp
from paceline.cloud.engine import Blocks, Engine, Mask, Work, blocks_of
from paceline.cloud.grammar import Constraint
from paceline.cloud.recycling import Recycling
from paceline.cloud.selection import Part, choose
from paceline.protocol.cloud_session import CloudSession, Plan, Walk
from paceline.protocol.cost import StepCost, most_count, step_seconds
from paceline.protocol.errors import Code, EngineError, ProtocolError
from paceline.protocol.messages import Commit

T = TypeVar("T")
log = logging.getLogger(__name__)
SOON = 1e-6  # seconds; an event loop may wake a sleeper early by its clock's resolution
DOUBTLESS = 8.0  # nodes for which an edge is believed at first
MEMORY = 0.97  # what is left of a step's outcome after the next one
NEARLY = 0.5  # of what the least node counted that went along lately: what counts less is not drafted here
PONDERED = 0.1  # of a step, at most, is thought about what costs no draft's time
ACK_WINDOW = 512  # tokens a session may run ahead of what its edge has acknowledged


class Runner(Protocol):
    """Runs blocking work outside the event loop; one call at a time. In virtual time it takes its cost in virtual seconds."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


@dataclass(eq=False)
class Seat:
    """A session in the scheduler: where its commits go, and its engine handle once it has one."""

    session: CloudSession
    on_commit: Callable[[Commit], None]
    on_error: Callable[[ProtocolError], None]
    handle: int | None = None
    gone: bool = False
    since: float = 0.0  # when its last step ended
    missed: float = 0.0  # when its tree was left empty, and how long the text was then
    missed_len: int = 0
    constraint: Constraint | None = None  # what the text is kept to
    pause: Callable[[], float] = field(default=lambda: 0.0)  # seconds for which its owner has used up what it may
    pace: float = 1.0  # tokens it gets in a step, lately
    promised: float = 0.0  # nodes that should have been taken by what its edge says of them, lately
    taken: float = 0.0  # nodes that were
    grown: list[Grown] = field(default_factory=list)  # what a backup drafted for the step at hand
    own: set[int] = field(default_factory=set)  # nodes of the tree that a backup drafted
    part: Part | None = None  # what it has of the step at hand

    def grew(self, grown: Grown) -> None:
        self.grown.append(grown)
        self.own.update(grown.nodes)

    def due(self, now: float) -> float:
        """When its next step may begin; infinity: not before something arrives."""
        s = self.session
        if self.gone or s.finish or self.unheard:
            return math.inf
        begin = now + self.pause()
        if not s.waiting:
            return begin
        return max(begin, s.patience.start(now, self.missed, len(s.committed) - self.missed_len))

    @property
    def counts(self) -> float:
        """Log of what a sure node of it counts for.

        The less, the more tokens it gets anyway, and the oftener its edge is wrong: one that is right as often as it says,
        or new here, is believed.
        """
        return math.log(min((self.taken + DOUBTLESS) / (self.promised + DOUBTLESS), 1.0) / self.pace)

    def learn(self, promised: float, taken: int) -> None:
        self.promised = MEMORY * self.promised + promised
        self.taken = MEMORY * self.taken + taken

    @property
    def unheard(self) -> bool:
        """Has it run as far ahead as it may of what its edge has said to have?"""
        return len(self.session.committed) - self.session.acknowledged >= ACK_WINDOW

    def stepped(self, now: float, walked_on: bool) -> None:
        """A step has ended; `walked_on`: something of the tree is left, or it was empty before."""
        self.since = now
        if not walked_on:
            self.missed, self.missed_len = now, len(self.session.committed)


class Outcome(msgspec.Struct, frozen=True):
    """What became of a session in a step, as far as nobody waits for it."""

    seat: Seat
    part: Part
    plan: Plan
    walk: Walk
    tokens: list[int]  # by which its text grew
    step: float  # seconds
    own: Collection[int]  # nodes of its tree that a backup had drafted
    grown: Sequence[Grown]


@dataclass
class Figures:
    """Running totals for metrics."""

    steps: int = 0
    step_seconds: float = 0.0
    engine_seconds: float = 0.0
    rows: int = 0
    tokens: int = 0
    session_steps: int = 0  # steps, once for each session that chose in them
    hits: int = 0  # of those, with at least one node held
    drafts: int = 0  # of those, with at least one node verified
    verified: int = 0
    accepted: int = 0
    stale: int = 0

    def count(self, commit: Commit) -> None:
        self.tokens += len(commit.tokens)
        self.session_steps += 1
        self.hits += commit.held > 0
        self.drafts += commit.verified > 0
        self.verified += commit.verified
        self.accepted += commit.accepted
        self.stale += commit.stale


class Scheduler:
    def __init__(
        self,
        engine: Engine,
        run: Runner,
        clock: Callable[[], float],
        *,
        width: int | None = None,
        floor: float = 0.0,
        top_ups: Sequence[TopUp] = (),
        recycles: bool = True,
    ) -> None:
        """`floor`: seconds to which a step is paced. `top_ups` draft where an edge's tree holds too little, one after another.

        `recycles`: after them, what an edge drafted elsewhere is offered again.
        """
        self.engine, self.floor = engine, floor
        self.width = engine.max_width if width is None else min(width, engine.max_width)
        self.figures = Figures()
        self._run, self._clock, self._top_ups = run, clock, [*top_ups]
        self._recycling = Recycling() if recycles else None
        self._cost = StepCost(engine.step_cost)
        self._cut = -math.inf  # log of what the least node counted that went along lately, where others were left out
        self._later: list[Outcome] = []  # of the last step, for those who have not heard yet
        self._last: tuple[Sequence[tuple[Seat, Work]], float, float] | None = None  # step, until its account is taken
        self._seats: list[Seat] = []
        self._leaving: list[Seat] = []
        self._wake = asyncio.Event()
        self.idle = asyncio.Event()  # set while there are no sessions
        self.idle.set()

    def __len__(self) -> int:
        return len(self._seats)

    def add(self, seat: Seat) -> None:
        seat.stepped(self._clock(), False)
        self._seats.append(seat)
        self.idle.clear()
        self.wake()

    def remove(self, seat: Seat) -> None:
        """The session takes no more steps; its cache is let go of before the next step."""
        seat.gone = True
        if seat in self._seats:
            self._seats.remove(seat)
            self._leaving.append(seat)
            self.wake()
        if not self._seats:
            self.idle.set()

    @property
    def rejects(self) -> bool:
        """Whether the engine can accept and refuse draws."""
        return bool(getattr(self.engine, "rejects", False))

    @property
    def drafts(self) -> bool:
        """Is something drafted here that takes time? Then it is not worth waiting for an edge's nodes."""
        return not all(top_up.free for top_up in self._top_ups)

    @property
    def blocks(self) -> Blocks | None:
        """The engine's KV cache by now."""
        return blocks_of(self.engine)

    def wake(self) -> None:
        """Something arrived that may make a session ready."""
        self._wake.set()

    async def run(self) -> None:
        """Step for ever; ends by cancellation."""
        while True:
            self._wake.clear()
            seats, wait = self._due()
            if not seats:
                self._catch_up()
                await self._sleep(wait)
                continue
            await self._step(seats)
            if self._seats:
                self._seats.append(self._seats.pop(0))

    def _due(self) -> tuple[list[Seat], float]:
        """Whose step may begin, each with a sequence of the engine; if there are none, seconds until the next one's may."""
        self._let_go()
        now = self._clock()
        ready: list[Seat] = []
        soon, first = now + SOON, math.inf
        for seat in tuple(self._seats):
            if (at := seat.due(now)) > soon:
                first = min(first, at)
            elif seat.handle is not None or self._seated(seat):
                ready.append(seat)
        return ready, first - now

    async def _sleep(self, seconds: float) -> None:
        """Until something arrives, or for so long."""
        with suppress(TimeoutError):  # not wait_for, which may swallow a cancellation before Python 3.12
            async with asyncio.timeout(seconds if seconds < math.inf else None):
                await self._wake.wait()

    async def _step(self, seats: Sequence[Seat]) -> None:
        for top_up in tuple(self._top_ups):
            await self._grow(seats, top_up)
            seats = [s for s in seats if not s.gone]
        begin = self._clock()
        batch = self._plan(seats)
        if not batch:
            return
        running = self._run(lambda: self._verify([work for _, work in batch]))
        self._catch_up()
        results, spent = await running
        elapsed = self._clock() - begin
        if elapsed < self.floor:
            await asyncio.sleep(min(self.floor - elapsed, self.floor))  # even if the clock went back
        now = self._clock()
        self._deliver(batch, results, now - begin, now)
        self._last = batch, now - begin, spent

    def _catch_up(self) -> None:
        """Do what the last step left to do."""
        if self._last is not None:
            self._account(*self._last)
            self._last = None
        later, self._later = self._later, []
        for outcome in later:
            self._tell(outcome)

    def _verify(self, batch: Sequence[Work]) -> tuple[Sequence[Walk | EngineError | None], float]:
        begin = self._clock()
        try:
            return self.engine.verify(batch), self._clock() - begin
        except Exception as e:  # whatever an engine runs into ends these sessions, not the server
            log.exception("the engine failed")
            return [EngineError(f"the engine failed: {type(e).__name__}")] * len(batch), self._clock() - begin

    async def _grow(self, seats: Sequence[Seat], top_up: TopUp) -> None:
        """Draft for the sessions that are about to choose: for all, or for as many as that pays for, since they take turns."""
        verify, free = max(self._cost(1), self.floor), top_up.free
        rate = sum([seat.pace for seat in seats]) / verify
        if free and not top_up.record.pays(rate):
            return  # and what came of the last step is told beside this one, as ever
        self._catch_up()
        begin = self._clock()
        enough = begin + PONDERED * verify
        for seat in seats:
            if free and (begin > enough or not top_up.record.pays(rate)):
                return
            assert seat.handle is not None
            session = seat.session
            if session.position - self.engine.length(seat.handle) > self.engine.chunk:
                continue
            stubs = top_up.look(session, self.width, self._least(seat))
            try:
                work = partial(_draft, top_up, stubs, verify, session, len(seats))
                chains = work() if free else await self._run(work)
            except Exception:  # whatever a backup runs into ends it, not the sessions
                log.exception("the backup failed; going on without it")
                self._top_ups.remove(top_up)
                return
            for stub, chain in zip(stubs, chains, strict=True):
                if (grown := top_up.put(session, stub, chain)) is not None:
                    seat.grew(grown)
            if free:
                now = self._clock()
                top_up.record.thought(now - begin)
                begin = now

    def _least(self, seat: Seat) -> float:
        """What is reached less often will hardly be verified in this step: in the last one, too, better nodes were left out."""
        return NEARLY * math.exp(min(self._cut - seat.counts, 0.0)) if self._cut > -math.inf else 0.0

    def _seated(self, seat: Seat) -> bool:
        """Give the session a sequence of the engine if it has none. False if there is no room."""
        if seat.handle is None:
            try:
                seat.handle = self.engine.open(seat.session.sequence)
            except EngineError as e:
                self._fail(seat, Code.OVERLOADED, str(e), retry_after=1.0)
                return False
        return True

    def _plan(self, seats: Sequence[Seat]) -> list[tuple[Seat, Work]]:
        """Each session's work. Prompts share one chunk a step, so that a long one stalls nobody for long."""
        choosing: list[Seat] = []
        shares: list[tuple[Seat, tuple[int, ...]]] = []
        room, rows, length = self.engine.chunk, 0, self.engine.length
        for seat in seats:
            assert seat.handle is not None
            taken = missing = seat.session.after(length(seat.handle))
            assert missing, "an engine leaves at least the last token to be run"
            if (count := len(missing)) > 1:
                taken = missing[:room]
                if not taken:
                    continue
                room -= len(taken)
            if len(taken) == count:
                choosing.append(seat)
            rows += len(taken)
            shares.append((seat, taken))
        self._choose(choosing, rows)
        return [(seat, self._work(seat, tokens)) for seat, tokens in shares]

    def _choose(self, seats: Sequence[Seat], rows: int) -> None:
        """Each one's part: the nodes that pay for their rows, as much to those who get little as to those who get much.

        What a step gives a session counts by what it gets in a step, so that no edge's many likely nodes slow the others down
        for more than they bring it: the product of all rates is what grows (proportional fairness). An edge says how likely its
        nodes are; one that is wrong about it is believed less, so that it takes nobody's rows. No more are taken than would pay
        if all were sure. `rows` go along anyway.
        """
        paces = [seat.pace for seat in seats]
        base, least = sum([1 / pace for pace in paces]), min(paces, default=1.0)
        priced = step_seconds(self.width, self._cost, base_rows=rows, floor=self.floor)
        seconds = priced[: most_count(1 / least, priced, base) + 1]
        recycling = self._recycling
        faint = math.log(recycling.least(sum(paces), float(seconds[0]))) if recycling is not None else 0.0
        parts: list[Part] = []
        for seat in seats:
            seat.part = part = Part(seat.session, seat.counts, faint, seat.own)
            parts.append(part)
        self._cut = choose(parts, seconds, base, recycling)

    def _work(self, seat: Seat, tokens: tuple[int, ...]) -> Work:
        """Without a part of the step, these are a chunk of a prompt."""
        s, part, mask = seat.session, seat.part, None
        assert seat.handle is not None
        if part is None:
            return Work(seat.handle, tokens, Plan(), s.sampling, s.history, s.logprobs, False, None)
        if seat.constraint is not None:
            mask = partial(_mask, seat.constraint, tuple(s.committed))
        return Work(seat.handle, tokens, part.plan(), s.sampling, s.history, s.logprobs, True, mask)

    def _deliver(
        self, batch: Sequence[tuple[Seat, Work]], results: Sequence[Walk | EngineError | None], step: float, now: float
    ) -> None:
        """The texts grow; who is to know of it hears it later."""
        for (seat, work), result in zip(batch, results, strict=True):
            part, seat.part = seat.part, None
            if seat.gone or result is None:
                continue
            if isinstance(result, EngineError):
                self._fail(seat, Code.ENGINE, str(result))
                continue
            assert part is not None, "who chose had a part"
            session, plan, own, grown = seat.session, work.plan, seat.own, seat.grown
            if own:
                own, seat.grown = session.tree.alive(own), []
                seat.own = own
                plan = replace(plan, held=plan.held - len(own))  # a hit is what the edge had sent
            tokens = session.grow(plan, result)
            seat.pace += (1 - MEMORY) * (len(tokens) - seat.pace)
            seat.stepped(now, len(session.tree) > 0 or not plan.held)
            self._later.append(Outcome(seat, part, plan, result, tokens, step, own, grown))

    def _account(self, batch: Sequence[tuple[Seat, Work]], step: float, spent: float) -> None:
        """A step took `step` seconds, `spent` of them in the engine."""
        rows, f = sum(len(w.tokens) + len(w.plan.nodes) for _, w in batch), self.figures
        read = sum(1 + len(w.plan.nodes) for _, w in batch if w.choose)
        self._cost.learn(rows, spent, unread=rows - read)
        f.steps, f.rows = f.steps + 1, f.rows + rows
        f.step_seconds, f.engine_seconds = f.step_seconds + step, f.engine_seconds + spent

    def _tell(self, outcome: Outcome) -> None:
        """Send a commit, and learn from it."""
        seat, part, plan, walk = outcome.seat, outcome.part, outcome.plan, outcome.walk
        commit = seat.session.report(plan, walk, outcome.tokens, outcome.step)
        through = {plan.nodes[place] for place in walk.accepted}
        seat.learn(part.promised, sum(node >= 0 and node not in outcome.own for node in through))
        for grown in outcome.grown:
            grown.learn(part.root, plan.nodes, through)
        if part.recycled and self._recycling is not None:
            self._recycling.learn(part.recycled, plan.parents, walk.accepted)
        self.figures.count(commit)
        if commit.finish:
            self.remove(seat)
        seat.on_commit(commit)

    def _fail(self, seat: Seat, code: Code, text: str, retry_after: float | None = None) -> None:
        self.remove(seat)
        seat.on_error(ProtocolError(code, text, seat.session.sid, retry_after=retry_after))

    def _let_go(self) -> None:
        for seat in self._leaving:
            if seat.handle is not None:
                self.engine.close(seat.handle)
                seat.handle = None
        self._leaving.clear()


def _draft(
    top_up: TopUp, stubs: Sequence[Stub], verify: float, session: CloudSession, sessions: int
) -> list[list[Drafted]]:
    return [top_up.draft(stub, verify, session.stop_ids, sessions) for stub in stubs]


def _mask(constraint: Constraint, committed: tuple[int, ...], walked: Sequence[int]) -> Mask:
    return constraint.mask((*committed, *walked))
