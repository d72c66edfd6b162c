"""An edge that can tell whether it came back to the same verifier, whatever stands before them."""

import asyncio
from collections.abc import Awaitable, Callable

from paceline.cloud.engines.toy import ToyEngine
from paceline.protocol.channel import Channel
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.messages import Commit, Hello, Message, Open, Opened
from paceline.protocol.sampling import Sampling

SECONDS = 120.0  # for an answer
VISITS = 3


async def comes_back(connect: Callable[[], Awaitable[Channel]]) -> bool:
    """Does an edge whose link is cut in mid-answer find its very session again, each time? The verifiers run the toy target."""
    token, toy = "", ToyEngine().vocabulary
    for _ in range(VISITS):
        channel = await connect()
        await channel.send(encode(Hello((1,), toy.name, toy.size, toy.fingerprint)))
        opened = Open(sid=1, prompt=(1, 2), sampling=Sampling(), max_tokens=2000, resume=token)
        await channel.send(encode(opened))
        answer = await hear(channel, Opened)
        assert isinstance(answer, Opened)
        await hear(channel, Commit)
        await channel.close()
        if token and answer.resume != token:
            return False
        token = answer.resume
    return True


async def hear(channel: Channel, kind: type[Message]) -> Message:
    """The next message of a kind. Raises TimeoutError, and ChannelClosed if there comes none."""
    async with asyncio.timeout(SECONDS):
        while not isinstance(message := decode_from_cloud(await channel.receive()), kind):
            pass
    return message
