"""Which sessions and nodes go into the next step.

One loop, one engine step at a time over every session that has something to do: a plain step for those without nodes,
a tree for those with, a chunk of the prompt for those being prefilled. Sessions take turns at being first when rows
are short. How many nodes a step takes along is the number that makes expected tokens per second largest, from the
nodes' probabilities and the measured cost of a step. Sockets and messages are the server's business.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Protocol, TypeVar

from msgspec.structs import replace
from paceline.cloud.backup import Grown, Stub, TopUp
from paceline.cloud.engine import Blocks, Engine, Mask, Work, blocks_of
from paceline.cloud.grammar import Constraint
from paceline.cloud.recycling import Recycling
from paceline.protocol.cloud_session import CloudSession, Plan, Walk
from paceline.protocol.cost import StepCost, best_count, most_count
from paceline.protocol.errors import Code, EngineError, ProtocolError
from paceline.protocol.messages import Commit

T = TypeVar("T")
log = logging.getLogger(__name__)
SOON = 1e-6  # seconds; an event loop may wake a sleeper early by its clock's resolution
DOUBTLESS = 8.0  # nodes for which an edge is believed at first
MEMORY = 0.97  # what is left of a step's outcome after the next one
NEARLY = 0.5  # of what the least node counted that went along lately: what counts less is not drafted here
NODE = 1e-5  # seconds that a node drafted here takes of everybody's time, about, whatever becomes of it
OFFER, LEAST_OFFER = 4, 16  # nodes of a session that are looked at for a step: times its part of the width, at least
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
    grown: list[Grown] = field(default_factory=list)  # what was drafted here for the step at hand
    own: set[int] = field(default_factory=set)  # nodes that were drafted here

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
        return any(top_up.backup.seconds > 0 for top_up in self._top_ups)

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
            self._let_go()
            now = self._clock()
            due = {seat: seat.due(now) for seat in self._seats}
            seats = [s for s in self._seats if due[s] <= now + SOON]
            if not seats:
                await self._sleep(min(due.values(), default=math.inf) - now)
                continue
            await self._step(seats)
            if self._seats:
                self._seats.append(self._seats.pop(0))

    async def _sleep(self, seconds: float) -> None:
        """Until something arrives, or for so long."""
        with suppress(TimeoutError):  # not wait_for, which may swallow a cancellation before Python 3.12
            async with asyncio.timeout(seconds if seconds < math.inf else None):
                await self._wake.wait()

    async def _step(self, seats: Sequence[Seat]) -> None:
        seats = [s for s in seats if self._seated(s)]
        for top_up in tuple(self._top_ups):
            await self._grow(seats, top_up)
            seats = [s for s in seats if not s.gone]
        begin = self._clock()
        batch = self._plan(seats)
        if not batch:
            return
        results, spent = await self._run(lambda: self._verify([work for _, work in batch]))
        elapsed = self._clock() - begin
        if elapsed < self.floor:
            await asyncio.sleep(min(self.floor - elapsed, self.floor))  # even if the clock went back
        step = self._clock() - begin
        rows = sum(len(w.tokens) + len(w.plan.nodes) for _, w in batch)
        if all(work.choose for _, work in batch):
            self._cost.learn(rows, spent)
        for (seat, work), result in zip(batch, results, strict=True):
            self._deliver(seat, work.plan, result, step)
        f = self.figures
        f.steps, f.rows = f.steps + 1, f.rows + rows
        f.step_seconds, f.engine_seconds = f.step_seconds + step, f.engine_seconds + spent

    def _verify(self, batch: Sequence[Work]) -> tuple[Sequence[Walk | EngineError | None], float]:
        begin = self._clock()
        try:
            return self.engine.verify(batch), self._clock() - begin
        except Exception as e:  # whatever an engine runs into ends these sessions, not the server
            log.exception("the engine failed")
            return [EngineError(f"the engine failed: {type(e).__name__}")] * len(batch), self._clock() - begin

    async def _grow(self, seats: Sequence[Seat], top_up: TopUp) -> None:
        """Draft for the sessions that are about to choose."""
        verify = max(self._cost(1), self.floor)
        for seat in seats:
            assert seat.handle is not None
            session = seat.session
            if session.position - self.engine.length(seat.handle) > self.engine.chunk:
                continue
            stubs = top_up.look(session, self.width, self._least(seat))
            try:
                work = partial(_draft, top_up, stubs, verify, session, len(seats))
                chains = work() if top_up.backup.seconds == 0 else await self._run(work)
            except Exception:  # whatever a backup runs into ends it, not the sessions
                log.exception("the backup failed; going on without it")
                self._top_ups.remove(top_up)
                return
            for stub, chain in zip(stubs, chains, strict=True):
                if (grown := top_up.put(session, stub, chain)) is not None:
                    seat.grew(grown)

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
        room, shares, choosing = self.engine.chunk, list[tuple[Seat, tuple[int, ...]]](), list[Seat]()
        for seat in seats:
            assert seat.handle is not None
            missing = seat.session.after(self.engine.length(seat.handle))
            assert missing, "an engine leaves at least the last token to be run"
            taken = missing if len(missing) == 1 else missing[:room]
            if not taken:
                continue
            if len(taken) > 1:
                room -= len(taken)
            if len(taken) == len(missing):
                choosing.append(seat)
            shares.append((seat, taken))
        rows = sum(len(tokens) for _, tokens in shares)
        self._recycle(choosing, rows)
        plans = self._share_width(choosing, rows)
        return [(seat, self._work(seat, tokens, plans.get(seat))) for seat, tokens in shares]

    def _recycle(self, seats: Sequence[Seat], rows: int) -> None:
        """Offer again what edges drafted elsewhere, where that brings more tokens a second than its own time costs."""
        if self._recycling is None:
            return
        pays = NODE * sum(seat.pace for seat in seats) / max(self._cost(rows), self.floor)
        for seat in seats:
            for grown in self._recycling.offer(seat.session, max(self._least(seat), pays)):
                seat.grew(grown)

    def _share_width(self, seats: Sequence[Seat], rows: int) -> dict[Seat, Plan]:
        """The nodes that pay for their rows, as much to those who get little as to those who get much.

        What a step gives a session counts by what it gets in a step, so that no edge's many likely nodes slow the others down
        for more than they bring it: the product of all rates is what grows (proportional fairness). An edge says how likely its
        nodes are; one that is wrong about it is believed less, so that it takes nobody's rows.
        Whether a node goes along depends on better ones alone, as drawn nodes need: the rate rises to one peak and falls.
        Where many share, none offers more than a few times its part: looking through a large tree costs everybody time. Nor do
        they offer more than would pay if all were sure.
        """
        base, least = sum(1 / seat.pace for seat in seats), min((seat.pace for seat in seats), default=1.0)
        width = most_count(self.width, 1 / least, self._cost, base_gain=base, base_rows=rows, floor=self.floor)
        most = min(width, max(OFFER * width // max(len(seats), 1), LEAST_OFFER))
        offers = {seat: seat.session.likeliest(most) for seat in seats}
        reach = []
        for seat, nodes in offers.items():
            counts = seat.counts
            reach += [(r + counts, seat) for r in seat.session.tree.reaches(nodes)]
        reach.sort(key=itemgetter(0), reverse=True)
        gains = [r for r, _ in reach[:width]]
        count = best_count(gains, self._cost, base_gain=base, base_rows=rows, floor=self.floor)
        left_out = count < len(reach) or any(len(nodes) == most for nodes in offers.values())
        self._cut = reach[max(count - 1, 0)][0] if reach and left_out else -math.inf
        taken = dict.fromkeys(offers, 0)
        for _, seat in reach[:count]:
            taken[seat] += 1
        return {s: s.session.plan_of(offers[s][:n]) for s, n in taken.items()}

    def _work(self, seat: Seat, tokens: tuple[int, ...], plan: Plan | None) -> Work:
        """`plan` None: a chunk of a prompt."""
        s, choose = seat.session, plan is not None
        assert seat.handle is not None
        mask = partial(_mask, seat.constraint, tuple(s.committed)) if seat.constraint is not None and choose else None
        return Work(seat.handle, tokens, plan or Plan(), s.sampling, s.history, s.logprobs, choose, mask)

    def _deliver(self, seat: Seat, plan: Plan, result: Walk | EngineError | None, step: float) -> None:
        if seat.gone or result is None:
            return
        if isinstance(result, EngineError):
            self._fail(seat, Code.ENGINE, str(result))
            return
        tree, nodes, walked = seat.session.tree, plan.nodes, {plan.nodes[i] for i in result.accepted}
        if seat.own:
            own = seat.own = tree.alive(seat.own)
            plan = replace(plan, held=plan.held - len(own))  # a hit is what the edge had sent
            seat.learn(sum(map(math.exp, tree.reaches(n for n in nodes if n not in own))), len(walked - own))
            for grown in seat.grown:
                grown.learn(tree.root, nodes, walked)
            seat.grown = []
        else:
            seat.learn(sum(map(math.exp, tree.reaches(nodes))), len(walked))
        commit = seat.session.apply(plan, result, step)
        seat.pace += (1 - MEMORY) * (len(commit.tokens) - seat.pace)
        seat.stepped(self._clock(), len(seat.session.tree) > 0 or not plan.held)
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
) -> list[list[tuple[int, float]]]:
    return [top_up.draft(stub, verify, session.stop_ids, sessions) for stub in stubs]


def _mask(constraint: Constraint, committed: tuple[int, ...], walked: Sequence[int]) -> Mask:
    return constraint.mask((*committed, *walked))
