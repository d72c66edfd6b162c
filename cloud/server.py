"""The websocket shell around `connection`, and the few things it answers over plain HTTP on the same port.

GET /healthz          ok
GET /v1/model         {"model", "vocabulary_size", "fingerprint", "context"}
GET /v1/vocabulary    the vocabulary without the weights (GGUF, or a tokenizer.json bundle): all a device needs to tokenise
"""

import asyncio
import http
import json
import logging
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from paceline.cloud.connection import Connection, House
from paceline.cloud.keys import Keys
from paceline.cloud.limits import Owner
from paceline.cloud.metrics import exposition, own_version, registry
from paceline.protocol.channel import ChannelClosed
from paceline.protocol.errors import PacelineError
from paceline.protocol.messages import MAX_OPEN_BYTES, SUBPROTOCOL
from prometheus_client import CONTENT_TYPE_LATEST
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
        with suppress(OSError, AttributeError):  # asyncio's own, of a transport that was cut off while it wrote
            await self._socket.close(reason=reason.encode()[:120].decode(errors="ignore"))


class OneThread:
    """Runs the engine's work on one thread of its own, so that the loop keeps serving sockets meanwhile."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


async def start(
    house: House,
    host: str,
    port: int,
    vocabulary: Path | None = None,
    *,
    keys: Keys | None = None,
    tls: ssl.SSLContext | None = None,
) -> Server:
    """Listen. `vocabulary` is the file that GET /v1/vocabulary gives out; with `keys`, only who has one is served.

    Raises PacelineError if the port cannot be had.
    """
    front = Front(house, vocabulary, keys)

    async def handle(socket: ServerConnection) -> None:
        if socket.subprotocol != SUBPROTOCOL:
            await socket.close(1002, f"the subprotocol here is {SUBPROTOCOL}")
            return
        await Connection(SocketChannel(socket), house, front.owner(socket.request)).serve()

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
            server_header=None,
            process_request=front.answer,
            ssl=tls,
        )
    except OSError as e:
        raise PacelineError(f"cannot listen on {host}:{port}: {e.strerror or e}; choose another with --port") from None


class Front:
    """What is answered before a websocket begins: who may come in, and the plain HTTP paths."""

    def __init__(self, house: House, vocabulary: Path | None, keys: Keys | None) -> None:
        self._house, self._vocabulary, self._keys = house, vocabulary, keys
        self._metrics = registry(house)

    def answer(self, socket: ServerConnection, request: Request) -> Response | None:
        """A plain HTTP answer, or None to go on with the websocket."""
        match request.path:
            case "/healthz":
                return _response(http.HTTPStatus.OK, "text/plain", b"ok\n")
            case "/readyz" if self._house.draining:
                return _response(http.HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"draining\n")
            case "/readyz":
                return _response(http.HTTPStatus.OK, "text/plain", b"ok\n")
        if self._keys is not None and self._keys.name_of(request.headers.get("Authorization")) is None:
            return _response(
                http.HTTPStatus.UNAUTHORIZED, "text/plain", b"a key is needed: Authorization: Bearer KEY\n"
            )
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return self._no_room(request)
        return self._page(request.path)

    def owner(self, request: Request | None) -> Owner:
        """Whose connection this is, with what its key may do by now."""
        name = self._keys.name_of(request.headers.get("Authorization")) if self._keys and request else None
        allowance = self._keys.allowance_of(name) if self._keys and name else None
        return self._house.owner(name or "", allowance)

    def _no_room(self, request: Request) -> Response | None:
        """Why no websocket may begin here now, if so: before any work was done for it."""
        if self._house.draining:
            return _busy(http.HTTPStatus.SERVICE_UNAVAILABLE, b"going away\n")
        if self._house.connections >= self._house.bounds.connections:
            return _busy(http.HTTPStatus.SERVICE_UNAVAILABLE, b"as many connections as there may be\n")
        owner = self.owner(request)
        limit = owner.allowance.connections
        if limit is not None and owner.connections >= limit:
            return _busy(http.HTTPStatus.TOO_MANY_REQUESTS, b"as many connections as this key may have\n")
        return None

    def _page(self, path: str) -> Response:
        match path:
            case "/metrics":
                return _response(http.HTTPStatus.OK, CONTENT_TYPE_LATEST, exposition(self._metrics))
            case "/version":
                return _json({"version": own_version()})
            case "/v1/model":
                own, house = self._house.vocabulary, self._house
                return _json(
                    {
                        "model": house.model,
                        "vocabulary_size": own.size,
                        "fingerprint": own.fingerprint,
                        "context": house.context,
                    }
                )
            case "/v1/vocabulary" if self._vocabulary is not None:
                return _response(http.HTTPStatus.OK, "application/octet-stream", self._vocabulary.read_bytes())
        return _response(http.HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")


def tls_context(certificate: Path, key: Path | None, clients: Path | None) -> ssl.SSLContext:
    """TLS with this certificate chain; with `clients`, only edges whose certificate that authority signed (mutual TLS).

    Raises PacelineError naming the file that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as e:
        raise PacelineError(f"{certificate}: not a certificate chain with its key ({e.strerror or e})") from None
    if clients is not None:
        try:
            context.load_verify_locations(clients)
        except (OSError, ssl.SSLError) as e:
            raise PacelineError(f"{clients}: not a file of certificates ({e.strerror or e})") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _busy(status: http.HTTPStatus, text: bytes, seconds: int = 1) -> Response:
    """What a proxy in front takes for a reason to ask another verifier, and an edge to come again."""
    response = _response(status, "text/plain", text)
    response.headers["Retry-After"] = str(seconds)
    return response


def _json(value: dict[str, object]) -> Response:
    return _response(http.HTTPStatus.OK, "application/json", json.dumps(value).encode())


def _response(status: http.HTTPStatus, kind: str, body: bytes) -> Response:
    headers = Headers({"Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close"})
    return Response(status.value, status.phrase, headers, body)
