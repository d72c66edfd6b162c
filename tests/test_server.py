"""The websocket shell on loopback: what is no Paceline edge, what is too large, who is cut off or does not read."""

import asyncio
import http.client
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from paceline.cloud.connection import House
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.scheduler import Scheduler
from paceline.cloud.server import start
from paceline.edge.policies import policy
from paceline.edge.runtime import Settings, running_agent
from paceline.edge.text import Text
from paceline.edge.websocket import Address, SocketChannel, connecting
from paceline.kernels.worker import OneThread
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.errors import Code, LinkError, PacelineError
from paceline.protocol.messages import MAX_OPEN_BYTES, SUBPROTOCOL, Commit, Error, Hello, Message, Open, Opened, Ping
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling
from rig import plain
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus

TOY = ToyEngine()
HELLO = Hello(
    versions=(1,), vocabulary="toy", vocabulary_size=TOY.vocabulary.size, fingerprint=TOY.vocabulary.fingerprint
)


@asynccontextmanager
async def serving(
    floor: float = 0.0, vocabulary: Path | None = None, port: int = 0
) -> AsyncIterator[tuple[House, int, ToyEngine]]:
    engine, thread = ToyEngine(), OneThread("toy")
    scheduler = Scheduler(engine, thread, time.perf_counter, floor=floor)
    house = House(scheduler, engine.name, engine.vocabulary, engine.context, clock=time.perf_counter)
    server = await start(house, "127.0.0.1", port, vocabulary)
    stepping = asyncio.create_task(scheduler.run())
    try:
        yield house, server.sockets[0].getsockname()[1], engine
    finally:
        server.close()
        stepping.cancel()
        with suppress(asyncio.CancelledError):
            await stepping
        await server.wait_closed()
        thread.close()


def dial(port: int, **more: object):  # type: ignore[no-untyped-def]
    settings = {"subprotocols": [SUBPROTOCOL], "compression": None, "max_size": MAX_OPEN_BYTES, "close_timeout": 1}
    return connect(f"ws://127.0.0.1:{port}", **(settings | more))  # type: ignore[arg-type]


async def hear(socket_: ClientConnection, kind: type[Message]) -> Message:
    while not isinstance(message := decode_from_cloud(await socket_.recv()), kind):
        pass
    return message


async def answered(port: int) -> None:
    """Somebody else is served as if nothing had happened."""
    async with dial(port) as s:
        await s.send(encode(HELLO))
        await s.send(encode(Open(sid=1, prompt=(1, 2), sampling=Sampling(), max_tokens=20)))
        tokens: list[int] = []
        while len(tokens) < 20:
            tokens += (await hear(s, Commit)).tokens  # type: ignore[attr-defined]
        assert tokens == plain(TOY, (1, 2), Sampling(), 20)


async def freed(house: House, engine: ToyEngine, seconds: float = 20.0) -> None:
    """Within so long, no session runs and no sequence of the engine is held."""
    end = time.monotonic() + seconds
    while len(house.scheduler) or engine._sequences or house.connections:
        assert time.monotonic() < end, "not freed"
        await asyncio.sleep(0.01)


async def test_a_reason_that_is_too_long_to_be_told_is_cut_between_two_characters() -> None:
    told: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    async def handle(socket_: ServerConnection) -> None:
        await socket_.wait_closed()
        told.set_result(socket_.close_reason)

    async with serve(handle, "127.0.0.1", 0, subprotocols=[SUBPROTOCOL]) as server:  # type: ignore[list-item]
        channel = await SocketChannel.connect(Address(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        await channel.close("é" * 100)
        assert await told == "é" * 61  # of two bytes each, of 123


@asynccontextmanager
async def listing(names: list[list[str]]) -> AsyncIterator[Address]:
    """A server that notes under which names it is visited, and lets nobody stay."""

    async def handle(socket_: ServerConnection) -> None:
        assert socket_.request is not None
        names.append(socket_.request.headers.get_all("x-session-id"))

    async with serve(handle, "127.0.0.1", 0, subprotocols=[SUBPROTOCOL]) as server:  # type: ignore[list-item]
        yield Address(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}", key="a-key-that-is-long-enough")


async def test_an_edge_keeps_its_name_at_every_address_and_shares_it_with_nobody() -> None:
    names: list[list[str]] = []
    async with listing(names) as one, listing(names) as two:
        for connect in (connecting([one, two]), connecting([one, two]), connecting([one], name="")):
            for _ in range(3):
                await (await connect()).close()
    first, second, nameless = names[:3], names[3:6], names[6:]
    assert first == [first[0]] * 3
    assert second == [second[0]] * 3
    assert first[0] != second[0]
    assert all(re.fullmatch("[0-9a-f]{32}", name) for [name] in names[:6])
    assert nameless == [[], [], []]


async def test_an_agent_comes_again_under_the_name_it_had(smollm2_path: Path, tmp_path: Path) -> None:
    names: list[list[str]] = []
    async with listing(names) as address:
        for _ in range(2):
            text, settings = Text(smollm2_path), Settings((address,), smollm2_path, None, tmp_path, attempts=3)
            async with running_agent(settings, text, policy("ar")) as agent:
                with pytest.raises(LinkError):
                    await anext(agent.generate(GenerationRequest((1, 2), Sampling(), 8)))
            text.close()
    first, second = names[:3], names[3:]
    assert first == [first[0]] * 3
    assert second == [second[0]] * 3
    assert first[0] != second[0]


@pytest.mark.parametrize("subprotocols", [None, ["chat"], ["paceline.v9"]])
async def test_another_subprotocol_is_turned_away(subprotocols: list[str] | None) -> None:
    async with serving() as (_, port, _):
        refused = False
        try:  # refused while shaking hands, or right after
            async with dial(port, subprotocols=subprotocols) as s:
                await s.recv()
        except (InvalidStatus, ConnectionClosed):
            refused = True
        assert refused
        await answered(port)


async def test_text_frames_are_answered_and_huge_ones_cut_off() -> None:
    async with serving() as (house, port, engine):
        s = await dial(port)
        await s.send(encode(HELLO))
        await s.send("hello")
        assert (await hear(s, Error)).code is Code.BAD_FRAME  # type: ignore[attr-defined]
        with pytest.raises(ConnectionClosed):  # noqa: PT012 - either of the two notices
            await s.send(b"x" * (MAX_OPEN_BYTES + 1))
            await hear(s, Opened)
        # On asyncio of 3.11 a transport that was cut off while it wrote fails when it is closed again.
        with suppress(AttributeError):
            await s.close()
        await freed(house, engine)
        await answered(port)


@pytest.mark.parametrize("when", ["at once", "half a handshake", "after hello", "after open", "in mid-frame"])
async def test_cut_at_every_state(when: str) -> None:
    """The socket is reset, without a word; the session is freed within seconds and nobody else notices."""
    async with serving(floor=0.005) as (house, port, engine):
        if when in ("at once", "half a handshake"):
            raw = socket.create_connection(("127.0.0.1", port))
            raw.sendall(b"GET / HTTP/1.1\r\nUpgrade: webso" if when == "half a handshake" else b"")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            raw.close()
        else:
            s = await dial(port)
            await s.send(encode(HELLO))
            if when != "after hello":
                await s.send(encode(Open(sid=1, prompt=(1, 2), sampling=Sampling(), max_tokens=4000)))
                await hear(s, Commit)
            if when == "in mid-frame":
                s.transport.write(b"\x82\xfe\x10\x00abcd")  # 4096 bytes are announced
            s.transport.abort()
        await answered(port)
        await freed(house, engine)
        assert len(house.waiting) == (when in ("after open", "in mid-frame"))


async def test_who_stops_reading_is_let_go_and_stalls_nobody() -> None:
    async with serving() as (house, port, engine):
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # or the system keeps megabytes for it
        raw.connect(("127.0.0.1", port))
        raw.setblocking(False)
        slow = await dial(port, ping_interval=None, sock=raw)
        await slow.send(encode(HELLO))
        await slow.recv()
        (connection,) = house.open_connections
        theirs = connection._channel._socket.transport.get_extra_info("socket")  # type: ignore[attr-defined]
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        slow.transport.pause_reading()
        async with asyncio.timeout(120):  # frames a second are bounded, so filling every buffer takes its time
            while house.connections:
                with suppress(ConnectionClosed, TimeoutError):
                    await asyncio.wait_for(slow.send(encode(Ping(time=0.0))), 0.5)
                await asyncio.sleep(0)
        await answered(port)
        slow.transport.abort()
        await freed(house, engine, 5.0)


async def test_two_servers_on_one_port() -> None:
    async with serving() as (_, port, _):
        with pytest.raises(PacelineError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*--port"):
            async with serving(port=port):
                pass
        await answered(port)


def ask(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


async def test_plain_http(tmp_path: Path) -> None:
    (tmp_path / "v").write_bytes(b"GGUF vocabulary")
    async with serving(vocabulary=tmp_path / "v") as (_, port, engine):

        async def get(path: str) -> tuple[int, bytes]:
            return await asyncio.to_thread(ask, port, path)

        assert await get("/healthz") == (200, b"ok\n")
        status, body = await get("/v1/model")
        facts = json.loads(body)
        assert status == 200
        assert facts["fingerprint"] == engine.vocabulary.fingerprint
        assert facts["context"] == engine.context
        assert await get("/v1/vocabulary") == (200, b"GGUF vocabulary")
        assert (await get("/nothing"))[0] == 404
        assert (await get("/../../etc/passwd"))[0] == 404
        await answered(port)


async def test_what_is_no_http_at_all_disturbs_nobody() -> None:
    async with serving() as (house, port, engine):
        for junk in (b"\x16\x03\x01\x02\x00\x01\x00", b"\0" * 10_000, b"GET " + b"a" * 100_000):
            raw = socket.create_connection(("127.0.0.1", port))
            with suppress(OSError):
                raw.sendall(junk)
            raw.close()
        await answered(port)
        await freed(house, engine)
