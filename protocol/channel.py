"""The transport as both ends see it: whole frames in order, or the end. Websockets, a delayed link and tests implement it."""

from typing import Protocol


class ChannelClosed(Exception):
    """The other side is gone, or the link was cut. The text says why."""


class Channel(Protocol):
    async def send(self, frame: bytes) -> None:
        """Raises ChannelClosed."""
        ...

    async def receive(self) -> bytes | str:
        """The next frame (a str where a peer sent text). Raises ChannelClosed."""
        ...

    async def close(self, reason: str = "") -> None: ...


def close_reason(text: str) -> str:
    """As much of `text` as fits into the frame that closes a websocket, which carries a code and 123 bytes (RFC 6455, 5.5)."""
    return text.encode()[:123].decode(errors="ignore")
