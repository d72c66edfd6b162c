"""Clients without manners against a real verifier: how soon a gone one is forgotten, what refused ones cost, and what a loud one
takes from a quiet one. Figures are this machine's; ratios are taken within one run."""

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from paceline.cloud.engines.toy import ToyEngine
from paceline.edge.websocket import Address, SocketChannel
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.errors import PacelineError
from paceline.protocol.messages import Ack, Commit, Error, Hello, Message, Open
from paceline.protocol.sampling import Sampling
from paceline.scripts.chaos.kills import Process, running
from paceline.scripts.chaos.soak import metrics
from paceline.scripts.chaos.trend import Memory, Trend, trend

FLOOR = 0.03
SOON = 1.0  # seconds within which a gone client's session is to be free


class Client:
    """A connection by hand, that has said hello."""

    def __init__(self, channel: SocketChannel) -> None:
        self.channel = channel

    @classmethod
    async def of(cls, url: str) -> "Client":
        client = cls(await SocketChannel.connect(Address(url)))
        own = ToyEngine().vocabulary
        await client.send(Hello((1,), own.name, own.size, own.fingerprint))
        await client.receive()
        return client

    async def send(self, message: Message) -> None:
        await self.channel.send(encode(message))

    async def receive(self) -> Message:
        return decode_from_cloud(await self.channel.receive())

    async def write(self, tokens: int, sid: int = 1) -> None:
        """Open a session and read, acknowledging, until so many tokens have come."""
        await self.send(Open(sid, (1, 2, 3), Sampling(), tokens))
        got = 0
        while got < tokens:
            match await self.receive():
                case Commit() as commit:
                    got += len(commit.tokens)
                    await self.send(Ack(sid, got))
                case Error() as e:
                    raise PacelineError(f"the verifier refused: {e.message}")

    def vanish(self) -> None:
        """A reset, without a word."""
        self.channel._socket.transport.abort()


async def gone(count: int) -> list[float]:
    """Seconds, of each of so many clients that vanish in the middle of an answer, until its session is free."""
    seconds = []
    async with running(1, "--verify-floor", str(FLOOR)) as [verifier]:
        for _ in range(count):
            client = await Client.of(verifier.url)
            await client.send(Open(1, (1, 2, 3), Sampling(), 4000))
            while not isinstance(await client.receive(), Commit):
                pass
            assert await sessions(verifier) == 1
            client.vanish()
            begin = time.perf_counter()
            while await sessions(verifier):  # noqa: ASYNC110 - asked of another process
                await asyncio.sleep(0.005)
            seconds.append(time.perf_counter() - begin)
    return seconds


async def sessions(verifier: Process) -> float:
    url = f"http://127.0.0.1:{verifier.port}/metrics"
    m = await asyncio.get_running_loop().run_in_executor(None, metrics, url, None)
    return m["paceline_sessions"]


@dataclass(frozen=True)
class Refused:
    """Opens and connections turned away, and the verifier's own memory meanwhile, in bytes."""

    opens: int
    connections: int
    memory: Trend


async def refused(opens: int) -> Refused:
    """Ask a verifier with one place, which is taken, so many times for another; one time in fifty over a new connection."""
    bounds = ["--slots", "1", "--queue", "0", "--connections", "2", "--messages-a-second", "1000000"]
    counts, samples = [0, 0], list[tuple[float, float]]()
    async with running(1, "--verify-floor", str(FLOOR), *bounds) as [verifier]:
        keeper, asker = await Client.of(verifier.url), await Client.of(verifier.url)
        await keeper.send(Open(1, (1, 2, 3), Sampling(), 4000))
        await keeper.receive()
        for i in range(opens + 1):
            await asker.send(Open(i, (1, 2, 3), Sampling(), 100))
            counts[0] += isinstance(await asker.receive(), Error)
            if i % 50 == 0:
                counts[1] += await _turned_away(verifier)
            if i % max(opens // 200, 1) == 0 and i > opens // 10:  # after a tenth to warm up
                samples.append((time.perf_counter(), Memory.of(verifier.pid).own))
    return Refused(counts[0], counts[1], trend([at for at, _ in samples], [own for _, own in samples]))


async def _turned_away(verifier: Process) -> bool:
    try:
        channel = await SocketChannel.connect(Address(verifier.url))
    except PacelineError:
        return True
    await channel.close()
    return False


async def beside_loud_ones(rounds: int, tokens: int, shouting: int, babbling: int) -> tuple[float, float, float]:
    """Median seconds of a quiet client's answer, in turns: alone, beside so many loud ones, and while they are loud elsewhere.

    Elsewhere is another verifier on this machine, so that what loud clients cost its cores is told from what they cost others.
    """
    alone, beside, elsewhere = list[float](), list[float](), list[float]()
    async with running(2, "--verify-floor", str(FLOOR)) as [verifier, other]:
        quiet = await Client.of(verifier.url)
        for i in range(rounds):
            alone.append(await timed(quiet, tokens, 3 * i + 1))
            for where, seconds in ((verifier, beside), (other, elsewhere)):
                async with loudness(where, shouting, babbling):
                    seconds.append(await timed(quiet, tokens, 3 * i + 2 + (where is other)))
    return statistics.median(alone), statistics.median(beside), statistics.median(elsewhere)


async def timed(client: Client, tokens: int, sid: int) -> float:
    begin = time.perf_counter()
    await client.write(tokens, sid)
    return time.perf_counter() - begin


@asynccontextmanager
async def loudness(verifier: Process, shouting: int, babbling: int) -> AsyncIterator[None]:
    """Loud clients in a process of their own, for as long as the block runs."""
    command = ["--url", verifier.url, "--shouting", str(shouting), "--babbling", str(babbling)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline.scripts.chaos.loud", *command,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    await process.stdout.readline()  # they have begun
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def report(clients: int, opens: int, rounds: int) -> tuple[list[str], bool]:
    """What it came to, in lines, and whether it is as it should be. Without `rounds` nobody is loud."""
    seconds = await gone(clients)
    soon = sum(s < SOON for s in seconds)
    turned = await refused(opens)
    m = turned.memory
    said = [
        f"{soon} of {clients} gone clients' sessions free within {SOON:.0f} s;"
        f" median {statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s",
        f"{turned.opens} sessions and {turned.connections} connections refused: the verifier's own memory"
        f" {m.mean / 2**20:.1f} MiB, {m.change / 1024:+.0f} KiB, noise {m.noise * m.seconds / 1024:.0f} KiB",
    ]
    loud = (("one that sends", 1, 0), ("four that send", 4, 0), ("four that come and go with garbage,", 0, 4))
    for who, shouting, babbling in loud if rounds else ():
        alone, beside, elsewhere = await beside_loud_ones(rounds, 50, shouting, babbling)
        said.append(
            f"50 tokens take a quiet client {alone:.2f} s alone, {beside:.2f} s beside {who} without end, {elsewhere:.2f} s while"
            f" that goes to another verifier on this machine: {elsewhere / beside:.3f} of its speed are left"
        )
    return said, soon == clients and m.flat()
