"""A websocket to the cloud as a Channel, and what the cloud says over plain HTTP on the same port."""

import ipaddress
import itertools
import json
import secrets
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.protocol.channel import Channel, ChannelClosed, close_reason
from paceline.protocol.errors import LinkError
from paceline.protocol.messages import MAX_OPEN_BYTES, SUBPROTOCOL
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

SECONDS = 10.0
VOCABULARY_BYTES = 64 * 1024 * 1024
NAME_HEADER = "x-session-id"  # by which ingresses and Ray Serve know who comes again


@dataclass(frozen=True)
class Address:
    """Where a verifier is, and what lets this device in. `authority`: a file of certificates to trust instead of the system's.

    A key and a prompt are not sent in the clear: ws:// is for this machine alone unless `insecure` says otherwise.
    """

    url: str
    key: str | None = None
    insecure: bool = False
    authority: Path | None = None
    certificate: Path | None = None  # of this device, with its private key, where the verifier asks for one

    def check(self) -> None:
        """Raises LinkError if this is no address that may be used."""
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise LinkError(f"{self.url!r} is not a websocket address; it begins with ws:// or wss://")
        if parts.scheme == "ws" and not self.insecure and not _is_loopback(parts.hostname):
            raise LinkError(
                f"{self.url} is not encrypted and leaves this machine; use wss://, or allow it with --insecure"
            )

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def tls(self) -> ssl.SSLContext | None:
        if not self.url.startswith("wss:"):
            return None
        try:
            context = ssl.create_default_context(cafile=self.authority)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate)
        except (OSError, ssl.SSLError) as e:
            raise LinkError(f"the certificates for {self.url} cannot be used: {e.strerror or e}") from None
        return context


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class SocketChannel:
    """A websocket of the client as a Channel."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    @classmethod
    async def connect(cls, address: Address, name: str = "") -> "SocketChannel":
        """As the edge of that name, if any. Raises LinkError with the reason in words."""
        address.check()
        url = address.url
        try:
            socket = await connect(
                url,
                subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]
                compression=None,
                max_size=MAX_OPEN_BYTES,
                open_timeout=SECONDS,
                ping_interval=None,  # the link has pings of its own, which measure
                close_timeout=1,
                additional_headers=address.headers | ({NAME_HEADER: name} if name else {}),
                ssl=address.tls(),
                user_agent_header=None,
            )
        except InvalidURI:
            raise LinkError(f"{url!r} is not a websocket address; it begins with ws:// or wss://") from None
        except InvalidStatus as e:
            raise LinkError(_refusal(url, e.response.status_code)) from None
        except InvalidHandshake as e:
            raise LinkError(f"{url}: something answers there, but not a Paceline verifier ({e})") from None
        except TimeoutError:
            raise LinkError(f"{url}: no answer within {SECONDS:.0f} s") from None
        except ssl.SSLError as e:
            raise LinkError(_distrust(url, e)) from None
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
        with suppress(OSError, AttributeError):  # asyncio's own, of a transport that was cut off while it wrote
            await self._socket.close(reason=close_reason(reason))


def connecting(
    addresses: Sequence[Address], first: int = 0, *, name: str | None = None
) -> Callable[[], Awaitable[Channel]]:
    """Connects to the next of `addresses` every time, from the one at `first` on, and always under the same name.

    By its name whatever stands before many verifiers sends an edge back to the one that holds its sessions. It is drawn at random
    unless it is given, tells nothing of the device or its key, and opens nothing to who learns it; empty: the edge has none.
    """
    own = secrets.token_hex(16) if name is None else name
    turns = itertools.cycle((*addresses[first % len(addresses) :], *addresses[: first % len(addresses)]))

    async def connect() -> Channel:
        return await SocketChannel.connect(next(turns), own)

    return connect


@dataclass(frozen=True)
class ModelFacts:
    """What a verifier says of its model."""

    model: str
    vocabulary_size: int
    fingerprint: str
    context: int


def ask_model(address: Address) -> ModelFacts:
    """Facts of the model behind a websocket address. Blocking. Raises LinkError."""
    data = _get(address, "/v1/model", 65536)
    try:
        facts = json.loads(data)
        return ModelFacts(facts["model"], facts["vocabulary_size"], facts["fingerprint"], facts["context"])
    except (ValueError, KeyError, TypeError):
        raise LinkError(f"{address.url}: something answers there, but not a Paceline verifier") from None


def fetch_vocabulary(address: Address) -> bytes:
    """The verifier's vocabulary, a GGUF file without weights. Blocking. Raises LinkError."""
    return _get(address, "/v1/vocabulary", VOCABULARY_BYTES)


def _get(address: Address, path: str, limit: int) -> bytes:
    address.check()
    url = address.url
    parts = urllib.parse.urlsplit(url)
    plain = urllib.parse.urlunsplit(("https" if parts.scheme == "wss" else "http", parts.netloc, path, "", ""))
    request = urllib.request.Request(plain, headers=address.headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS, context=address.tls()) as answer:
            data: bytes = answer.read(limit + 1)
    except urllib.error.HTTPError as e:
        raise LinkError(_refusal(url, e.code)) from None
    except (OSError, ValueError) as e:
        reason = e.reason if isinstance(e, urllib.error.URLError) else e
        if isinstance(reason, ssl.SSLError):
            raise LinkError(_distrust(url, reason)) from None
        raise LinkError(f"{url}: cannot connect ({_reason(reason)}); is `paceline cloud` running there?") from None
    except Exception as e:  # http.client raises its own kinds for what is no HTTP at all
        raise LinkError(f"{url}: something answers there, but not a Paceline verifier ({type(e).__name__})") from None
    if len(data) > limit:
        raise LinkError(f"{url}: {path} is larger than {limit} bytes")
    return data


def _reason(e: object) -> str:
    return (e.strerror if isinstance(e, OSError) and e.strerror else str(e)).removeprefix("[Errno 111] ")


def _distrust(url: str, e: ssl.SSLError) -> str:
    return (
        f"{url}: its certificate is not trusted ({e.reason or e}); name the authority that signed it with --authority"
    )


def _refusal(url: str, status: int) -> str:
    if status == 401:
        return f"{url}: the verifier wants a key; give the right one with --key or PACELINE_KEY"
    if status in (429, 502, 503, 504):
        return f"{url}: no verifier has room there now (HTTP {status}); try again later, or name another with --url"
    return f"{url}: something answers there, but not a Paceline verifier (HTTP {status})"
