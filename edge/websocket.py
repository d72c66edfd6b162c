"""A websocket to the cloud as a Channel, and what the cloud says over plain HTTP on the same port."""

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass

from paceline.protocol.channel import ChannelClosed
from paceline.protocol.errors import LinkError
from paceline.protocol.messages import MAX_OPEN_BYTES, SUBPROTOCOL
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

SECONDS = 10.0
VOCABULARY_BYTES = 64 * 1024 * 1024


class SocketChannel:
    """A websocket of the client as a Channel."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    @classmethod
    async def connect(cls, url: str) -> "SocketChannel":
        """Raises LinkError with the reason in words."""
        try:
            socket = await connect(
                url,
                subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]
                compression=None,
                max_size=MAX_OPEN_BYTES,
                open_timeout=SECONDS,
                ping_interval=None,  # the link has pings of its own, which measure
                close_timeout=1,
            )
        except InvalidURI:
            raise LinkError(f"{url!r} is not a websocket address; it begins with ws:// or wss://") from None
        except InvalidHandshake as e:
            raise LinkError(f"{url}: something answers there, but not a Paceline verifier ({e})") from None
        except TimeoutError:
            raise LinkError(f"{url}: no answer within {SECONDS:.0f} s") from None
        except OSError as e:
            raise LinkError(f"{url}: cannot connect ({_reason(e)}); is `paceline cloud` running there?") from None
        if socket.subprotocol != SUBPROTOCOL:
            await socket.close()
            raise LinkError(f"{url}: a websocket answers there, but not a Paceline verifier")
        return cls(socket)

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


@dataclass(frozen=True)
class ModelFacts:
    """What a verifier says of its model."""

    model: str
    vocabulary_size: int
    fingerprint: str
    context: int


def ask_model(url: str) -> ModelFacts:
    """Facts of the model behind a websocket address. Blocking. Raises LinkError."""
    data = _get(url, "/v1/model", 65536)
    try:
        facts = json.loads(data)
        return ModelFacts(facts["model"], facts["vocabulary_size"], facts["fingerprint"], facts["context"])
    except (ValueError, KeyError, TypeError):
        raise LinkError(f"{url}: something answers there, but not a Paceline verifier") from None


def fetch_vocabulary(url: str) -> bytes:
    """The verifier's vocabulary, a GGUF file without weights. Blocking. Raises LinkError."""
    return _get(url, "/v1/vocabulary", VOCABULARY_BYTES)


def _get(url: str, path: str, limit: int) -> bytes:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("ws", "wss") or not parts.netloc:
        raise LinkError(f"{url!r} is not a websocket address; it begins with ws:// or wss://")
    address = urllib.parse.urlunsplit(("https" if parts.scheme == "wss" else "http", parts.netloc, path, "", ""))
    try:
        with urllib.request.urlopen(address, timeout=SECONDS) as answer:
            data: bytes = answer.read(limit + 1)
    except urllib.error.HTTPError as e:
        raise LinkError(f"{url}: something answers there, but not a Paceline verifier (HTTP {e.code})") from None
    except (OSError, ValueError) as e:
        reason = e.reason if isinstance(e, urllib.error.URLError) else e
        raise LinkError(f"{url}: cannot connect ({_reason(reason)}); is `paceline cloud` running there?") from None
    except Exception as e:  # http.client raises its own kinds for what is no HTTP at all
        raise LinkError(f"{url}: something answers there, but not a Paceline verifier ({type(e).__name__})") from None
    if len(data) > limit:
        raise LinkError(f"{url}: {path} is larger than {limit} bytes")
    return data


def _reason(e: object) -> str:
    return (e.strerror if isinstance(e, OSError) and e.strerror else str(e)).removeprefix("[Errno 111] ")
