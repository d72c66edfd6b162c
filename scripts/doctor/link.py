"""The link to a verifier as it is now: round trip, bandwidth both ways, and the verifier's pace. Measured, not asked for.

Bandwidth up is that of frames sent at once until the last is answered; down, that of the vocabulary. Both are what this
transfer got, so no more than a lower bound where the link is fast.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from paceline.edge.vocabulary_cache import vocabulary_file
from paceline.edge.websocket import Address, SocketChannel, fetch_vocabulary
from paceline.protocol.channel import Channel, ChannelClosed
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.errors import LinkError, PacelineError
from paceline.protocol.messages import MAX_SMALL_BYTES, Error, Hello, Ping, Pong
from paceline.protocol.vocabulary import Vocabulary

PINGS, BURST = 12, 16  # of MAX_SMALL_BYTES - 512 bytes each: a quarter of a megabyte
SECONDS = 60.0


@dataclass(frozen=True)
class Link:
    """Seconds and bits a second. `verify`: seconds of a step of the verifier for one token."""

    url: str
    model: str
    fingerprint: str  # of its vocabulary
    round_trip: float
    jitter: float
    up: float
    down: float
    verify: float


def measure(address: Address, clock: Callable[[], float] = time.perf_counter) -> Link:
    """Blocking, some seconds. Raises LinkError if the verifier cannot be reached or ends the connection."""
    from paceline.edge.text import Text
    from paceline.scripts.lab.live import measured
    from paceline.scripts.models import cache_folder

    path = vocabulary_file([address], cache_folder())
    text = Text(path)
    vocabulary = text.vocabulary
    text.close()
    model, trips, up = asyncio.run(_over(address, vocabulary, clock))
    begin = clock()
    size = len(fetch_vocabulary(address))
    round_trip = min(trips)
    spent = max(clock() - begin - 2 * round_trip, 1e-6)  # a connection, and a question
    _, step = measured(address, path)
    jitter = statistics.pstdev(trips)
    return Link(address.url, model, vocabulary.fingerprint, round_trip, jitter, up, 8 * size / spent, step)


async def _over(address: Address, vocabulary: Vocabulary, clock: Callable[[], float]) -> tuple[str, list[float], float]:
    """The verifier's model, round trips, bits a second up."""
    channel = await SocketChannel.connect(address)
    hello = Hello((1,), vocabulary.name[:256], vocabulary.size, vocabulary.fingerprint, agent="paceline doctor")
    try:
        async with asyncio.timeout(SECONDS):
            await channel.send(encode(hello))
            welcome = decode_from_cloud(await channel.receive())
            if isinstance(welcome, Error):
                raise LinkError(f"{address.url}: {welcome.message}")
            trips = [await trip(channel, clock) for _ in range(PINGS)]
            up = await bandwidth_up(channel, min(trips), clock)
        return getattr(welcome, "model", ""), trips, up
    except TimeoutError:
        raise LinkError(f"{address.url}: no answer within {SECONDS:.0f} s") from None
    except ChannelClosed as e:
        raise LinkError(f"{address.url}: the connection ended: {e}") from None
    finally:
        await channel.close()


async def trip(channel: Channel, clock: Callable[[], float]) -> float:
    """Seconds of one ping."""
    begin = clock()
    await channel.send(encode(Ping(time=begin)))
    await _pong(channel)
    return clock() - begin


async def bandwidth_up(channel: Channel, round_trip: float, clock: Callable[[], float]) -> float:
    """Bits a second of pings with much in them, sent at once. A field that nobody knows is ignored."""
    begin, size = clock(), 0
    for _ in range(BURST):
        full = {"type": "ping", "time": begin, "padding": os.urandom(MAX_SMALL_BYTES - 512)}
        frame = msgspec.msgpack.encode(full)
        size += len(frame)
        await channel.send(frame)
    for _ in range(BURST):
        await _pong(channel)
    return 8 * size / max(clock() - begin - round_trip, 1e-6)


async def _pong(channel: Channel) -> None:
    while True:
        message = decode_from_cloud(await channel.receive())
        if isinstance(message, Pong):
            return
        if isinstance(message, Error):
            raise PacelineError(f"the verifier refused a ping: {message.message}")
