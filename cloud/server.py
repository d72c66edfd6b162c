"""The websocket shell around `connection`, and the few things it answers over plain HTTP on the same port.

GET /healthz          ok
GET /v1/model         {"model", "vocabulary_size", "fingerprint", "context"}
GET /v1/vocabulary    the vocabulary as a GGUF file without weights: all a device needs to tokenise
"""

import asyncio
import functools
import http
import json
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from paceline.cloud.connection import Connection, House
from paceline.protocol.channel import ChannelClosed
from paceline.protocol.errors import PacelineError
from paceline.protocol.messages import MAX_OPEN_BYTES, SUBPROTOCOL
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

T = TypeVar("T")
log = logging.getLogger(__name__)
PING_SECONDS = 20.0  # under the 60 s after which reverse proxies cut a silent connection


class SocketChannel:
    """A websocket of the server as a Channel."""

    def __init__(self, socket: ServerConnection) -> None:
        self._socket = socket

    async def send(self, frame: bytes) -> None:
        try:
            await self._socket.send(frame)
        except ConnectionClosed as e:
            raise ChannelClosed(str(e)) from None

    async def receive(self) -> bytes | str:
        try:
            return await self._socket.recv()
        except ConnectionClosed as e:
            raise ChannelClosed(str(e)) from None

    async def close(self, reason: str = "") -> None:
        await self._socket.close(reason=reason[:120])


class OneThread:
    """Runs the engine's work on one thread of its own, so that the loop keeps serving sockets meanwhile."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


async def start(house: House, host: str, port: int, vocabulary: Path | None = None) -> Server:
    """Listen. `vocabulary` is the file that GET /v1/vocabulary gives out. Raises PacelineError if the port cannot be had."""

    async def handle(socket: ServerConnection) -> None:
        if socket.subprotocol != SUBPROTOCOL:
            await socket.close(1002, f"the subprotocol here is {SUBPROTOCOL}")
            return
        await Connection(SocketChannel(socket), house).serve()

    try:
        return await serve(
            handle,
            host,
            port,
            subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]
            compression=None,
            max_size=MAX_OPEN_BYTES,
            ping_interval=PING_SECONDS,
            ping_timeout=PING_SECONDS,
            close_timeout=1,
            process_request=functools.partial(_answer, house, vocabulary),
        )
    except OSError as e:
        raise PacelineError(f"cannot listen on {host}:{port}: {e.strerror or e}; choose another with --port") from None


def _answer(house: House, vocabulary: Path | None, socket: ServerConnection, request: Request) -> Response | None:
    """A plain HTTP answer, or None to go on with the websocket."""
    if request.headers.get("Upgrade", "").lower() == "websocket":
        return None
    match request.path:
        case "/healthz":
            return _response(http.HTTPStatus.OK, "text/plain", b"ok\n")
        case "/v1/model":
            own = house.vocabulary
            facts = {
                "model": house.model,
                "vocabulary_size": own.size,
                "fingerprint": own.fingerprint,
                "context": house.context,
            }
            return _response(http.HTTPStatus.OK, "application/json", json.dumps(facts).encode())
        case "/v1/vocabulary" if vocabulary is not None:
            return _response(http.HTTPStatus.OK, "application/octet-stream", vocabulary.read_bytes())
    return _response(http.HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")


def _response(status: http.HTTPStatus, kind: str, body: bytes) -> Response:
    headers = Headers({"Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close"})
    return Response(status.value, status.phrase, headers, body)
