"""The ASGI shell: behind a real server over real sockets, and called as ASGI where a server would not do such a thing."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from paceline.cloud.asgi import AsgiChannel, Verifier
from paceline.cloud.connection import House
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.front import Front
from paceline.cloud.keys import Keys
from paceline.cloud.limits import Bounds
from paceline.cloud.scheduler import Scheduler
from paceline.edge.websocket import Address, SocketChannel
from paceline.kernels.worker import OneThread
from paceline.protocol.channel import Channel, ChannelClosed
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.errors import Code, LinkError
from paceline.protocol.messages import SUBPROTOCOL, Commit, Error, Goaway, Hello, Message, Open, Opened
from paceline.protocol.sampling import Sampling
from paceline.scripts.chaos.answers import Tally
from paceline.scripts.chaos.kills import ask_until, real_agent
from rig import plain
from test_server import ask, dial, freed

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
KEY = "a-key-that-is-long-enough"
TOY = ToyEngine()
HELLO = Hello(
    versions=(1,), vocabulary="toy", vocabulary_size=TOY.vocabulary.size, fingerprint=TOY.vocabulary.fingerprint
)


def front(floor: float = 0.0, keys: Path | None = None, **bounds: Any) -> tuple[Front, ToyEngine, OneThread]:
    engine, thread = ToyEngine(), OneThread("toy")
    scheduler = Scheduler(engine, thread, time.perf_counter, floor=floor)
    house = House(
        scheduler, engine.name, engine.vocabulary, engine.context, clock=time.perf_counter, bounds=Bounds(**bounds)
    )
    return Front(house, None, Keys(keys) if keys is not None else None), engine, thread


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[House, int, ToyEngine]]:
    door, engine, thread = front(**settings)
    more = {"log_level": "error", "lifespan": "on", "timeout_graceful_shutdown": 5}
    server = uvicorn.Server(uvicorn.Config(Verifier(door), host="127.0.0.1", port=0, **more))
    running = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started or running.done())
        yield door.house, server.servers[0].sockets[0].getsockname()[1], engine
    finally:
        server.should_exit = True
        await running
        thread.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not true():  # noqa: ASYNC110 - a condition of any kind
            await asyncio.sleep(0.01)


async def hear(channel: Channel, kind: type[Message]) -> Any:
    while not isinstance(message := decode_from_cloud(await channel.receive()), kind):
        pass
    return message


async def connected(port: int, key: str | None = None) -> SocketChannel:
    return await SocketChannel.connect(Address(f"ws://127.0.0.1:{port}", key))


# ---- behind a real server


async def test_edges_are_answered_with_the_plain_text() -> None:
    tally, done = Tally(), asyncio.Event()
    async with serving(floor=0.05) as (house, port, engine):
        agents = [real_agent(lambda: connected(port), seed) for seed in range(3)]
        asking = [asyncio.create_task(ask_until(done, agent, tally, i, 60)) for i, agent in enumerate(agents)]
        await until(lambda: tally.answers >= 6 and house.scheduler.figures.accepted > 0)
        done.set()
        await asyncio.gather(*asking)
        await freed(house, engine, 30)
    assert tally.tokens
    assert tally.whole, tally.reasons


async def test_a_cut_session_waits_and_is_resumed() -> None:
    async with serving(floor=0.005) as (house, port, _):
        channel, resume, text = await connected(port), "", list[int]()
        for held in (0, 10):
            await channel.send(encode(HELLO))
            opened = Open(
                sid=1, prompt=(1, 2), sampling=Sampling(), max_tokens=30, resume=resume, held=tuple(text[:held])
            )
            await channel.send(encode(opened))
            answer = await hear(channel, Opened)
            assert not resume or answer.resume == resume, "the very session"
            resume, text = answer.resume, text[:held]
            while len(text) < (10 if not held else 30):
                commit = await hear(channel, Commit)
                assert commit.base <= len(text)
                text = text[: commit.base] + list(commit.tokens)
            await channel.close()
            await until(lambda: not house.connections)
            assert len(house.waiting) == (not held)
            channel = await connected(port)
        await channel.close()
    assert text == plain(TOY, (1, 2), Sampling(), 30)


async def test_plain_http_and_who_may_come_in(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"laptop {KEY} connections=1\n")
    async with serving(keys=keys, connections=2) as (house, port, _):
        for path, status in (("/healthz", 200), ("/readyz", 200), ("/v1/model", 401), ("/nothing", 401)):
            assert (await asyncio.to_thread(ask, port, path))[0] == status, path
        with pytest.raises(LinkError, match="key"):
            await connected(port)
        channel = await connected(port, KEY)
        with pytest.raises(LinkError, match="429"):
            await connected(port, KEY)
        house.drain(5.0)
        assert await asyncio.to_thread(ask, port, "/readyz") == (503, b"draining\n")
        assert (await hear(channel, Goaway)).drain == 5.0
        await channel.close()
        with pytest.raises(LinkError, match="503"):
            await connected(port, KEY)


async def test_text_frames_are_answered_and_another_subprotocol_is_refused() -> None:
    async with serving() as (house, port, engine):
        async with dial(port) as socket:
            await socket.send(encode(HELLO))
            await socket.send("hello")
            while not isinstance(answer := decode_from_cloud(await socket.recv()), Error):
                pass
            assert answer.code is Code.BAD_FRAME
        with pytest.raises(Exception, match="40"):
            async with dial(port, subprotocols=["paceline.v9"]):
                pass
        await freed(house, engine, 30)


# ---- as ASGI


class Caller:
    """An ASGI server's two functions, with what was sent kept."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for message in messages:
            self.inbox.put_nowait(message)
        self.gone = False

    async def receive(self) -> dict[str, Any]:
        return await self.inbox.get()

    async def send(self, message: Any) -> None:
        if self.gone:
            raise OSError("the client is gone")
        self.sent.append(dict(message))


def scope(**more: Any) -> dict[str, Any]:
    return {"type": "websocket", "path": "/", "headers": [], "subprotocols": [SUBPROTOCOL], **more}


async def test_a_server_without_the_denial_extension_closes_and_says_why(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"laptop {KEY} connections=1\n")
    door, _, thread = front(keys=keys)
    mine = {"headers": [(b"authorization", f"Bearer {KEY}".encode())]}

    async def refused(**more: Any) -> tuple[int, str]:
        caller = Caller({"type": "websocket.connect"})
        await Verifier(door)(scope(**more), caller.receive, caller.send)
        [message] = caller.sent
        assert message["type"] == "websocket.close"
        return message["code"], message["reason"]

    assert await refused() == (1008, "a key is needed: Authorization: Bearer KEY")
    assert await refused(**mine, subprotocols=[]) == (1002, f"the subprotocol here is {SUBPROTOCOL}")
    door.owner(f"Bearer {KEY}").connections = 1
    assert await refused(**mine) == (1013, "as many connections as this key may have")
    door.house.drain(1.0)
    assert await refused(**mine) == (1013, "going away")
    thread.close()


async def test_with_it_the_refusal_has_its_status() -> None:
    door, _, thread = front()
    door.house.drain(1.0)
    caller = Caller({"type": "websocket.connect"})
    await Verifier(door)(scope(extensions={"websocket.http.response": {}}), caller.receive, caller.send)
    assert [m["type"] for m in caller.sent] == ["websocket.http.response.start", "websocket.http.response.body"]
    assert caller.sent[0]["status"] == 503
    assert (b"retry-after", b"1") in caller.sent[0]["headers"]
    thread.close()


async def test_lifespan_steps_the_scheduler_and_stops_it() -> None:
    door, _, thread = front()
    verifier, caller = Verifier(door), Caller({"type": "lifespan.startup"})
    living = asyncio.create_task(verifier({"type": "lifespan"}, caller.receive, caller.send))
    await until(lambda: bool(caller.sent))
    assert verifier.stepping is not None
    assert not verifier.stepping.done()
    caller.inbox.put_nowait({"type": "lifespan.shutdown"})
    await living
    assert verifier.stepping.cancelled()
    assert [m["type"] for m in caller.sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    thread.close()


async def test_closing_ends_a_receive_that_waits() -> None:
    caller = Caller()
    channel = AsgiChannel(caller.receive, caller.send)
    reading = asyncio.create_task(channel.receive())
    await asyncio.sleep(0)
    await channel.close("enough")
    with pytest.raises(ChannelClosed, match="enough"):
        await reading
    with pytest.raises(ChannelClosed):
        await channel.send(b"x")
    await channel.close()
    assert [m["type"] for m in caller.sent] == ["websocket.close"]


async def test_a_cancelled_receive_is_cancelled() -> None:
    caller = Caller()
    channel = AsgiChannel(caller.receive, caller.send)
    reading = asyncio.create_task(channel.receive())
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_frames_and_ends_of_the_other_side() -> None:
    caller = Caller(
        {"type": "websocket.receive", "bytes": b"a", "text": None},
        {"type": "websocket.receive", "text": "b"},
        {"type": "websocket.disconnect", "code": 1006},
    )
    channel = AsgiChannel(caller.receive, caller.send)
    assert [await channel.receive(), await channel.receive()] == [b"a", "b"]
    with pytest.raises(ChannelClosed, match="1006"):
        await channel.receive()
    with pytest.raises(ChannelClosed):
        await channel.receive()
    caller = Caller()
    caller.gone = True
    channel = AsgiChannel(caller.receive, caller.send)
    with pytest.raises(ChannelClosed, match="gone"):
        await channel.send(b"x")
    with suppress(ChannelClosed):
        await channel.close()
