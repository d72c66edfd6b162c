"""The link to the cloud: connect, greet, measure the round trip, and come back after every cut.

    link = Link(connect, hello, listener, ...)
    await link.run()            # for ever; the listener hears of the link going up, of every message, of it going down
    link.send(message)          # while it is up

Back-off is exponential with full jitter, so that a thousand devices do not come back in one second. Nothing is
retried that cannot get better: another vocabulary or protocol version ends `run` with the error. Knows nothing about
generations.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Protocol

from paceline.protocol.channel import Channel, ChannelClosed
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.errors import FATAL, Code, LinkError, ProtocolError
from paceline.protocol.messages import Error, Goaway, Hello, Message, Ping, Pong, Welcome

FIRST_BACK_OFF, LAST_BACK_OFF = 0.25, 15.0
GREETING_SECONDS = 10.0
PING_SECONDS = 1.0
STEADY_SECONDS = 5.0  # a link that was up for longer than this comes back at once
SILENCE_SECONDS = 15.0  # a link on which no pong comes for this long is taken for dead


class State(Enum):
    CONNECTING = "connecting"
    UP = "connected"
    DOWN = "disconnected"
    REFUSED = "refused"


class Listener(Protocol):
    def link_up(self, welcome: Welcome) -> None: ...
    def link_message(self, message: Message) -> None: ...
    def link_down(self, reason: str) -> None: ...
    def link_may_go(self) -> bool:
        """Is nothing going on that would rather end on this link?"""
        ...


@dataclass
class RoundTrip:
    """The link's round trip: the least of the last few samples, which queueing inflates but nothing deflates."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=8))

    def observe(self, seconds: float) -> None:
        self.samples.append(seconds)

    @property
    def seconds(self) -> float:
        return min(self.samples, default=0.0)


@dataclass
class Traffic:
    """Bytes of frames and number of frames each way, and the largest frame sent after an `open`."""

    up: int = 0
    down: int = 0
    frames_up: int = 0
    frames_down: int = 0
    largest: int = 0


class Link:
    def __init__(
        self,
        connect: Callable[[], Awaitable[Channel]],
        hello: Hello,
        listener: Listener,
        *,
        clock: Callable[[], float],
        random: Random,
        attempts: int | None = None,
    ) -> None:
        """`attempts`: how often in a row to try to connect before giving up; None: for ever."""
        self.state = State.DOWN
        self.round_trip = RoundTrip()
        self.traffic = Traffic()
        self.welcome: Welcome | None = None
        self.last_error = ""
        self.leaving = False  # the verifier is going away: what is new belongs elsewhere
        self._connect, self._hello, self._listener = connect, hello, listener
        self._clock, self._random, self._attempts = clock, random, attempts
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._pong_at = 0.0
        self._channel: Channel | None = None
        self._closing: asyncio.Future[None] | None = None

    def send(self, message: Message) -> None:
        """Queue a message; what is queued when the link breaks is dropped, as the generations are then opened anew."""
        if self.state is State.UP:
            self._outbox.put_nowait(message)

    def leave(self) -> None:
        """Go on elsewhere now: the link ends, and comes up at whoever answers next."""
        if self._channel is not None:
            self._closing = asyncio.ensure_future(self._channel.close("going on elsewhere"))

    async def run(self) -> None:
        """Keep the link up. Raises ProtocolError if the cloud refuses this edge, LinkError after `attempts` failures."""
        failures = 0
        while True:
            self.state = State.CONNECTING
            try:
                channel = await self._connect()
            except (OSError, TimeoutError, ChannelClosed, LinkError) as e:
                failures, self.last_error = failures + 1, str(e) or type(e).__name__
            else:
                begin = self._clock()
                up = await self._serve(channel)
                failures = 0 if up and self._clock() - begin > STEADY_SECONDS else failures + 1
            self.state = State.DOWN
            if self._attempts is not None and failures >= self._attempts:
                raise LinkError(self.last_error)
            await asyncio.sleep(self._back_off(failures))

    def _back_off(self, failures: int) -> float:
        limit = min(LAST_BACK_OFF, FIRST_BACK_OFF * 2.0 ** min(max(failures - 1, 0), 16))  # 2.0 ** 1024 is no float
        return self._random.uniform(0.0, limit) if failures else 0.0

    async def _serve(self, channel: Channel) -> bool:
        """One connection, from greeting to end. True if it came up."""
        up = False
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(GREETING_SECONDS):  # wait_for may swallow a cancellation before Python 3.12
                self.welcome = await self._greet(channel)
            up, self.state, self._pong_at = True, State.UP, self._clock()
            self.leaving, self._channel = False, channel
            self._outbox = asyncio.Queue()
            tasks = [asyncio.create_task(self._write(channel)), asyncio.create_task(self._ping(channel))]
            self._listener.link_up(self.welcome)
            await self._read(channel)
        except (ChannelClosed, TimeoutError) as e:
            self.last_error = str(e) or "no answer"
        except ProtocolError as e:
            self.last_error = str(e)
            if e.code in FATAL:
                self.state = State.REFUSED
                raise
        finally:
            self._channel = None
            for task in tasks:
                task.cancel()
            await channel.close()
            if up:
                self.state = State.REFUSED if self.state is State.REFUSED else State.DOWN
                self._listener.link_down(self.last_error)
        return up

    async def _greet(self, channel: Channel) -> Welcome:
        await self._put(channel, self._hello)
        message = await self._get(channel)
        if isinstance(message, Error):
            raise ProtocolError(message.code, message.message)
        if not isinstance(message, Welcome):
            raise ProtocolError(Code.BAD_STATE, "the cloud's first message is not welcome")
        return message

    async def _read(self, channel: Channel) -> None:
        while True:
            message = await self._get(channel)
            match message:
                case Pong():
                    self._pong_at = self._clock()
                    self.round_trip.observe(max(self._pong_at - message.time, 0.0))
                case Goaway():
                    self.last_error, self.leaving = message.reason, True
                    if not message.drain or self._listener.link_may_go():
                        return
                case Error(sid=None):  # the cloud could not read what was sent: nobody knows what else got lost
                    raise ProtocolError(message.code, message.message)
                case _:
                    self._listener.link_message(message)

    async def _write(self, channel: Channel) -> None:
        try:
            while True:
                await self._put(channel, await self._outbox.get())
        except ChannelClosed:
            pass  # the reader hears of it too

    async def _ping(self, channel: Channel) -> None:
        while 0 <= self._clock() - self._pong_at < SILENCE_SECONDS:  # a clock that went back tells nothing
            self.send(Ping(time=self._clock()))
            await asyncio.sleep(PING_SECONDS if len(self.round_trip.samples) > 3 else PING_SECONDS / 10)
        await channel.close("no answer")

    async def _put(self, channel: Channel, message: Message) -> None:
        frame = encode(message)
        await channel.send(frame)
        self.traffic.up += len(frame)
        self.traffic.frames_up += 1
        if not message.large:
            self.traffic.largest = max(self.traffic.largest, len(frame))

    async def _get(self, channel: Channel) -> Message:
        frame = await channel.receive()
        self.traffic.down += len(frame)
        self.traffic.frames_down += 1
        return decode_from_cloud(frame)
