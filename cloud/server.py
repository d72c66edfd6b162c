"""The websocket shell around `connection`; what it answers over plain HTTP on the same port is `front`'s."""

import ssl
from contextlib import suppress
from pathlib import Path

from paceline.cloud.connection import Connection, House
from paceline.cloud.front import Front, Page
from paceline.cloud.keys import Keys
from paceline.protocol.channel import ChannelClosed, close_reason
from paceline.protocol.errors import PacelineError
from paceline.protocol.messages import MAX_OPEN_BYTES, SUBPROTOCOL
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

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
            await self._socket.close(reason=close_reason(reason))


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
        await Connection(SocketChannel(socket), house, front.owner(_authorization(socket.request))).serve()

    def answer(_: ServerConnection, request: Request) -> Response | None:
        websocket = request.headers.get("Upgrade", "").lower() == "websocket"
        page = front.answer(request.path, _authorization(request), websocket=websocket)
        return None if page is None else _response(page)

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
            process_request=answer,
            ssl=tls,
        )
    except OSError as e:
        raise PacelineError(f"cannot listen on {host}:{port}: {e.strerror or e}; choose another with --port") from None


def _authorization(request: Request | None) -> str | None:
    return request.headers.get("Authorization") if request is not None else None


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


def _response(page: Page) -> Response:
    return Response(page.status.value, page.status.phrase, Headers(page.headers), page.body)
