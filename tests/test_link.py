"""The link to the cloud in virtual time: greeting, measuring, coming back, and what cannot get better."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from paceline.edge.link import LAST_BACK_OFF, SILENCE_SECONDS, Link, State
from paceline.protocol.channel import Channel, ChannelClosed
from paceline.protocol.codec import decode_from_edge, encode
from paceline.protocol.errors import Code, LinkError, ProtocolError
from paceline.protocol.messages import Ack, Error, Goaway, Hello, Message, Opened, Ping, Pong, Welcome
from paceline.scripts.lab.virtual import MemoryChannel, run

HELLO = Hello(versions=(1,), vocabulary="toy", vocabulary_size=12, fingerprint="0" * 64)
WELCOME = Welcome(
    version=1, model="toy", vocabulary_size=12, fingerprint="0" * 64, context=100, width=8, nodes=64, sessions=4,
    session_ttl=60.0,
)  # fmt: skip


class Ear:
    def __init__(self) -> None:
        self.ups: list[float] = []
        self.downs: list[str] = []
        self.messages: list[Message] = []

    def link_up(self, welcome: Welcome) -> None:
        self.ups.append(asyncio.get_running_loop().time())

    def link_down(self, reason: str) -> None:
        self.downs.append(reason)

    def link_message(self, message: Message) -> None:
        self.messages.append(message)


class Cloud:
    """Answers hello and pings by hand; each test says how else it behaves."""

    def __init__(self, greeting: Message | bytes | None = WELCOME, delay: float = 0.0) -> None:
        self.greeting, self.delay = greeting, delay
        self.heard: list[Message] = []
        self.connects: list[float] = []
        self.end: MemoryChannel | None = None
        self.answers = True
        self.refuse = False

    async def connect(self) -> Channel:
        self.connects.append(asyncio.get_running_loop().time())
        if self.refuse:
            raise ConnectionRefusedError("nobody listens")
        mine, self.end = MemoryChannel.pair()
        self._task = asyncio.create_task(self._serve(self.end))
        return mine

    async def _serve(self, end: MemoryChannel) -> None:
        with suppress(ChannelClosed):
            await self._answer(end)

    async def _answer(self, end: MemoryChannel) -> None:
        while True:
            message = decode_from_edge(await end.receive())
            await asyncio.sleep(self.delay)
            self.heard.append(message)
            if isinstance(message, Hello) and self.greeting is not None:
                greeting = self.greeting
                await end.send(greeting if isinstance(greeting, bytes) else encode(greeting))
            if isinstance(message, Ping) and self.answers:
                await end.send(encode(Pong(time=message.time)))


def linked(talk: Callable[[Link, Cloud, Ear], Awaitable[Any]], cloud: Cloud | None = None, **settings: Any) -> Any:
    async def main() -> Any:
        there, ear = cloud or Cloud(), Ear()
        clock = asyncio.get_running_loop().time
        link = Link(there.connect, HELLO, ear, clock=clock, random=Random(1), **settings)
        running = asyncio.create_task(link.run())
        try:
            return await talk(link, there, ear)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return run(main())


def fails(cloud: Cloud, **settings: Any) -> Exception:
    async def main() -> Exception:
        clock = asyncio.get_running_loop().time
        link = Link(cloud.connect, HELLO, Ear(), clock=clock, random=Random(1), **settings)
        try:
            await asyncio.wait_for(link.run(), 300)
        except (LinkError, ProtocolError) as e:
            return e
        raise AssertionError

    return run(main())


def test_it_comes_up_and_measures_the_round_trip() -> None:
    async def talk(link: Link, cloud: Cloud, ear: Ear) -> None:
        assert link.state is not State.UP
        link.send(Ack(sid=1, committed_len=0))  # not up yet: dropped
        await asyncio.sleep(10)
        assert link.state is State.UP
        assert link.welcome == WELCOME
        assert link.round_trip.seconds == pytest.approx(0.04)
        assert not any(isinstance(m, Ack) for m in cloud.heard)
        link.send(Ack(sid=1, committed_len=5))
        await asyncio.sleep(1)
        assert Ack(sid=1, committed_len=5) in cloud.heard
        assert link.traffic.frames_up == len(cloud.heard) or link.traffic.frames_up == len(cloud.heard) + 1

    linked(talk, Cloud(delay=0.04))


def test_messages_reach_the_listener_and_pongs_do_not() -> None:
    async def talk(link: Link, cloud: Cloud, ear: Ear) -> None:
        await asyncio.sleep(1)
        assert cloud.end is not None
        opened = Opened(sid=3, committed_len=0, resume="x", max_tokens=5)
        await cloud.end.send(encode(opened))
        await asyncio.sleep(5)
        assert ear.messages == [opened]

    linked(talk)


def test_it_comes_back_after_a_cut_and_tells_why() -> None:
    async def talk(link: Link, cloud: Cloud, ear: Ear) -> None:
        for n in range(1, 4):
            await asyncio.sleep(20)
            assert len(ear.ups) == n
            assert cloud.end is not None
            await cloud.end.close()
        await asyncio.sleep(20)
        assert len(ear.ups) == 4
        assert ear.downs == ["the link was cut"] * 3

    linked(talk)


def test_pauses_grow_to_a_limit_with_jitter() -> None:
    async def talk(link: Link, cloud: Cloud, ear: Ear) -> None:
        cloud.refuse = True
        await asyncio.sleep(2000)
        gaps = [b - a for a, b in zip(cloud.connects, cloud.connects[1:], strict=False)]
        assert max(gaps) <= LAST_BACK_OFF
        assert gaps[0] <= 0.25
        assert len(set(gaps)) == len(gaps)
        assert 100 < len(gaps) < 500
        cloud.refuse = False
        await asyncio.sleep(LAST_BACK_OFF)
        assert link.state is State.UP

    linked(talk)


def test_years_of_failures_do_not_overflow() -> None:
    link = Link(Cloud().connect, HELLO, Ear(), clock=lambda: 0.0, random=Random(1))
    assert all(0 <= link._back_off(n) <= LAST_BACK_OFF for n in (0, 1, 2, 1000, 10**6))


def test_a_silent_link_is_taken_for_dead() -> None:
    async def talk(link: Link, cloud: Cloud, ear: Ear) -> None:
        await asyncio.sleep(5)
        cloud.answers = False
        await asyncio.sleep(SILENCE_SECONDS + 2)
        assert len(ear.downs) == 1
        cloud.answers = True
        await asyncio.sleep(SILENCE_SECONDS)
        assert link.state is State.UP

    linked(talk)


def test_a_cloud_that_never_greets_is_given_up() -> None:
    e = fails(Cloud(None), attempts=2)
    assert isinstance(e, LinkError)
    assert "no answer" in str(e)


def test_attempts_count_and_the_last_reason_is_told() -> None:
    cloud = Cloud()
    cloud.refuse = True
    e = fails(cloud, attempts=4)
    assert isinstance(e, LinkError)
    assert str(e) == "nobody listens"
    assert len(cloud.connects) == 4


@pytest.mark.parametrize("code", [Code.VOCABULARY, Code.VERSION])
def test_what_cannot_get_better_is_not_tried_again(code: Code) -> None:
    cloud = Cloud(Error(code=code, message="the edge has another vocabulary"))
    e = fails(cloud)
    assert isinstance(e, ProtocolError)
    assert (e.code, str(e)) == (code, "the edge has another vocabulary")
    assert len(cloud.connects) == 1


@pytest.mark.parametrize(
    "greeting", [b"\xc1", encode(Pong(time=1.0)), encode(Error(code=Code.OVERLOADED, message="later"))]
)
def test_a_greeting_that_is_none_is_tried_again(greeting: bytes) -> None:
    cloud = Cloud(greeting)
    assert isinstance(fails(cloud, attempts=3), LinkError)
    assert len(cloud.connects) == 3


def test_a_broken_frame_cuts_the_link_and_it_comes_back() -> None:
    async def talk(link: Link, cloud: Cloud, ear: Ear) -> None:
        await asyncio.sleep(1)
        assert cloud.end is not None
        await cloud.end.send(b"\xc1\xc1")
        await asyncio.sleep(5)
        assert len(ear.ups) == 2
        assert "MessagePack" in ear.downs[0]

    linked(talk)


def test_goaway_is_followed() -> None:
    async def talk(link: Link, cloud: Cloud, ear: Ear) -> None:
        await asyncio.sleep(10)
        assert cloud.end is not None
        await cloud.end.send(encode(Goaway(reason="maintenance")))
        await asyncio.sleep(5)
        assert ear.downs == ["maintenance"]
        assert len(ear.ups) == 2

    linked(talk)
