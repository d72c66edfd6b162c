"""Sessions in vLLM: each is a request of its engine, whose tokens become commits, and whose tree lies in the mailbox.

vLLM makes the steps; this only follows them. A session that has to wait (nothing is acknowledged, its owner has used up what
it may) gives its request up and asks for the rest later, which the prefix cache makes cheap. Clock, engine and mailbox are
passed in; vLLM itself is not imported here.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from itertools import count
from typing import Any, Protocol

import numpy as np
from paceline.cloud.scheduler import Figures, Seat
from paceline.cloud.vllm.mailbox import WINDOW, Branches, Mailbox
from paceline.protocol.cloud_session import CloudSession, Logprobs, Plan, Walk
from paceline.protocol.errors import Code, EngineError, ProtocolError

log = logging.getLogger(__name__)


class Output(Protocol):
    """What vLLM streams: tokens since the last one, and for each a mapping of token to something with a `logprob`."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Any]] | None


#: Asks vLLM for what is left of a session's text; closing the generator gives the request up.
Generate = Callable[[CloudSession, str], AsyncGenerator[Output, None]]


class Requests:
    """A `Driver` over vLLM. `width`: tokens of a drafted chain, at most."""

    floor = 0.0
    drafts = rejects = False
    blocks = None  # vLLM tells of its cache by itself, on the same page of metrics

    def __init__(self, generate: Generate, mailbox: Mailbox, clock: Callable[[], float], width: int) -> None:
        self.width, self.figures = width, Figures()
        self.idle = asyncio.Event()
        self.idle.set()
        self._generate, self._mailbox, self._clock = generate, mailbox, clock
        self._free = list(range(mailbox.slots))
        self._slots: dict[Seat, int] = {}
        self._written: dict[Seat, tuple[int, int]] = {}  # length of the text and size of the tree that the mailbox has
        self._tasks: dict[Seat, asyncio.Task[None]] = {}
        self._names = count()
        self._wake = asyncio.Event()
        self._writing: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, seat: Seat) -> None:
        assert self._free, "no more sessions run than there are slots"
        self._slots[seat] = slot = self._free.pop()
        self._mailbox.clear(slot)
        self._tasks[seat] = asyncio.get_running_loop().create_task(self._run(seat))
        self.idle.clear()
        self.wake()

    def remove(self, seat: Seat) -> None:
        seat.gone = True
        if (task := self._tasks.pop(seat, None)) is None:
            return
        if task is not asyncio.current_task():
            task.cancel()
        self._written.pop(seat, None)
        self._mailbox.clear(slot := self._slots.pop(seat))
        self._free.append(slot)
        if not self._tasks:
            self.idle.set()

    def wake(self) -> None:
        """Trees may have grown. They are written once for all that arrives together."""
        self._wake.set()
        if self._writing is None:
            self._writing = asyncio.get_running_loop().call_soon(self._write)

    async def run(self) -> None:
        """vLLM steps by itself."""
        await asyncio.Event().wait()

    def _write(self) -> None:
        self._writing = None
        for seat, slot in self._slots.items():
            session = seat.session
            state = session.position, session.tree.next_id
            if self._written.get(seat) != state:
                self._written[seat] = state
                end = np.array(session.after(max(session.position - WINDOW, 0)), np.int32)
                self._mailbox.publish(slot, session.position, end, Branches.of(session.tree, session.max_tokens - 1))

    # ---- one session

    async def _run(self, seat: Seat) -> None:
        try:
            while not seat.session.finish:
                await self._turn(seat)
                await self._follow(seat)
        except EngineError as e:
            self._fail(seat, str(e))
        except Exception as e:  # whatever vLLM runs into ends this session, not the server
            log.exception("vLLM failed")
            self._fail(seat, f"vLLM failed: {type(e).__name__}")

    async def _turn(self, seat: Seat) -> None:
        """Until the session may go on."""
        while seat.unheard or (pause := seat.pause()) > 0:
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if seat.unheard else pause):
                    await self._wake.wait()

    async def _follow(self, seat: Seat) -> None:
        """Commit what vLLM writes, until the text ends or the session has to wait."""
        session, since, before = seat.session, self._clock(), seat.session.position
        async with aclosing(self._generate(session, f"paceline-{next(self._names)}")) as outputs:
            async for output in outputs:
                now = self._clock()
                self._deliver(seat, output, max(now - since, 1e-9))
                since = now
                if seat.gone or session.finish or seat.unheard or seat.pause() > 0:
                    return
        if session.position == before:
            raise EngineError("vLLM ended the request without a token; it may be shutting down")

    def _deliver(self, seat: Seat, output: Output, seconds: float) -> None:
        """One commit for each step: where this loop is late, vLLM hands out several steps' tokens together."""
        tokens, told = list(output.token_ids), output.logprobs or ()
        session, slot = seat.session, self._slots[seat]
        while tokens and not session.finish and not seat.gone:
            here = session.position
            held, verified = self._mailbox.step(slot, here) or (0, 0)
            size = next((n for n in range(1, len(tokens)) if self._mailbox.step(slot, here + n)), len(tokens))
            step, tokens = tokens[:size], tokens[size:]
            logprobs = tuple(_told(one, token, session.logprobs or 0) for one, token in zip(told, step, strict=False))
            told = told[size:]
            for plan, walk in _walks(session, step, held, verified, logprobs):
                commit = session.apply(plan, walk, seconds)
                self.figures.count(commit)
                seat.stepped(self._clock(), True)
                if commit.finish:
                    self.remove(seat)
                seat.on_commit(commit)
                if seat.gone:
                    return
        self.wake()

    def _fail(self, seat: Seat, text: str) -> None:
        self.remove(seat)
        seat.on_error(ProtocolError(Code.ENGINE, text, seat.session.sid))


def _walks(
    session: CloudSession, tokens: Sequence[int], held: int, verified: int, logprobs: tuple[Logprobs, ...]
) -> Iterator[tuple[Plan, Walk]]:
    """A step's tokens as the target's walk through the session's tree, of which `verified` nodes were run.

    The nodes that it left aside are known by number only. Tokens of steps that nothing is known of come one by one.
    """
    while tokens:
        path = _path(session, tokens[: min(verified, len(tokens) - 1)])
        n = len(path)
        aside = (-1,) * (verified - n)
        plan = Plan((*path, *aside), (*tokens[:n], *aside), (*range(-1, n - 1), *aside), held=held)
        yield plan, Walk(tuple(range(n)), tokens[n], logprobs[: n + 1])
        tokens, logprobs = tokens[n + 1 :], logprobs[n + 1 :]
        held = verified = 0


def _path(session: CloudSession, tokens: Sequence[int]) -> list[int]:
    """Nodes below the root that have these tokens, as far as there are any."""
    tree, nodes = session.tree, [session.tree.root]
    for token in tokens:
        if (child := tree.child(nodes[-1], token)) is None:
            break
        nodes.append(child)
    return nodes[1:]


def _told(of: Mapping[int, Any], chosen: int, count: int) -> Logprobs:
    """The chosen token, then the likeliest `count`, with their log-probabilities as vLLM gives them."""
    top = sorted(of, key=lambda token: -of[token].logprob)[:count]
    return tuple((token, round(float(of[token].logprob), 4)) for token in (chosen, *top))
