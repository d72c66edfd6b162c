"""Frames: golden ones from one file, round trips, other encoders, every limit and its code, and whatever else may arrive."""

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.protocol import messages
from paceline.protocol.codec import convert, decode_from_cloud, decode_from_edge, encode
from paceline.protocol.errors import Code, PacelineError, ProtocolError
from paceline.protocol.messages import FROM_CLOUD, FROM_EDGE, Draft, Error, Message, Ping
from paceline.protocol.sampling import Sampling

VECTORS = json.loads((Path(__file__).parent / "vectors" / "frames.json").read_text())
DECODE = {"edge": decode_from_edge, "cloud": decode_from_cloud}
TYPES = FROM_EDGE | FROM_CLOUD


def frame_of(text: str) -> bytes:
    """Bytes of the file's hex, in which " XX*N " stands for N times XX."""
    return bytes.fromhex(re.sub(r"([0-9a-f]{2})\*(\d+)", lambda m: m[1] * int(m[2]), text))


def fields_of(value: Any) -> Any:
    """A message of the file, with its bytes as bytes."""
    if isinstance(value, dict):
        return bytes.fromhex(value["bytes"]) if "bytes" in value else {k: fields_of(v) for k, v in value.items()}
    return [fields_of(v) for v in value] if isinstance(value, list) else value


def by_name(vector: dict[str, Any]) -> str:
    return str(vector["name"])


@pytest.mark.parametrize("vector", VECTORS["good"], ids=by_name)
def test_golden_frames(vector: dict[str, Any]) -> None:
    frame, fields = bytes.fromhex(vector["hex"]), fields_of(vector["message"])
    expected = msgspec.convert(fields, TYPES[fields["type"]], strict=True)
    message = DECODE[vector["from"]](frame)
    assert message == expected
    assert DECODE[vector["from"]](encode(message)) == message
    assert msgpack.unpackb(encode(message)).items() <= fields.items()  # the future's fields are not sent on
    assert msgpack.unpackb(frame) == fields, "the file agrees with itself"
    for other in (msgpack.packb(fields), msgspec.msgpack.encode(fields), msgpack.packb(dict(reversed(fields.items())))):
        assert DECODE[vector["from"]](other) == message


def test_every_message_has_a_golden_frame() -> None:
    assert {v["message"]["type"] for v in VECTORS["good"]} == set(TYPES)


@pytest.mark.parametrize("vector", VECTORS["bad"], ids=by_name)
def test_bad_frames(vector: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as e:
        DECODE[vector["from"]](frame_of(vector["hex"]))
    assert (e.value.code, e.value.sid) == (vector["code"], vector["sid"])
    assert 10 < len(e.value.message) < 300


def test_errors_name_the_field_and_its_bounds() -> None:
    bad = msgpack.packb({"type": "open", "sid": 3, "prompt": [1], "sampling": {"top_p": 0}, "max_tokens": 5})
    with pytest.raises(ProtocolError, match=r"^open: sampling\.top_p: expected `float` > 0"):
        decode_from_edge(bad)
    with pytest.raises(PacelineError, match=r"^options: logit_bias: expected `array` of length <= 1024"):
        convert({"logit_bias": [(1, 1.0)] * 1025}, Sampling, "options")
    with pytest.raises(PacelineError, match=r"^options: temperature: expected `float` >= 0"):
        convert({"temperature": -1}, Sampling, "options")
    assert convert({"temperature": "0.5"}, Sampling, "options") == Sampling(temperature=0.5)


def test_a_text_frame_and_a_frame_beyond_the_limit() -> None:
    with pytest.raises(ProtocolError) as e:
        decode_from_edge('{"type": "ping"}')
    assert e.value.code is Code.BAD_FRAME
    frame = encode(Ping(1.0))
    assert decode_from_edge(frame, limit=len(frame)) == Ping(1.0)
    for decode in DECODE.values():
        with pytest.raises(ProtocolError) as e:
            decode(frame, limit=len(frame) - 1)
        assert e.value.code is Code.TOO_LARGE
        with pytest.raises(ProtocolError) as e:
            decode(b"\xc0" * (messages.MAX_OPEN_BYTES + 1))
        assert e.value.code is Code.TOO_LARGE


def test_the_longest_prompt_fits_a_frame_and_one_more_token_does_not() -> None:
    fields = {"type": "open", "sid": 1, "prompt": [49_151] * messages.MAX_TOKENS, "sampling": {}, "max_tokens": 1}
    assert len(msgpack.packb(fields)) < messages.MAX_OPEN_BYTES
    assert len(decode_from_edge(msgpack.packb(fields)).prompt) == messages.MAX_TOKENS  # type: ignore[attr-defined]
    fields["prompt"] = [1] * (messages.MAX_TOKENS + 1)
    with pytest.raises(ProtocolError) as e:
        decode_from_edge(msgpack.packb(fields))
    assert e.value.code is Code.BAD_MESSAGE


def bounds(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """(field, value just out of bounds) for every bound in a message type, read from the type itself."""
    found = []
    for field in msgspec.structs.fields(kind):
        for info in parts(msgspec.inspect.type_info(field.type)):
            wrap = (lambda v: v) if info is msgspec.inspect.type_info(field.type) else (lambda v: [v])
            for name, step in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
                if (bound := getattr(info, name, None)) is not None:
                    found.append((field.encode_name, wrap(bound + step)))
            if (longest := getattr(info, "max_length", None)) is not None and longest <= 10_000:
                unit = {"StrType": "x", "BytesType": b"x"}.get(type(info).__name__, [0])
                found.append((field.encode_name, wrap(unit * (longest + 1))))
    return found


def parts(info: Any) -> list[Any]:
    if isinstance(info, msgspec.inspect.UnionType):
        return [p for t in info.types for p in parts(t)]
    return [info, info.item_type] if isinstance(info, msgspec.inspect.VarTupleType) else [info]


@pytest.mark.parametrize("kind", TYPES)
def test_every_bound_of_every_field_is_kept(kind: str) -> None:
    example = next(fields_of(v["message"]) for v in VECTORS["good"] if v["message"]["type"] == kind)
    decode = decode_from_edge if kind in FROM_EDGE else decode_from_cloud
    tried = 0
    for field, value in bounds(TYPES[kind]):
        with pytest.raises(ProtocolError) as e:
            decode(msgpack.packb(example | {field: value}))
        assert e.value.code is Code.BAD_MESSAGE, (field, value)
        tried += 1
    assert tried >= 2
    for field in msgspec.structs.fields(TYPES[kind]):
        info = msgspec.inspect.type_info(field.type)
        assert not isinstance(info, msgspec.inspect.AnyType), "every field is typed"


def test_a_draft_in_normal_running_is_small() -> None:
    draft = Draft(1, 200, 5000, (0, 1, 1, 2, 3, 1, 2, 2), tuple(range(2000, 2008)), bytes(8))
    assert len(encode(draft)) < 120


def test_an_error_message_fits_whatever_its_text() -> None:
    error = Error.of(ProtocolError(Code.ENGINE, "x" * 10_000, 4, retry_after=1.5))
    assert decode_from_cloud(encode(error)) == error
    assert (error.sid, error.retryable, error.retry_after, len(error.message)) == (4, True, 1.5, messages.MAX_TEXT)


# ---- whatever may arrive


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(frame: bytes) -> None:
    demand_message_or_protocol_error(frame)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(sorted(TYPES)), st.data())
def test_random_values_in_known_fields(kind: str, data: st.DataObject) -> None:
    names = [f.encode_name for f in msgspec.structs.fields(TYPES[kind])]
    fields = data.draw(st.dictionaries(st.sampled_from(names), values))
    demand_message_or_protocol_error(msgpack.packb({"type": kind} | fields))


def test_mutated_frames() -> None:
    """Each golden frame with bytes flipped, cut, doubled, put in and taken out, 20,000 times."""
    rng = random.Random(0)
    frames = [bytes.fromhex(v["hex"]) for v in VECTORS["good"]]
    fine = 0
    for _ in range(20_000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(frame) + 1)
            match rng.randrange(4):
                case 0:
                    frame[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    del frame[at : at + rng.randint(1, 9)]
                case 2:
                    frame[at:at] = frame[: rng.randint(1, 9)]
                case 3:
                    frame = frame[: at or 1]
        fine += demand_message_or_protocol_error(bytes(frame))
    assert 300 < fine < 20_000


def demand_message_or_protocol_error(frame: bytes) -> int:
    fine = 0
    for decode in DECODE.values():
        try:
            message = decode(frame)
        except ProtocolError as e:
            decode_from_cloud(encode(Error.of(e)))  # what is wrong can be told to the peer
        else:
            assert isinstance(message, Message)
            assert decode(encode(message)) == message or "nan" in repr(message)
            fine += 1
    return fine


def test_a_hostile_frame_costs_little() -> None:
    """4 MB of tiny maps in a field nobody knows: skipped, not built. The bound is a hundred times what it takes."""
    body = b"\x82\xa4type\xa4ping\xa1x\x94" + (b"\xdd" + (10**6).to_bytes(4, "big") + b"\x80" * 10**6) * 4
    started = time.process_time()
    with pytest.raises(ProtocolError):
        decode_from_edge(body)
    assert time.process_time() - started < 3
