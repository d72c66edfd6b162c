"""Virtual time: an asyncio event loop whose clock jumps to the next timer, and a link in memory.

The same agent, sessions, planner, scheduler and connection run under it as in real time. Nothing waits: a sleep of 30
ms costs no time, and two runs give the same figures. What takes no timer takes no virtual time, so every cost is
charged by whoever models it.
"""

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.edge.draft import Extended
from paceline.protocol.channel import ChannelClosed

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: what the loop would have slept is added to its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("nothing is left to happen, and somebody still waits")
            self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time, which begins at zero."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class MemoryChannel:
    """One end of a link in memory; `pair` makes both."""

    def __init__(self) -> None:
        self._in: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.other: MemoryChannel = self
        self._closed = False

    @classmethod
    def pair(cls) -> tuple["MemoryChannel", "MemoryChannel"]:
        a, b = cls(), cls()
        a.other, b.other = b, a
        return a, b

    async def send(self, frame: bytes) -> None:
        self.put(frame)

    def put(self, frame: bytes) -> None:
        """As `send`, which never waits here."""
        if self._closed:
            raise ChannelClosed("the link was cut")
        self.other._in.put_nowait(frame)

    async def receive(self) -> bytes | str:
        frame = await self._in.get()
        if frame is None:
            self._in.put_nowait(None)
            raise ChannelClosed("the link was cut")
        return frame

    async def close(self, reason: str = "") -> None:
        for end in (self, self.other):
            if not end._closed:
                end._closed = True
                end._in.put_nowait(None)


@dataclass
class Meter:
    """Runs a verifier's work at once, then lets pass what that work says it cost. The scheduler's floor comes on top."""

    seconds: float = 0.0

    def charge(self, seconds: float) -> None:
        self.seconds += seconds

    async def run(self, work: Callable[[], T]) -> T:
        result = work()
        seconds, self.seconds = self.seconds, 0.0
        if seconds:
            await asyncio.sleep(seconds)
        return result


def draft_runner(first: float, more: float) -> Callable[[Callable[[], Extended]], Awaitable[Extended]]:
    """Runs a draft step at once; a batch of n rows then costs first + more (n - 1) virtual seconds."""

    async def run_draft(work: Callable[[], Extended]) -> Extended:
        done = work()
        if done.ran:
            await asyncio.sleep(first + more * (done.ran - 1))
        return done

    return run_draft


async def run_engine(work: Callable[[], T]) -> T:
    """Runs a verification at once; the scheduler's floor is what it costs."""
    return work()
