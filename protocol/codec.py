"""Frames to messages and back: MessagePack, typed and bounded while it is read.

msgspec reads a frame straight into the message's type: an unknown field is skipped without being built, and an array is
measured before it is filled, so a frame costs no more memory than the message it may become (unpacking a hostile frame of
4 MB first and checking it afterwards took 290 MB and a second). Every way a frame can be wrong is a ProtocolError with a
code: not MessagePack (bad_frame), too large (too_large), a type that is not known or travels the other way (unknown_type), a
field that is missing, of the wrong type or out of bounds (bad_message, and bad_params within `sampling`).
"""

import re
from typing import Any, TypeVar

import msgspec
from paceline.protocol.errors import Code, PacelineError, ProtocolError
from paceline.protocol.messages import (
    FROM_CLOUD,
    FROM_EDGE,
    MAX_OPEN_BYTES,
    MAX_SMALL_BYTES,
    FromCloud,
    FromEdge,
    Message,
    Sid,
)

T = TypeVar("T")
_AT = re.compile(r" - at `(?:key` in `)?\$\.?(?P<field>.*)`$")


class _Kind(msgspec.Struct):
    type: str


class _Session(msgspec.Struct):
    sid: Sid


_ENCODER = msgspec.msgpack.Encoder()
_FROM_EDGE = msgspec.msgpack.Decoder(FromEdge)
_FROM_CLOUD = msgspec.msgpack.Decoder(FromCloud)
_KIND = msgspec.msgpack.Decoder(_Kind)
_SESSION = msgspec.msgpack.Decoder(_Session)


def encode(message: Message) -> bytes:
    """One frame. What we send is not validated: our own code is, by tests."""
    return _ENCODER.encode(message)


def decode_from_edge(frame: bytes | str, limit: int = MAX_OPEN_BYTES) -> Message:
    """The message in a frame that an edge sent. Raises ProtocolError."""
    return _decode(frame, limit, _FROM_EDGE, FROM_EDGE)


def decode_from_cloud(frame: bytes | str, limit: int = MAX_OPEN_BYTES) -> Message:
    """The message in a frame that a cloud sent. Raises ProtocolError."""
    return _decode(frame, limit, _FROM_CLOUD, FROM_CLOUD)


def _decode(
    frame: bytes | str, limit: int, decoder: msgspec.msgpack.Decoder[Any], known: dict[str, type[Message]]
) -> Message:
    if isinstance(frame, str):
        raise ProtocolError(Code.BAD_FRAME, "a text frame; this protocol uses binary frames")
    if len(frame) > limit:
        raise ProtocolError(Code.TOO_LARGE, f"a frame of {len(frame)} bytes; the limit is {limit}")
    try:
        message: Message = decoder.decode(frame)
    except (ValueError, OverflowError, RecursionError, MemoryError) as e:
        raise _refusal(frame, e, known) from None
    if len(frame) > MAX_SMALL_BYTES and not message.large:
        text = f"{_name(message)}: a frame of {len(frame)} bytes; the limit is {MAX_SMALL_BYTES}"
        raise ProtocolError(Code.TOO_LARGE, text, getattr(message, "sid", None))
    return message


def _refusal(frame: bytes, e: Exception, known: dict[str, type[Message]]) -> ProtocolError:
    """Which of the ways to be wrong this is. A frame that is no map of string keys, or is cut short, is a bad frame."""
    try:
        kind = _KIND.decode(frame).type
    except msgspec.ValidationError as no_kind:
        if "`type`" in str(no_kind) or "$.type" in str(no_kind):
            return ProtocolError(Code.UNKNOWN_TYPE, "a message without a type", _sid(frame))
        return ProtocolError(Code.BAD_FRAME, "a message is a MessagePack map with string keys")
    except (ValueError, OverflowError, RecursionError, MemoryError) as broken:
        return ProtocolError(Code.BAD_FRAME, f"not a MessagePack message: {str(broken)[:120]}")
    if kind not in known:
        return ProtocolError(Code.UNKNOWN_TYPE, f"message type {kind[:32]!r} is not known here", _sid(frame))
    if not isinstance(e, msgspec.ValidationError | UnicodeDecodeError | OverflowError):
        return ProtocolError(Code.BAD_FRAME, f"not a MessagePack message: {str(e)[:120]}")
    text = _explain(e)
    code = Code.BAD_PARAMS if text.startswith("sampling") else Code.BAD_MESSAGE
    return ProtocolError(code, f"{kind}: {text}", _sid(frame))


def convert(fields: dict[str, Any], kind: type[T], what: str) -> T:
    """A user's settings as a checked struct. Raises PacelineError naming the field and its bounds."""
    try:
        return msgspec.convert(fields, kind, strict=False)
    except (msgspec.ValidationError, OverflowError) as e:
        raise PacelineError(f"{what}: {_explain(e)}") from None


def _explain(e: Exception) -> str:
    """msgspec's sentence with the field named first: "temperature: expected `float` >= 0"."""
    text = str(e)
    at = _AT.search(text)
    if not at:
        return text[0].lower() + text[1:] if text else type(e).__name__
    sentence = text[: at.start()]
    return f"{at['field']}: {sentence[0].lower()}{sentence[1:]}"


def _name(message: Message) -> str:
    return type(message).__name__.lower()


def _sid(frame: bytes) -> int | None:
    """The session that a refused frame names, if it does so legibly."""
    try:
        return _SESSION.decode(frame).sid
    except (ValueError, OverflowError, RecursionError, MemoryError):
        return None
