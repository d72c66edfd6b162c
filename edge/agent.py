"""The device's engine: a link, a draft and trees in, a stream of committed tokens out.

    agent = Agent(link_factory, draft, predictor, ...)
    async with agent:
        async for event in agent.generate(request): ...

Two things go on side by side and never wait for each other. The link delivers commits, which move the trees on. The
drafter runs the most useful nodes of all generations, and what comes of it is sent. Clock, runner and transport are passed in;
nothing here knows whether time is real.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random
from types import TracebackType
from typing import Self

import numpy as np
from paceline.edge.draft import Draft, Extended
from paceline.edge.drafter import Drafter, Runner
from paceline.edge.generation import Generation, Report
from paceline.edge.link import Link, State
from paceline.edge.policies import Policy
from paceline.edge.predictor import Predictor
from paceline.edge.timeline import Timeline
from paceline.protocol.channel import Channel
from paceline.protocol.edge_session import Committed, EdgeSession, Phase
from paceline.protocol.errors import LinkError, PacelineError, ProtocolError
from paceline.protocol.guesses import Guesses
from paceline.protocol.messages import BACKUP, Commit, Error, Hello, Message, Opened, Welcome
from paceline.protocol.messages import Draft as DraftMessage
from paceline.protocol.ngrams import Ngrams, Trust
from paceline.protocol.request import GenerationRequest
from paceline.protocol.vocabulary import Vocabulary

ACK_EVERY = 64  # tokens after which the cloud is told what has arrived, where no draft tells it


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
        ngrams: Ngrams | None = None,
    ) -> None:
        """`ngrams`: what the target is known to write. Raises PacelineError if it is of another vocabulary."""
        if ngrams is not None:
            ngrams.check(vocabulary)
        hello = Hello(
            versions=(1,),
            vocabulary=vocabulary.name[:256],
            vocabulary_size=vocabulary.size,
            fingerprint=vocabulary.fingerprint,
            agent=name,
        )
        self.link = Link(connect, hello, self, clock=clock, random=random, attempts=attempts)
        self.policy, self.predictor = policy, predictor
        self._ngrams, self._trust = ngrams if policy.ngrams else None, Trust()
        self._vocabulary = vocabulary
        self._random = random
        self._sids = itertools.count(1)
        self._generations: dict[int, Generation] = {}  # by the session number they are open under
        self.newest: Generation | None = None  # the one opened last, ended or not
        self._waiting: list[Generation] = []  # to be opened once the link is up
        self.clock, self.timeline = clock, Timeline(clock)
        drafts = draft if policy.drafts else None
        self.drafter = Drafter(drafts, policy.width, run, self.timeline, self._generations, self._send_nodes)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep_link())]
        if self.draft is not None:
            self._tasks.append(asyncio.create_task(self.drafter.keep_drafting()))
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
            self.drafter.close(generation)
        await self.drafter.end()

    @property
    def generations(self) -> dict[int, Generation]:
        """Those that are open at the cloud, the newest last. Not to be changed."""
        return self._generations

    @property
    def draft(self) -> Draft | None:
        """What drafts here; None where nothing does, or does any more."""
        return self.drafter.draft

    def on_draft(self, work: Callable[[], Extended]) -> Awaitable[Extended]:
        """Run work of the draft where its steps run, one at a time with them."""
        return self.drafter.run(work)

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
            self.clock(),
            one_way=lambda: self.link.round_trip.seconds / 2,
            row_seconds=lambda: self.drafter.cost(1),
            more_seconds=self.drafter.more_seconds,
            rounds=self.policy.new_rounds(),
            fan_out=self.policy.candidates,
            thrift=self.policy.thrift / 100,
            random=np.random.default_rng(self._random.getrandbits(128)),
        )
        if self.policy.drafts and self.policy.repeats and generation.rounds is None and not generation.draws:
            # beside draws a guess would stand where they belong
            generation.guesses = Guesses((*request.prompt, *held), self._ngrams, self._trust)
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
        self.drafter.open(generation)
        if self.link.state is State.UP:
            self._open(generation)
            self.drafter.wake()  # there is time to draft while it opens
        else:
            self._waiting.append(generation)

    def _link_error(self) -> PacelineError | None:
        """Why there will be no link any more, if so."""
        if not self._tasks or not self._tasks[0].done():
            return None
        e = None if self._tasks[0].cancelled() else self._tasks[0].exception()
        return _told(e) if isinstance(e, Exception) else LinkError("the link is closed")

    def _leave(self, generation: Generation) -> None:
        session, generation.left = generation.session, True
        if session.phase in (Phase.OPENING, Phase.RUNNING):
            if session.sid in self._generations:
                self.link.send(session.cancel())
            session.phase = Phase.DONE
        self._generations.pop(session.sid, None)
        if generation in self._waiting:
            self._waiting.remove(generation)
        self.drafter.close(generation)

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
                self.drafter.wake()
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
        generation.prepare(self.policy.waits and self.draft is not None and not drafts, self.clock())
        self.link.send(generation.session.open(sid))

    def _committed(self, generation: Generation, events: Sequence[Committed]) -> None:
        generation.retries = 0  # what counts are failures without progress in between
        for event in events:
            generation.committed(event, self.clock())
            commit = event.commit
            self.timeline.committed(len(event.tokens), commit.step, commit.accepted, commit.held)
            self.drafter.committed(generation, event)
            generation.events.put_nowait(event)
        session = generation.session
        if session.phase is Phase.DONE:
            self._generations.pop(session.sid, None)
            generation.events.put_nowait(None)
            if self.link.leaving and self.link_may_go():
                self.link.leave()
            return
        if self.draft is None and len(session.committed) // ACK_EVERY != generation.acknowledged // ACK_EVERY:
            generation.acknowledged = len(session.committed)
            self.link.send(session.ack())
        self._send_nodes(generation)
        self.drafter.wake()

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

    def _send_nodes(self, generation: Generation, wait: float = 0.0) -> None:
        """`wait`: seconds until there is another occasion; what need not leave before then waits for it."""
        if generation.session.phase is not Phase.RUNNING or self.link.state is not State.UP:
            return
        for message in generation.send(self.clock(), wait):
            self.link.send(message)
            if isinstance(message, DraftMessage):
                self.timeline.sent(len(message.tokens))


def _told(e: Exception) -> PacelineError:
    return e if isinstance(e, PacelineError) else LinkError(f"the link failed: {type(e).__name__}: {e}")
