"""A TCP proxy that does to bytes what a network, a middle-box or a radio may do, and some things they may not.

It knows nothing of websockets: it resets, ends, loses, doubles, swaps and flips bytes anywhere in the stream, stops reading, is
silent, and forgets connections without a word. Over TLS every alteration is noticed and the link begins anew; in the clear a
flipped bit could become another token, so campaigns that alter bytes speak wss://.
"""

import asyncio
import socket
import struct
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, fields
from random import Random

CHUNK = 1400  # bytes that are treated as one piece
FORGOTTEN_SECONDS = 60.0  # the far end of a half-open connection is kept for that long
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, at once


@dataclass(frozen=True)
class ByteRates:
    """Chances a piece of the stream."""

    reset: float = 0.001
    end: float = 0.0005
    truncate: float = 0.0005
    flip: float = 0.0005
    duplicate: float = 0.0005
    swap: float = 0.0005
    delay: float = 0.02
    stall: float = 0.001  # nothing is read for a while: a slow reader
    silence: float = 0.0002  # nothing passes either way for a while
    half_open: float = 0.0001  # nothing passes any more, and nobody is told


NO_FAULTS = ByteRates(**dict.fromkeys((f.name for f in fields(ByteRates)), 0.0))


@dataclass
class ByteFaults:
    """What was done so far, by kind."""

    random: Random
    rates: ByteRates = field(default_factory=ByteRates)
    done: Counter[str] = field(default_factory=Counter)

    def strikes(self, fault: str) -> bool:
        struck: bool = self.random.random() < getattr(self.rates, fault)
        self.done[fault] += struck
        return struck


class HostileProxy:
    """Listens on a port of its own and carries what arrives there to `port` of this machine."""

    def __init__(self, port: int, faults: ByteFaults) -> None:
        self.port = 0
        self._target, self._faults = port, faults
        self._pairs: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "HostileProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._pairs:
            task.cancel()
        await asyncio.gather(*self._pairs, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pairs.add(task)
        task.add_done_callback(self._pairs.discard)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            _reset(writer)
            return
        with suppress(asyncio.CancelledError):
            await _Pair(self._faults, (reader, writer), (far_reader, far_writer)).carry()


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Pair:
    """Both directions of one connection."""

    def __init__(self, faults: ByteFaults, near: Ends, far: Ends) -> None:
        self._faults, self._random = faults, faults.random
        self._near, self._far = near, far
        self._quiet_until = 0.0

    async def carry(self) -> None:
        ways = [
            asyncio.create_task(self._one_way(self._near[0], self._far[1])),
            asyncio.create_task(self._one_way(self._far[0], self._near[1])),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for writer in (self._near[1], self._far[1]):
                _reset(writer)

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(CHUNK):
                if not await self._pass(piece, reader, writer):
                    return
            writer.write_eof()
            await asyncio.sleep(1.0)  # the other way may still have something to say

    async def _pass(self, piece: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """False if the connection ends here."""
        strikes = self._faults.strikes
        if strikes("reset"):
            return False
        if strikes("end"):
            writer.write_eof()
            return False
        await self._hold()
        if self._quiet_until == float("inf"):
            await self._forget(reader)
            return False
        for part in await self._altered(piece, reader):
            writer.write(part)
        await writer.drain()
        return True

    async def _hold(self) -> None:
        """Delays of every kind."""
        strikes = self._faults.strikes
        if strikes("delay"):
            await asyncio.sleep(self._random.expovariate(20.0))
        if strikes("stall"):
            await asyncio.sleep(self._random.uniform(0.5, 6.0))
        if strikes("silence"):
            self._quiet_until = max(self._quiet_until, _now() + self._random.uniform(5.0, 12.0))
        if strikes("half_open"):
            self._quiet_until = float("inf")
        if _now() < self._quiet_until < float("inf"):
            await asyncio.sleep(self._quiet_until - _now())

    async def _altered(self, piece: bytes, reader: asyncio.StreamReader) -> list[bytes]:
        strikes, parts = self._faults.strikes, [piece]
        if strikes("truncate"):
            parts = [piece[: self._random.randrange(len(piece))]]
        if strikes("flip"):
            flipped = bytearray(piece)
            flipped[self._random.randrange(len(piece))] ^= 1 << self._random.randrange(8)
            parts = [bytes(flipped)]
        if strikes("swap"):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    parts.insert(0, await reader.read(CHUNK))
        if strikes("duplicate"):
            parts.append(piece)
        return parts

    async def _forget(self, reader: asyncio.StreamReader) -> None:
        """Nothing passes any more; the sender may go, and nobody hears of it for a while."""
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(FORGOTTEN_SECONDS):
                while await reader.read(CHUNK):
                    pass
                await asyncio.sleep(FORGOTTEN_SECONDS)


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        own = writer.get_extra_info("socket")
        if own is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


def _now() -> float:
    return asyncio.get_running_loop().time()
