"""A link that does what links should not: cuts, silence, delays, frames that come twice, cut short or in another order.

It stands between an edge and a verifier as a Channel. Which fault strikes where is drawn from a seeded generator, so that a
campaign can be run again. A cut is aimed at a place in the protocol (the nth frame of a type, one way, before or after it
passes), so that in the long run every state of both ends is hit.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import msgspec
from paceline.protocol.channel import Channel, ChannelClosed
from paceline.protocol.messages import FROM_CLOUD, FROM_EDGE

FORGOTTEN_SECONDS = 40.0  # a verifier's websocket pings find out by then that nobody is there


class _Kind(msgspec.Struct):
    type: str


_KIND = msgspec.msgpack.Decoder(_Kind)
PLACES = [(way, kind) for way, kinds in (("up", FROM_EDGE), ("down", FROM_CLOUD)) for kind in kinds]
OFTEN = [("up", "hello"), ("down", "welcome"), ("up", "open"), ("down", "opened"), ("up", "draft"), ("down", "commit")]


@dataclass(frozen=True)
class Rates:
    """Chances: of an aimed cut for each connection, of every other fault for each frame."""

    aimed_cut: float = 0.9
    cut: float = 0.005
    delay: float = 0.05
    duplicate: float = 0.02
    truncate: float = 0.002
    swap: float = 0.005
    silence: float = 0.001
    half_open: float = 0.0005


@dataclass
class Faults:
    """What was done to the links so far, by kind; cuts also by place."""

    random: Random
    rates: Rates = field(default_factory=Rates)
    done: Counter[str] = field(default_factory=Counter)
    cuts: Counter[tuple[str, str, str]] = field(default_factory=Counter)


@dataclass
class Aim:
    """Cut at the `count`th frame of `kind` that goes `way`: `when` is before or after it passes."""

    way: str
    kind: str
    count: int
    when: str

    def hit(self, way: str, kind: str, when: str) -> bool:
        if (way, kind, when) != (self.way, self.kind, self.when):
            return False
        self.count -= 1
        return self.count == 0


class HostileChannel:
    """The edge's end of a link over `inner`; a frame takes `delay` seconds each way when nothing is wrong."""

    def __init__(self, inner: Channel, faults: Faults, delay: float) -> None:
        self._inner, self._faults, self._random, self._delay = inner, faults, faults.random, delay
        self._up: asyncio.Queue[bytes] = asyncio.Queue()
        self._down: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._closed = False
        self._quiet_until = 0.0
        self._aim = self._take_aim()
        self._tasks = [
            asyncio.create_task(self._carry("up", self._up.get, inner.send)),
            asyncio.create_task(self._carry("down", self._received, self._down.put)),
        ]

    async def send(self, frame: bytes) -> None:
        if self._closed:
            raise ChannelClosed("the link was cut")
        self._up.put_nowait(frame)

    async def receive(self) -> bytes | str:
        frame = await self._down.get()
        if frame is None:
            self._down.put_nowait(None)
            raise ChannelClosed("the link was cut")
        return frame

    async def close(self, reason: str = "") -> None:
        if self._closed:
            return
        self._closed = True
        self._down.put_nowait(None)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self._quiet_until == float("inf"):  # the other end hears nothing of it
            asyncio.get_running_loop().call_later(FORGOTTEN_SECONDS, self._forget)
        else:
            await self._inner.close(reason)

    def _forget(self) -> None:
        self._forgetting = asyncio.ensure_future(self._inner.close("nobody answers"))

    async def _received(self) -> bytes:
        frame = await self._inner.receive()
        return frame if isinstance(frame, bytes) else frame.encode()

    async def _carry(
        self, way: str, source: Callable[[], Awaitable[bytes]], sink: Callable[[bytes], Awaitable[None]]
    ) -> None:
        with suppress(ChannelClosed):
            while not self._closed:
                await self._pass(way, await source(), source, sink)
        await self.close()

    async def _pass(
        self, way: str, frame: bytes, source: Callable[[], Awaitable[bytes]], sink: Callable[[bytes], Awaitable[None]]
    ) -> None:
        kind = _kind(frame)
        if self._cut(way, kind, "before"):
            return
        await asyncio.sleep(self._delay + self._drawn_delay())
        if (wait := self._quiet_until - _now()) > 0:
            if wait == float("inf"):
                return  # half open: it goes nowhere
            await asyncio.sleep(wait)
        if self._strikes("truncate"):
            frame = frame[: self._random.randrange(len(frame))]
        if self._strikes("swap"):
            with suppress(TimeoutError):
                await sink(await asyncio.wait_for(source(), 0.5))
        await sink(frame)
        if self._strikes("duplicate"):
            await sink(frame)
        self._cut(way, kind, "after")

    def _drawn_delay(self) -> float:
        if self._strikes("silence"):
            self._quiet_until = max(self._quiet_until, _now() + self._random.uniform(5.0, 12.0))
        if self._strikes("half_open"):
            self._quiet_until = float("inf")
        return self._random.expovariate(5.0) if self._strikes("delay") else 0.0

    def _strikes(self, fault: str) -> bool:
        struck: bool = self._random.random() < getattr(self._faults.rates, fault)
        self._faults.done[fault] += struck
        return struck

    def _take_aim(self) -> Aim | None:
        if self._random.random() >= self._faults.rates.aimed_cut:
            return None
        way, kind = self._random.choice(OFTEN if self._random.random() < 0.8 else PLACES)
        return Aim(way, kind, self._random.choice([1, 1, 2, 3, 8]), self._random.choice(["before", "after"]))

    def _cut(self, way: str, kind: str, when: str) -> bool:
        aimed = self._aim is not None and self._aim.hit(way, kind, when)
        if self._closed or not (aimed or self._random.random() < self._faults.rates.cut):
            return False
        self._faults.done["cut"] += 1
        self._faults.cuts[way, kind, when] += 1
        self._cutting = asyncio.ensure_future(self.close())
        return True


def _kind(frame: bytes) -> str:
    try:
        return _KIND.decode(frame).type
    except (ValueError, OverflowError):
        return ""


def _now() -> float:
    return asyncio.get_running_loop().time()
