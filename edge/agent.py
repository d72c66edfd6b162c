"""The device's engine: a link, a draft and trees in, a stream of committed tokens out.

    agent = Agent(link_factory, draft, predictor, ...)
    async with agent:
        async for event in agent.generate(request): ...

Two things go on side by side and never wait for each other. The link delivers commits, which move the trees on. The
drafting loop picks the most useful nodes of all generations, runs them as one batch on a thread of its own, and sends
what came of it. Clock, runner and transport are passed in; nothing here knows whether time is real.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from paceline.edge.draft import Candidates, Draft, Extended, Row
from paceline.edge.generation import Generation, Report, share
from paceline.edge.link import Link, State
from paceline.edge.policies import Policy
from paceline.edge.predictor import Predictor
from paceline.edge.repeats import Repeats
from paceline.edge.timeline import Timeline
from paceline.protocol.channel import Channel
from paceline.protocol.cost import StepCost, best_count
from paceline.protocol.edge_session import Committed, EdgeSession, Phase
from paceline.protocol.errors import EngineError, LinkError, PacelineError, ProtocolError
from paceline.protocol.messages import BACKUP, Commit, Error, Hello, Message, Opened, Welcome
from paceline.protocol.messages import Draft as DraftMessage
from paceline.protocol.request import GenerationRequest
from paceline.protocol.vocabulary import Vocabulary

MAX_ROWS = 16  # rows of one draft step
log = logging.getLogger(__name__)
ACK_EVERY = 64  # tokens after which the cloud is told what has arrived, where no draft tells it


class Runner(Protocol):
    """Runs a draft step outside the event loop; in virtual time it takes what its rows cost in virtual seconds."""

    def __call__(self, work: Callable[[], Extended], /) -> Awaitable[Extended]: ...


class Agent:
    def __init__(
        self,
        connect: Callable[[], Awaitable[Channel]],
        vocabulary: Vocabulary,
        policy: Policy,
        draft: Draft | None,
        predictor: Predictor,
        run: Runner,
        *,
        clock: Callable[[], float],
        random: Random,
        attempts: int | None = None,
        name: str = "paceline",
    ) -> None:
        hello = Hello(
            versions=(1,),
            vocabulary=vocabulary.name[:256],
            vocabulary_size=vocabulary.size,
            fingerprint=vocabulary.fingerprint,
            agent=name,
        )
        self.link = Link(connect, hello, self, clock=clock, random=random, attempts=attempts)
        self.policy, self.predictor = policy, predictor
        self._draft = draft if policy.drafts else None
        self.cost = StepCost(self._draft.step_cost if self._draft is not None else ())
        self._vocabulary = vocabulary
        self._run, self._clock, self._random = run, clock, random
        self._sids = itertools.count(1)
        self._generations: dict[int, Generation] = {}  # by the session number they are open under
        self.newest: Generation | None = None  # the one opened last, ended or not
        self._waiting: list[Generation] = []  # to be opened once the link is up
        self._calls: list[Callable[[], None]] = []  # for the draft, before its next batch
        self.clock, self.timeline = clock, Timeline(clock)
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.forward_seconds = 0.0  # spent in the draft's forward so far

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep_link())]
        if self._draft is not None:
            self._tasks.append(asyncio.create_task(self._keep_drafting()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError, PacelineError):
                await task
        for generation in [*self._waiting, *self._generations.values()]:
            generation.events.put_nowait(LinkError("the agent was closed"))
            self._calls.append(partial(self._close_draft, generation))
        if self._draft is not None and self._calls:  # it may serve another agent, and has its room back
            calls, self._calls = self._calls, []
            await self._run(lambda: self._work(calls, []))

    @property
    def generations(self) -> dict[int, Generation]:
        """Those that are open at the cloud, the newest last. Not to be changed."""
        return self._generations

    @property
    def draft(self) -> Draft | None:
        return self._draft

    def on_draft(self, work: Callable[[], Extended]) -> Awaitable[Extended]:
        """Run work of the draft where its steps run, one at a time with them."""
        return self._run(work)

    # ---- generating

    async def generate(
        self,
        request: GenerationRequest,
        report: Report | None = None,
        *,
        held: Sequence[int] = (),
        resume: str = "",
    ) -> AsyncGenerator[Committed, None]:
        """Stream what the target writes. Leaving the iterator early cancels the generation at the cloud.

        `held` is the beginning of the text where that is known already, as after a restart; what follows it is streamed.

        Raises ProtocolError if the cloud refuses, LinkError if it cannot be reached.
        """
        session = EdgeSession(request, rule=self.policy.rule, vocabulary_size=self._vocabulary.size)
        session.restore(held, resume)
        generation = Generation(
            session,
            self.predictor,
            self._clock(),
            one_way=lambda: self.link.round_trip.seconds / 2,
            row_seconds=lambda: self.cost(1),
            rounds=self.policy.new_rounds(),
            fan_out=self.policy.candidates,
            thrift=self.policy.thrift / 100,
            random=np.random.default_rng(self._random.getrandbits(128)),
        )
        if self._draft is not None and self.policy.repeats and generation.rounds is None and not generation.draws:
            generation.repeats = Repeats(
                (*request.prompt, *held)
            )  # beside draws a repeat would stand where they belong
        if report is not None:
            report(generation)
        self._enter(generation)
        try:
            while (event := await generation.events.get()) is not None:
                if isinstance(event, PacelineError):
                    raise event
                yield event
        finally:
            self._leave(generation)

    def _enter(self, generation: Generation) -> None:
        if (dead := self._link_error()) is not None:
            raise dead
        if self._draft is not None:
            draft, prompt = self._draft, (*generation.session.prompt, *generation.session.committed)
            self._calls.append(lambda: self._open_draft(generation, draft, prompt))
        if self.link.state is State.UP:
            self._open(generation)
            self._wake.set()  # there is time to draft while it opens
        else:
            self._waiting.append(generation)

    def _link_error(self) -> PacelineError | None:
        """Why there will be no link any more, if so."""
        if not self._tasks or not self._tasks[0].done():
            return None
        e = None if self._tasks[0].cancelled() else self._tasks[0].exception()
        return _told(e) if isinstance(e, Exception) else LinkError("the link is closed")

    def _open_draft(self, generation: Generation, draft: Draft, prompt: Sequence[int]) -> None:
        with suppress(EngineError):  # no room in the draft: this one is decoded plainly
            generation.handle = draft.open(prompt) if prompt else None

    def _leave(self, generation: Generation) -> None:
        session, generation.left = generation.session, True
        if session.phase in (Phase.OPENING, Phase.RUNNING):
            if session.sid in self._generations:
                self.link.send(session.cancel())
            session.phase = Phase.DONE
        self._generations.pop(session.sid, None)
        if generation in self._waiting:
            self._waiting.remove(generation)
        if self._draft is not None:
            self._calls.append(lambda: self._close_draft(generation))
            self._wake.set()

    def _close_draft(self, generation: Generation) -> None:
        if generation.handle is not None and self._draft is not None:
            self._draft.close(generation.handle)
            generation.handle = None

    # ---- the link

    async def _keep_link(self) -> None:
        try:
            await self.link.run()
        except Exception as e:  # a fault of our own must not leave anybody waiting for ever
            for generation in [*self._waiting, *self._generations.values()]:
                generation.events.put_nowait(_told(e))
            raise

    def link_up(self, welcome: Welcome) -> None:
        waiting, self._waiting = self._waiting, []
        for generation in waiting:
            self._open(generation)

    def link_down(self, reason: str) -> None:
        """Every generation goes on as soon as the link is back, from what is held here."""
        self._waiting.extend(self._generations.values())
        self._generations.clear()

    def link_may_go(self) -> bool:
        return not self._generations

    def link_message(self, message: Message) -> None:
        sid = getattr(message, "sid", None)
        generation = self._generations.get(sid) if sid is not None else None
        if generation is None:
            return
        try:
            events = generation.session.receive(message)
        except ProtocolError as e:
            self._contradicted(generation, e)
            return
        match message:
            case Opened():
                generation.reopened()
                self._send_nodes(generation)
                self._wake.set()
            case Commit():
                self._committed(generation, events)
            case Error() if generation.session.phase is Phase.FAILED:
                self._failed(generation)

    def _open(self, generation: Generation) -> None:
        if self.link.leaving:  # those that run go along; they come up elsewhere as they would after a cut
            self._waiting.append(generation)
            self.link.leave()
            return
        sid = next(self._sids)
        self._generations[sid] = self.newest = generation
        if self.link.welcome is not None:
            generation.live_limit = self.link.welcome.nodes
            generation.horizon.step = generation.horizon.step or self.link.welcome.verify_floor
        drafts = self.link.welcome is not None and BACKUP in self.link.welcome.features
        generation.prepare(self.policy.waits and self._draft is not None and not drafts, self._clock())
        self.link.send(generation.session.open(sid))

    def _committed(self, generation: Generation, events: Sequence[Committed]) -> None:
        generation.retries = 0  # what counts are failures without progress in between
        for event in events:
            generation.committed(event, self._clock())
            commit = event.commit
            self.timeline.committed(len(event.tokens), commit.step, commit.accepted, commit.held)
            if self._draft is not None:
                self._calls.append(self._commit_call(generation, event))
            generation.events.put_nowait(event)
        session = generation.session
        if session.phase is Phase.DONE:
            self._generations.pop(session.sid, None)
            generation.events.put_nowait(None)
            if self.link.leaving and self.link_may_go():
                self.link.leave()
            return
        if self._draft is None and len(session.committed) // ACK_EVERY != generation.acknowledged // ACK_EVERY:
            generation.acknowledged = len(session.committed)
            self.link.send(session.ack())
        self._send_nodes(generation)
        self._wake.set()

    def _commit_call(self, generation: Generation, event: Committed) -> Callable[[], None]:
        live = generation.placed()

        def call() -> None:
            if generation.handle is not None and self._draft is not None:
                self._draft.commit(generation.handle, event.tokens, event.walked, live)

        return call

    def _failed(self, generation: Generation) -> None:
        """The cloud ended a generation: try again where it says that may help, else it is over."""
        error = generation.session.error
        assert error is not None
        self._generations.pop(generation.session.sid, None)
        if error.retryable and generation.retries < 8:
            generation.retries += 1
            wait = (error.retry_after or 0.5) * self._random.uniform(0.5, 1.5)
            asyncio.get_running_loop().call_later(wait, self._reopen, generation)
        else:
            generation.events.put_nowait(error)

    def _contradicted(self, generation: Generation, error: ProtocolError) -> None:
        """The cloud and this side disagree about the text: open anew from what is held here, a few times."""
        self._generations.pop(generation.session.sid, None)
        self.link.send(generation.session.cancel())
        generation.session.error, generation.session.finish = error, ""
        if generation.retries < 2:
            generation.retries += 1
            self._reopen(generation)
        else:
            generation.events.put_nowait(error)

    def _reopen(self, generation: Generation) -> None:
        """Ask again, unless nobody listens any more, or the link was given up meanwhile."""
        if generation.left:
            return
        if (dead := self._link_error()) is not None:
            generation.events.put_nowait(dead)
            return
        generation.session.phase = Phase.OPENING
        if self.link.state is State.UP:
            self._open(generation)
        else:
            self._waiting.append(generation)

    # ---- drafting

    async def _keep_drafting(self) -> None:
        """Draft until the agent ends. A fault of the draft ends drafting, never an answer: they all go on plainly."""
        try:
            await self._draft_on()
        except Exception:
            log.exception("drafting failed; answers go on without it")
            self._draft = None

    async def _draft_on(self) -> None:
        while True:
            self._wake.clear()
            chosen = self._pick()
            if not chosen and not self._calls:
                for generation in self._generations.values():
                    self._send_nodes(generation)
                await self._wake.wait()
                continue
            rows = [g.row(node) for g, node in chosen]
            for generation in {g: None for g, _ in chosen}:
                generation.in_flight = frozenset(node for g, node in chosen if g is generation)
            calls, self._calls = self._calls, []
            begin = self._clock()
            done = await self._run(lambda: self._work(calls, rows))  # noqa: B023 - awaited at once
            if 0 < done.ran <= MAX_ROWS:
                self.cost.learn(done.ran, self._clock() - begin)
            if done.ran:
                self.timeline.drafted(begin, done.ran)
            self.forward_seconds += done.forward
            for (generation, node), candidates in zip(chosen, done.found, strict=True):
                self._ran(generation, node, candidates)
            for generation in {g: None for g, _ in chosen}:
                generation.in_flight = frozenset()
                self._send_nodes(generation, self.cost(len(chosen)))

    def _pick(self) -> list[tuple[Generation, int]]:
        live = (Phase.OPENING, Phase.RUNNING)  # what is drafted while a session opens is sent when it is open
        running = [g for g in self._generations.values() if g.session.phase in live and g.handle is not None]
        if not running:
            return []
        chosen = share(running, self.policy.width or MAX_ROWS, self._clock())
        count = best_count([u for u, _, _ in chosen], self.cost) if self.policy.width is None else len(chosen)
        return [(g, node) for _, g, node in chosen[: max(count, 1)]]

    def _work(self, calls: Sequence[Callable[[], None]], rows: Sequence[Row]) -> Extended:
        """On the draft's thread: what happened meanwhile, in order, then the batch."""
        assert self._draft is not None
        for call in calls:
            call()
        if not rows:
            return Extended()
        try:
            return self._draft.extend(rows)
        except EngineError as e:  # these generations go on plainly
            log.warning("the draft could not run: %s", e)
            return Extended([None] * len(rows))

    def _ran(self, generation: Generation, node: int, found: Candidates | None) -> None:
        if found is not None:
            generation.ran(node, found)
        else:
            generation.frontier.discard(node)

    def _send_nodes(self, generation: Generation, wait: float = 0.0) -> None:
        """`wait`: seconds until there is another occasion; what need not leave before then waits for it."""
        if generation.session.phase is not Phase.RUNNING or self.link.state is not State.UP:
            return
        for message in generation.send(self._clock(), wait):
            self.link.send(message)
            if isinstance(message, DraftMessage):
                self.timeline.sent(len(message.tokens))


def _told(e: Exception) -> PacelineError:
    return e if isinstance(e, PacelineError) else LinkError(f"the link failed: {type(e).__name__}: {e}")
