"""Frames to messages and back: msgpack with its limits on, then typed validation by msgspec.

Every way a frame can be wrong is a ProtocolError with a code: not MessagePack (bad_frame), too large (too_large), a
type that is not known or travels the other way (unknown_type), a field that is missing, of the wrong type or out of
bounds (bad_message).
"""

import re
from typing import Any, TypeVar

import msgpack
import msgspec
from paceline.protocol.errors import Code, PacelineError, ProtocolError
from paceline.protocol.messages import FROM_CLOUD, FROM_EDGE, MAX_OPEN_BYTES, MAX_TOKENS, TYPES, Message

T = TypeVar("T")
_AT = re.compile(r" - at `\$\.?(?P<field>.*)`$")


def encode(message: Message) -> bytes:
    """One frame. Asserts that our own message is valid only as far as msgpack can carry it."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    return packed


def decode_from_edge(frame: bytes | str, limit: int = MAX_OPEN_BYTES) -> Message:
    """The message in a frame that an edge sent. Raises ProtocolError."""
    return _decode(frame, limit, FROM_EDGE)


def decode_from_cloud(frame: bytes | str, limit: int = MAX_OPEN_BYTES) -> Message:
    """The message in a frame that a cloud sent. Raises ProtocolError."""
    return _decode(frame, limit, FROM_CLOUD)


def _decode(frame: bytes | str, limit: int, known: frozenset[str]) -> Message:
    fields = _unpack(frame, limit)
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in known:
        shown = kind[:32] if isinstance(kind, str) else type(kind).__name__
        raise ProtocolError(Code.UNKNOWN_TYPE, f"message type {shown!r} is not known here", _sid(fields))
    try:
        message: Message = msgspec.convert(fields, TYPES[kind], strict=True)
    except (msgspec.ValidationError, OverflowError, RecursionError) as e:
        code = Code.BAD_PARAMS if "sampling" in str(e) else Code.BAD_MESSAGE
        raise ProtocolError(code, f"{kind}: {_explain(e)}", _sid(fields)) from None
    return message


def _unpack(frame: bytes | str, limit: int) -> dict[str, Any]:
    if isinstance(frame, str):
        raise ProtocolError(Code.BAD_FRAME, "a text frame; this protocol uses binary frames")
    if len(frame) > limit:
        raise ProtocolError(Code.TOO_LARGE, f"a frame of {len(frame)} bytes; the limit is {limit}")
    try:
        fields = msgpack.unpackb(
            frame,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_str_len=4096,
            max_bin_len=4096,
            max_array_len=MAX_TOKENS,
            max_map_len=64,
            max_ext_len=0,
        )
    except (msgpack.UnpackException, ValueError, TypeError, RecursionError, MemoryError) as e:
        raise ProtocolError(Code.BAD_FRAME, f"not a MessagePack message: {str(e)[:120] or type(e).__name__}") from None
    if not isinstance(fields, dict) or not all(isinstance(k, str) for k in fields):
        raise ProtocolError(Code.BAD_FRAME, "a message is a MessagePack map with string keys")
    return fields


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
        return text
    sentence = text[: at.start()]
    return f"{at['field']}: {sentence[0].lower()}{sentence[1:]}"


def _sid(fields: dict[str, Any]) -> int | None:
    sid = fields.get("sid")
    return sid if isinstance(sid, int) and not isinstance(sid, bool) and 0 <= sid < 2**32 else None
