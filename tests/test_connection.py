"""One edge's connection to a verifier, frame by frame, in virtual time: every refusal, every cut, and what is freed."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from paceline.cloud.connection import MAX_VIOLATIONS, OUTBOX
from paceline.cloud.engines.toy import ToyEngine
from paceline.protocol.channel import Channel, ChannelClosed
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.errors import FATAL, Code
from paceline.protocol.messages import (
    Ack,
    Cancel,
    Commit,
    Draft,
    Error,
    Hello,
    Message,
    Open,
    Opened,
    Ping,
    Pong,
    Welcome,
)
from paceline.protocol.sampling import Sampling
from paceline.scripts.lab.virtual import run
from rig import FLOOR, Verifier, plain

TOY = ToyEngine()
HELLO = Hello(
    versions=(1,), vocabulary="toy", vocabulary_size=TOY.vocabulary.size, fingerprint=TOY.vocabulary.fingerprint
)
PROMPT = (1, 2, 3)
EXPECTED = plain(TOY, PROMPT, Sampling(), 50)


def open_(sid: int = 1, **more: Any) -> Open:
    return Open(**({"sid": sid, "prompt": PROMPT, "sampling": Sampling(), "max_tokens": 50} | more))


class Edge:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def send(self, *messages: Message | bytes | str) -> None:
        for m in messages:
            await self._channel.send(encode(m) if isinstance(m, Message) else m)  # type: ignore[arg-type]

    async def next(self) -> Message:
        return decode_from_cloud(await self._channel.receive())

    async def until(self, kind: type[Message]) -> Any:
        while not isinstance(message := await self.next(), kind):
            pass
        return message

    async def text(self, count: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += (await self.until(Commit)).tokens
        return tokens

    async def closed(self) -> bool:
        try:
            while True:
                await self.next()
        except ChannelClosed:
            return True


def with_edge(
    talk: Callable[[Edge, Verifier], Coroutine[Any, Any, None]], *, greet: bool = True, **settings: Any
) -> None:
    async def main() -> None:
        verifier = Verifier(**settings)
        edge = Edge(await verifier.connect())
        if greet:
            await edge.send(HELLO)
            assert isinstance(await edge.next(), Welcome)
        await talk(edge, verifier)
        await verifier.cut()
        await asyncio.sleep(6)
        assert len(verifier.scheduler) == 0
        assert not verifier.engine._sequences, "a sequence of the engine was not freed"  # type: ignore[attr-defined]
        assert verifier.house.connections == 0
        assert all(task.done() and task.exception() is None for task in verifier.serving)
        assert not verifier.stepping.done()

    run(main())


def test_welcome_says_what_may_be_asked() -> None:
    async def talk(edge: Edge, verifier: Verifier) -> None:
        await edge.send(HELLO)
        welcome = await edge.next()
        assert isinstance(welcome, Welcome)
        assert (welcome.context, welcome.width, welcome.verify_floor) == (TOY.context, 64, FLOOR)
        await edge.send(Ping(time=3.5))
        assert await edge.next() == Pong(time=3.5)
        await edge.send(open_())
        assert (await edge.until(Opened)).max_tokens == 50
        assert await edge.text(50) == EXPECTED

    with_edge(talk, greet=False)


@pytest.mark.parametrize(("hello", "code", "said"), [
    (msgspec.structs.replace(HELLO, versions=(2, 7)), Code.VERSION, "speaks version 1, the edge [2, 7]"),
    (msgspec.structs.replace(HELLO, fingerprint="0" * 64, vocabulary="Other"), Code.VOCABULARY, "'Other'"),
])  # fmt: skip
def test_who_does_not_fit_is_told_why_and_let_go(hello: Hello, code: Code, said: str) -> None:
    async def talk(edge: Edge, verifier: Verifier) -> None:
        await edge.send(hello)
        error = await edge.next()
        assert isinstance(error, Error)
        assert error.code is code
        assert code in FATAL
        assert said in error.message
        assert await edge.closed()

    with_edge(talk, greet=False)


WRONG: dict[str, tuple[Message | bytes | str, Code]] = {
    "text frame": ("hello", Code.BAD_FRAME),
    "no MessagePack": (b"\xc1", Code.BAD_FRAME),
    "empty frame": (b"", Code.BAD_FRAME),
    "huge draft": (msgspec.msgpack.encode({"type": "draft", "sid": 1, "base_committed_len": 0, "first": 0,
                   "parents": [0], "tokens": [1], "more": "x" * 20_000}), Code.TOO_LARGE),
    "unknown type": (msgspec.msgpack.encode({"type": "steal"}), Code.UNKNOWN_TYPE),
    "missing field": (msgspec.msgpack.encode({"type": "cancel"}), Code.BAD_MESSAGE),
    "second hello": (HELLO, Code.BAD_STATE),
    "draft for nothing": (Draft(sid=40, base_committed_len=0, first=0, parents=(0,), tokens=(1,)), Code.UNKNOWN_SESSION),
    "empty prompt": (open_(2, prompt=()), Code.BAD_PROMPT),
    "prompt beyond the context": (open_(2, prompt=(1,) * 5000), Code.CONTEXT),
    "prompt beyond the vocabulary": (open_(2, prompt=(99,)), Code.BAD_TOKEN),
    "another rule": (open_(2, rule="other"), Code.UNSUPPORTED),
    "temperature": (msgspec.msgpack.encode(msgspec.to_builtins(open_(2)) | {"sampling": {"temperature": -1}}), Code.BAD_PARAMS),
    "the same number": (open_(1), Code.DUPLICATE_SESSION),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_frame_is_answered_and_disturbs_nobody(name: str) -> None:
    """Another session of the same connection runs through all of it."""
    wrong, code = WRONG[name]

    async def talk(edge: Edge, verifier: Verifier) -> None:
        await edge.send(open_(1), wrong)
        error = await edge.until(Error)
        assert error.code is code
        assert error.message
        await edge.send(open_(50))
        while (commit := await edge.until(Commit)).sid != 50 or not commit.finish:
            pass

    with_edge(talk)


@pytest.mark.parametrize(("wrong", "code"), [
    (Ack(sid=1, committed_len=4000), Code.BAD_BASE),
    (Draft(sid=1, base_committed_len=4000, first=0, parents=(0,), tokens=(1,)), Code.BAD_BASE),
    (Draft(sid=1, base_committed_len=0, first=0, parents=(0,), tokens=(99,)), Code.BAD_TOKEN),
    (Draft(sid=1, base_committed_len=0, first=0, parents=(3,), tokens=(1,)), Code.BAD_PARENT),
    (Draft(sid=1, base_committed_len=0, first=0, parents=(0, 1), tokens=(1,)), Code.BAD_MESSAGE),
])  # fmt: skip
def test_a_session_that_breaks_the_rules_ends_alone(wrong: Message, code: Code) -> None:
    async def talk(edge: Edge, verifier: Verifier) -> None:
        await edge.send(open_(1), open_(2), wrong)
        assert (await edge.until(Error)).code is code
        assert len(verifier.scheduler) == 1
        await edge.send(Ack(sid=1, committed_len=1), wrong)  # what was on its way
        tokens: list[int] = []
        while len(tokens) < 50:
            commit = await edge.until(Commit)
            assert commit.sid == 2
            tokens += commit.tokens
        assert tokens == EXPECTED

    with_edge(talk)


def test_before_hello_nothing_is_heard() -> None:
    async def talk(edge: Edge, verifier: Verifier) -> None:
        for message in (open_(), Ping(time=1.0), Cancel(sid=3)):
            await edge.send(message)
            error = await edge.next()
            assert isinstance(error, Error)
            assert error.code is Code.BAD_STATE
        assert len(verifier.scheduler) == 0
        await edge.send(HELLO)
        assert isinstance(await edge.next(), Welcome)

    with_edge(talk, greet=False)


def test_who_goes_on_breaking_the_rules_is_let_go() -> None:
    async def talk(edge: Edge, verifier: Verifier) -> None:
        for _ in range(MAX_VIOLATIONS):
            await edge.send(b"\xc1")
        for _ in range(MAX_VIOLATIONS):
            assert isinstance(await edge.next(), Error)
        with pytest.raises(ChannelClosed):
            await edge.next()

    with_edge(talk)


def test_sessions_have_a_limit_and_room_comes_back() -> None:
    async def talk(edge: Edge, verifier: Verifier) -> None:
        await edge.send(*(open_(n) for n in range(1, 5)))
        error = await edge.until(Error)
        assert (error.code, error.sid, error.retryable) == (Code.SESSION_LIMIT, 4, True)
        assert error.retry_after is not None
        await edge.send(Cancel(sid=2))
        while (commit := await edge.until(Commit)).sid != 2 or not commit.finish:
            pass
        assert commit.finish == "cancelled"
        await edge.send(open_(9))
        assert (await edge.until(Opened)).sid == 9

    with_edge(talk, sessions=3)


def test_after_cancel_nothing_runs() -> None:
    async def talk(edge: Edge, verifier: Verifier) -> None:
        await edge.send(open_(max_tokens=1000))
        await edge.text(3)
        await edge.send(Cancel(sid=1), Cancel(sid=1), Cancel(sid=77))
        while not (commit := await edge.until(Commit)).finish:
            pass
        assert commit.finish == "cancelled"
        await asyncio.sleep(0.1)
        steps = verifier.scheduler.figures.steps
        await asyncio.sleep(2)
        assert verifier.scheduler.figures.steps == steps
        assert not verifier.house.waiting

    with_edge(talk)


@pytest.mark.parametrize("tokens", [0, 1, 7, 50])
def test_a_cut_at_any_state_and_a_resume_by_token(tokens: int) -> None:
    """Cut after so many tokens; the session waits, takes no step, and goes on under the token it was given."""

    async def talk(edge: Edge, verifier: Verifier) -> None:
        await edge.send(open_())
        token = (await edge.until(Opened)).resume
        held = await edge.text(tokens)
        await verifier.cut()
        await asyncio.sleep(0.05)
        assert len(verifier.house.waiting) == (tokens < 50)
        steps = verifier.scheduler.figures.steps
        await asyncio.sleep(1)
        assert verifier.scheduler.figures.steps == steps
        again = Edge(await verifier.connect())
        await again.send(HELLO, open_(7, resume=token, held=tuple(held)))
        opened = await again.until(Opened)
        assert opened.committed_len >= len(held)
        assert held + await again.text(50 - len(held)) == EXPECTED
        assert not verifier.house.waiting

    with_edge(talk)


def test_a_stolen_or_old_token_gives_nobody_the_session() -> None:
    async def talk(edge: Edge, verifier: Verifier) -> None:
        await edge.send(open_())
        token = (await edge.until(Opened)).resume
        await edge.text(5)
        await verifier.cut()
        await asyncio.sleep(0.05)
        other = Edge(await verifier.connect())
        await other.send(HELLO, open_(1, prompt=(4, 5), resume=token))  # another request under that token
        assert (await other.until(Opened)).committed_len == 0
        assert await other.text(50) == plain(TOY, (4, 5), Sampling(), 50)

    with_edge(talk)


def test_a_session_nobody_comes_back_for_is_forgotten() -> None:
    async def talk(edge: Edge, verifier: Verifier) -> None:
        await edge.send(open_())
        token = (await edge.until(Opened)).resume
        held = await edge.text(5)
        await verifier.cut()
        await asyncio.sleep(11)
        again = Edge(await verifier.connect())
        await again.send(HELLO, open_(1, resume=token, held=tuple(held)))
        assert (await again.until(Opened)).committed_len == 5  # made anew from what the edge holds
        assert held + await again.text(45) == EXPECTED
        assert not verifier.house.waiting

    with_edge(talk, session_ttl=10.0)


@pytest.mark.parametrize("frames", range(6))
def test_cut_after_every_frame_of_a_conversation(frames: int) -> None:
    async def talk(edge: Edge, verifier: Verifier) -> None:
        draft = Draft(sid=1, base_committed_len=0, first=0, parents=(0, 1), tokens=tuple(EXPECTED[:2]))
        said: list[Message] = [HELLO, open_(), draft, Ack(sid=1, committed_len=0), Ping(time=0.0), Cancel(sid=1)]
        await edge.send(*said[: frames + 1])
        await verifier.cut()
        await asyncio.sleep(0.2)

    with_edge(talk, greet=False)


def test_a_session_does_not_run_far_ahead_of_an_edge_that_does_not_answer() -> None:
    async def talk(edge: Edge, verifier: Verifier) -> None:
        await edge.send(open_(max_tokens=3000))
        await asyncio.sleep(60)
        assert verifier.scheduler.figures.tokens == 512
        await edge.send(Ack(sid=1, committed_len=400))
        await asyncio.sleep(60)
        assert verifier.scheduler.figures.tokens == 912

    with_edge(talk)


class Stuck:
    """A channel on which nothing gets through to the reader, as when it stops reading."""

    def __init__(self, inner: Channel) -> None:
        self._inner, self._shut = inner, asyncio.Event()

    async def send(self, frame: bytes) -> None:
        await self._shut.wait()
        raise ChannelClosed("closed")

    async def receive(self) -> bytes | str:
        return await self._inner.receive()

    async def close(self, reason: str = "") -> None:
        self._shut.set()
        await self._inner.close(reason)


def test_who_does_not_read_is_let_go() -> None:
    from paceline.cloud.connection import Connection
    from paceline.scripts.lab.virtual import MemoryChannel

    async def main() -> None:
        verifier = Verifier()
        mine, theirs = MemoryChannel.pair()
        connection = asyncio.create_task(Connection(Stuck(theirs), verifier.house).serve())
        await mine.send(encode(HELLO))
        for _ in range(OUTBOX + 10):
            await mine.send(encode(Ping(time=0.0)))
        await asyncio.wait_for(connection, 10)
        assert verifier.house.connections == 0

    run(main())


def test_a_draft_is_verified_and_counted() -> None:
    async def talk(edge: Edge, verifier: Verifier) -> None:
        await edge.send(open_())
        await edge.until(Opened)
        await edge.send(
            Draft(
                sid=1,
                base_committed_len=0,
                first=0,
                parents=(0, 1, 1, 0),
                tokens=(*EXPECTED[:3], (EXPECTED[0] + 1) % 12),
            )
        )
        first = await edge.until(Commit)
        while first.base + len(first.tokens) < 4:
            first = await edge.until(Commit)
        assert first.accepted > 0
        assert first.held > 0

    with_edge(talk)
