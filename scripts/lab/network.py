"""A link with a round trip, jitter, bandwidth and loss, as a Channel around another one; it runs under any clock.

A frame leaves when the frames before it have left (bandwidth), travels for half a round trip plus jitter, and never
overtakes: as over TCP. A lost packet comes again after the retransmission time-out, and what follows waits for it.
Everything that was carried is told to `seen`.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Literal

from paceline.protocol.channel import Channel, ChannelClosed

OVERHEAD = 60  # bytes that IP, TCP with timestamps and the websocket add to a frame
LEAST_TIMEOUT = 0.2  # of a retransmission, as in Linux
Way = Literal["up", "down"]


@dataclass(frozen=True)
class LinkSpec:
    """Seconds and bits a second; `jitter` is the mean of an exponential delay each way. Bandwidth 0: no limit."""

    round_trip: float = 0.0
    jitter: float = 0.0
    up: float = 0.0
    down: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True)
class Carried:
    """A frame's way: when it was handed over, when it arrived."""

    way: Way
    sent: float
    arrived: float
    frame: bytes


class Wire:
    """One direction: when does a frame that is handed over now arrive?"""

    def __init__(self, spec: LinkSpec, bandwidth: float, random: Random, overhead: int = OVERHEAD) -> None:
        self._spec, self._bandwidth, self._random, self._overhead = spec, bandwidth, random, overhead
        self._free = self._last = 0.0

    @property
    def busy_until(self) -> float:
        """When everything handed over so far has left."""
        return self._free

    def arrival(self, now: float, size: int) -> float:
        start = max(now, self._free)
        self._free = start + (8 * (size + self._overhead) / self._bandwidth if self._bandwidth else 0.0)
        delay = self._spec.round_trip / 2
        if self._spec.jitter:
            delay += self._random.expovariate(1 / self._spec.jitter)
        while self._spec.loss and self._random.random() < self._spec.loss:
            delay += max(LEAST_TIMEOUT, 2 * self._spec.round_trip)
        self._last = max(self._last, self._free + delay)
        return self._last


class LinkChannel:
    """The edge's end of a link around `inner`. `seen` is told of every frame when it arrives."""

    def __init__(self, inner: Channel, spec: LinkSpec, random: Random, seen: Callable[[Carried], None]) -> None:
        self._inner, self._seen = inner, seen
        self._up, self._down = Wire(spec, spec.up, random), Wire(spec, spec.down, random)
        self._out: asyncio.Queue[Carried] = asyncio.Queue()
        self._in: asyncio.Queue[Carried | ChannelClosed] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._push()), asyncio.create_task(self._pull())]

    async def send(self, frame: bytes) -> None:
        if self._tasks[0].done():
            raise ChannelClosed("the link is closed")
        now = _now()
        self._out.put_nowait(Carried("up", now, self._up.arrival(now, len(frame)), frame))

    async def receive(self) -> bytes | str:
        carried = await self._in.get()
        if isinstance(carried, ChannelClosed):
            raise carried
        await _until(carried.arrived)
        self._seen(carried)
        return carried.frame

    async def close(self, reason: str = "") -> None:
        for task in self._tasks:
            task.cancel()
        await self._inner.close(reason)

    async def _push(self) -> None:
        with suppress(ChannelClosed):
            while True:
                carried = await self._out.get()
                await _until(carried.arrived)
                self._seen(carried)
                await self._inner.send(carried.frame)

    async def _pull(self) -> None:
        while True:
            try:
                frame = await self._inner.receive()
            except ChannelClosed as e:
                self._in.put_nowait(e)
                return
            data = frame.encode() if isinstance(frame, str) else frame
            now = _now()
            self._in.put_nowait(Carried("down", now, self._down.arrival(now, len(data)), data))


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _until(due: float) -> None:
    wait = due - _now()
    if wait > 0:
        await asyncio.sleep(wait)
