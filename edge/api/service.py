"""What the server's routes share, and how one answer is run: wait for the link, count, stop when the client goes."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from paceline.edge.agent import Agent
from paceline.edge.answer import Answer, Piece, Writer
from paceline.edge.api.errors import ApiError
from paceline.edge.api.metrics import Metrics
from paceline.edge.link import State
from paceline.edge.offline import DraftAlone
from paceline.edge.text import Text
from paceline.protocol.messages import Welcome
from starlette.requests import Request
from starlette.types import Receive

T = TypeVar("T")
log = logging.getLogger(__name__)
POLL_SECONDS = 0.02
UNREACHABLE = "cloud_unreachable"
ALONE = "draft-alone"  # the fingerprint of an answer that is not the target's
ALONE_CONTEXT = 2048  # tokens of prompt and text that the draft takes on by itself


@dataclass
class Service:
    """`patience`: seconds that a request waits for a link that is down before it is told so; `keys` empty: any bearer.

    With `alone`, the draft then answers by itself, and the answer says so.
    """

    agent: Agent
    text: Text
    model: str
    version: str
    keys: frozenset[str] = frozenset()
    patience: float = 10.0
    alone: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))

    async def welcome(self) -> Welcome:
        """What the verifier said of itself. Raises ApiError (502, 503) where there is none to ask."""
        link, deadline = self.agent.link, asyncio.get_running_loop().time() + self.patience
        while link.state is not State.UP:
            if link.state is State.REFUSED:
                raise ApiError(502, f"The verifier refuses this device: {link.last_error}", code="cloud_refused")
            if asyncio.get_running_loop().time() > deadline:
                reason = f": {link.last_error}" if link.last_error else ""
                raise ApiError(503, f"The verifier cannot be reached{reason}", code=UNREACHABLE, retry_after=5)
            await asyncio.sleep(POLL_SECONDS)
        assert link.welcome is not None
        return link.welcome

    @property
    def answers_alone(self) -> bool:
        """Whether the draft may answer by itself, and still can: one that failed for good is gone from the agent."""
        return self.alone and self.agent.draft is not None

    async def writer(self) -> tuple[Writer, Welcome]:
        """Who answers now, and within which bounds. Raises ApiError (502, 503) where there is nobody."""
        try:
            return self.agent, await self.welcome()
        except ApiError as e:
            draft = self.agent.draft
            if not self.alone or draft is None or e.code != UNREACHABLE:
                raise
        known = draft.vocabulary
        bounds = Welcome(1, draft.name[:256], known.size, known.fingerprint, ALONE_CONTEXT, 0, 1, 1, 0.0)
        return DraftAlone(draft, self.agent.on_draft, self.agent.clock), bounds

    def signature(self, writer: Writer) -> str | None:
        """The `system_fingerprint` of what `writer` writes: none for the target's text."""
        return ALONE if isinstance(writer, DraftAlone) else None

    @asynccontextmanager
    async def running(self, answer: Answer, writer: Writer) -> AsyncIterator[AsyncGenerator[Piece, None]]:
        """The pieces of an answer; however the block is left, the generation is over and counted then."""
        self.metrics.running.inc()
        self.metrics.alone.inc(isinstance(writer, DraftAlone))
        try:
            async with aclosing(answer.pieces(writer)) as pieces:
                yield pieces
        finally:
            self.metrics.running.dec()
            self._count(answer)

    def _count(self, answer: Answer) -> None:
        m = self.metrics
        m.prompt_tokens.inc(len(answer.request.prompt))
        m.tokens.inc(answer.count)
        if answer.generation is not None:
            f = answer.generation.figures
            m.steps.inc(f.steps)
            m.hits.inc(f.hits)
            m.drafted.inc(f.drafted)
            m.accepted.inc(f.accepted)
            if f.first_token is not None:
                m.first_token.observe(f.first_token)
        if not answer.finish:
            m.cancelled.inc()

    def observe_link(self) -> None:
        """Bring the link's gauges up to date."""
        m, link = self.metrics, self.agent.link
        m.round_trip.set(link.round_trip.seconds)
        m.link_up.set(link.state is State.UP)
        m.bytes_up.set(link.traffic.up)
        m.bytes_down.set(link.traffic.down)


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


async def unless_gone(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """`work`, cancelled as soon as the client closes the connection. Raises ClientGone then."""
    task = asyncio.ensure_future(work())
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return await task
    finally:
        for t in (task, gone):
            t.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await t


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def model_id(name: str) -> str:
    """A model's name as clients write it: one word, in small letters."""
    return re.sub(r"[^a-z0-9._/-]+", "-", name.lower()).strip("-") or "target"
