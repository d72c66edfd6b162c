"""Clients that are as loud as they can be, as a process: it says a line when they have begun, and is ended by a signal."""

import argparse
import asyncio
from contextlib import suppress

from paceline.protocol.channel import ChannelClosed
from paceline.protocol.errors import LinkError
from paceline.protocol.messages import Ping
from paceline.scripts.chaos.manners import Client


async def shout(url: str) -> None:
    """Pings without end, a hundred at a time; what comes back is read. Who is let go for it comes again."""
    while True:
        with suppress(ChannelClosed, LinkError, OSError):
            client = await Client.of(url)
            async with asyncio.TaskGroup() as both:
                both.create_task(_read(client))
                both.create_task(_send(client))
        await asyncio.sleep(0)


async def _read(client: Client) -> None:
    with suppress(ChannelClosed):
        while True:
            await client.receive()


async def _send(client: Client) -> None:
    with suppress(ChannelClosed):
        while True:
            for _ in range(100):
                await client.send(Ping(0.0))
            await asyncio.sleep(0.01)


async def babble(url: str) -> None:
    """Come, send garbage until the verifier has enough of it, and come again."""
    while True:
        with suppress(ChannelClosed, LinkError, OSError):
            client = await Client.of(url)
            for _ in range(200):
                await client.channel.send(b"\xc1")
            client.vanish()
        await asyncio.sleep(0)


async def be_loud(url: str, shouting: int, babbling: int) -> None:
    tasks = [shout(url) for _ in range(shouting)] + [babble(url) for _ in range(babbling)]
    print("loud", flush=True)
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--shouting", type=int, default=0)
    parser.add_argument("--babbling", type=int, default=0)
    given = parser.parse_args()
    asyncio.run(be_loud(given.url, given.shouting, given.babbling))
