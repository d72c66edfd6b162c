"""The shell around `connection` for servers that speak ASGI: the same frames, sessions and plain HTTP paths as `server`.

    app = Verifier(Front(house, vocabulary, keys))     # for uvicorn, Ray Serve and others, lifespan included

Knows nothing about sockets. The interface is https://asgi.readthedocs.io/en/latest/specs/www.html
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from paceline.cloud.connection import Connection
from paceline.cloud.front import Front, Page
from paceline.protocol.channel import ChannelClosed, close_reason
from paceline.protocol.messages import SUBPROTOCOL

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

DENIAL = "websocket.http.response"  # the extension by which a websocket is refused with a status of one's own
POLICY, TRY_LATER = 1008, 1013  # codes of a close, where there is no such extension
GONE = (OSError, RuntimeError)  # what servers raise on a send to somebody who has left


class AsgiChannel:
    """A websocket that was accepted, as a Channel."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._reading: asyncio.Future[Message] | None = None
        self._end = ""  # why nothing can be sent any more

    async def send(self, frame: bytes) -> None:
        if self._end:
            raise ChannelClosed(self._end)
        try:
            await self._send({"type": "websocket.send", "bytes": frame})
        except GONE as e:
            raise ChannelClosed(self._ended(str(e))) from None

    async def receive(self) -> bytes | str:
        if self._end:
            raise ChannelClosed(self._end)
        self._reading = asyncio.ensure_future(self._receive())  # a future, so that `close` can end the wait
        try:
            message = await self._reading
        except asyncio.CancelledError:
            if self._end:
                raise ChannelClosed(self._end) from None
            raise
        except GONE as e:
            raise ChannelClosed(self._ended(str(e))) from None
        if message["type"] == "websocket.disconnect":
            raise ChannelClosed(self._ended(message.get("reason") or f"closed with {message.get('code', 1005)}"))
        data = message.get("bytes")
        frame: bytes | str = message["text"] if data is None else data
        return frame

    async def close(self, reason: str = "") -> None:
        if self._end:
            return
        self._ended(reason or "closed here")
        if self._reading is not None and not self._reading.done():
            self._reading.cancel()
        with suppress(*GONE):
            await self._send({"type": "websocket.close", "code": 1000, "reason": close_reason(reason)})

    def _ended(self, why: str) -> str:
        self._end = why or "the link was cut"
        return self._end


class Verifier:
    """An ASGI application: one verifier, which steps while it is alive (from lifespan's startup to its shutdown)."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.stepping: asyncio.Task[None] | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "websocket":
                await _websocket(self.front, scope, receive, send)
            case "http":
                page = self.front.answer(scope["path"], authorization(scope), websocket=False)
                assert page is not None, "a plain request always has an answer"
                await _respond(page, "http.response", send)
            case "lifespan":
                await self._live(receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()  # lifespan.startup
        self.stepping = asyncio.create_task(self.front.house.scheduler.run())
        await send({"type": "lifespan.startup.complete"})
        try:
            await receive()  # lifespan.shutdown
        finally:
            self.stepping.cancel()
        with suppress(asyncio.CancelledError):
            await self.stepping
        if (spans := self.front.house.spans) is not None:
            await asyncio.to_thread(spans.close)
        await send({"type": "lifespan.shutdown.complete"})


async def _websocket(front: Front, scope: Message, receive: Receive, send: Send) -> None:
    await receive()  # websocket.connect
    key = authorization(scope)
    page = front.answer(scope["path"], key, websocket=True)
    if page is not None and DENIAL in (scope.get("extensions") or {}):
        await _respond(page, DENIAL, send)
    elif page is not None:
        code = POLICY if page.retry_after is None else TRY_LATER
        await send({"type": "websocket.close", "code": code, "reason": close_reason(page.body.decode().strip())})
    elif SUBPROTOCOL not in scope.get("subprotocols", ()):
        await send({"type": "websocket.close", "code": 1002, "reason": f"the subprotocol here is {SUBPROTOCOL}"})
    else:
        await send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL})
        await Connection(AsgiChannel(receive, send), front.house, front.owner(key)).serve()


async def _respond(page: Page, kind: str, send: Send) -> None:
    headers = [(name.lower().encode(), value.encode()) for name, value in page.headers.items()]
    await send({"type": f"{kind}.start", "status": page.status.value, "headers": headers})
    await send({"type": f"{kind}.body", "body": page.body})


def authorization(scope: Message) -> str | None:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"), None)
