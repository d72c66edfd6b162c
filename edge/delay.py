"""A link that takes its time: a Channel around another one, on which every frame arrives half a round trip later."""

import asyncio
from contextlib import suppress

from paceline.protocol.channel import Channel, ChannelClosed


class DelayedChannel:
    """`round_trip` seconds there and back. Frames keep their order; nothing else of a network is imitated."""

    def __init__(self, inner: Channel, round_trip: float) -> None:
        self._inner, self._delay = inner, round_trip / 2
        self._out: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._in: asyncio.Queue[tuple[float, bytes | str | ChannelClosed]] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._push()), asyncio.create_task(self._pull())]

    async def send(self, frame: bytes) -> None:
        if self._tasks[0].done():
            raise ChannelClosed("the link is closed")
        self._out.put_nowait((_now() + self._delay, frame))

    async def receive(self) -> bytes | str:
        due, frame = await self._in.get()
        await _until(due)
        if isinstance(frame, ChannelClosed):
            raise frame
        return frame

    async def close(self, reason: str = "") -> None:
        if not self._tasks[0].done():  # what was sent before the end still arrives
            joined = asyncio.ensure_future(self._out.join())
            await asyncio.wait({joined, self._tasks[0]}, timeout=self._delay + 1.0, return_when=asyncio.FIRST_COMPLETED)
            joined.cancel()
        for task in self._tasks:
            task.cancel()
        await self._inner.close(reason)

    async def _push(self) -> None:
        with suppress(ChannelClosed):
            while True:
                due, frame = await self._out.get()
                await _until(due)
                await self._inner.send(frame)
                self._out.task_done()

    async def _pull(self) -> None:
        while True:
            try:
                frame: bytes | str | ChannelClosed = await self._inner.receive()
            except ChannelClosed as e:
                frame = e
            self._in.put_nowait((_now() + self._delay, frame))
            if isinstance(frame, ChannelClosed):
                return


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _until(due: float) -> None:
    wait = due - _now()
    if wait > 0:
        await asyncio.sleep(wait)
