"""An edge that says who it is to whatever stands before the verifiers, and can tell whether it came back to the same one."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from paceline.cloud.engines.toy import ToyEngine
from paceline.edge.websocket import Address, SocketChannel
from paceline.protocol.channel import Channel
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.messages import Commit, Hello, Message, Open, Opened
from paceline.protocol.sampling import Sampling

SECONDS = 120.0  # for an answer
VISITS = 3


@dataclass(frozen=True)
class Tagged(Address):
    """An address asked under a name; empty: under none."""

    name: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return super().headers | ({"x-session-id": self.name} if self.name else {})


def dial(address: Address) -> Callable[[], Awaitable[Channel]]:
    async def connect() -> Channel:
        return await SocketChannel.connect(address)

    return connect


async def comes_back(
    url: str, name: str, *, key: str | None = None, connect: Callable[[], Awaitable[Channel]] | None = None
) -> bool:
    """Does an edge whose link is cut in mid-answer find its very session again, each time? The verifiers run the toy target."""
    token, toy = "", ToyEngine().vocabulary
    for _ in range(VISITS):
        channel = await (connect or dial(Tagged(url, key, name=name)))()
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
