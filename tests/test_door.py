"""The verifier's door: TLS, keys, health, metrics, and how it closes. Real sockets on loopback, the toy target."""

import asyncio
import gc
import json
import logging
import ssl
import subprocess
import threading
import time
import weakref
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from paceline.cloud.connection import House
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.keys import Keys
from paceline.cloud.limits import Bounds
from paceline.cloud.scheduler import Scheduler
from paceline.cloud.server import start, tls_context
from paceline.edge.websocket import Address, SocketChannel, ask_model
from paceline.edge.websocket import _get as get
from paceline.kernels.heap import keep_small
from paceline.kernels.worker import OneThread
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.errors import Code, LinkError, PacelineError
from paceline.protocol.messages import Commit, Error, Goaway, Hello, Open, Opened, Welcome
from paceline.protocol.sampling import Sampling

KEY = "0123456789abcdef0123"


@dataclass
class Door:
    house: House
    port: int

    def address(self, scheme: str = "ws", **kwargs: object) -> Address:
        return Address(f"{scheme}://127.0.0.1:{self.port}", **kwargs)  # type: ignore[arg-type]


@asynccontextmanager
async def door(keys: Path | None = None, tls: ssl.SSLContext | None = None, floor: float = 0.0) -> AsyncIterator[Door]:
    engine, thread = ToyEngine(), OneThread("toy")
    scheduler = Scheduler(engine, thread, time.perf_counter, floor=floor)
    house = House(scheduler, engine.name, engine.vocabulary, engine.context, clock=time.perf_counter)
    server = await start(house, "127.0.0.1", 0, keys=Keys(keys) if keys else None, tls=tls)
    stepping = asyncio.create_task(scheduler.run())
    try:
        yield Door(house, server.sockets[0].getsockname()[1])
    finally:
        server.close()
        stepping.cancel()
        with suppress(asyncio.CancelledError):
            await stepping
        await server.wait_closed()
        thread.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1 with its key in one file."""
    folder = tmp_path_factory.mktemp("tls")
    names = "subjectAltName=IP:127.0.0.1"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=paceline",
        "-addext",
        names,
    ]
    subprocess.run(
        [*command, "-keyout", folder / "key.pem", "-out", folder / "cert.pem"], check=True, capture_output=True
    )
    both = folder / "both.pem"
    both.write_bytes((folder / "cert.pem").read_bytes() + (folder / "key.pem").read_bytes())
    return both


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"laptop {KEY}\n")
    return path


async def blocking(call, *args):  # type: ignore[no-untyped-def]
    return await asyncio.get_running_loop().run_in_executor(None, call, *args)


async def greeted(address: Address, house: House) -> SocketChannel:
    channel = await SocketChannel.connect(address)
    own = house.vocabulary
    hello = Hello(versions=(1,), vocabulary=own.name, vocabulary_size=own.size, fingerprint=own.fingerprint)
    await channel.send(encode(hello))
    assert isinstance(decode_from_cloud(await channel.receive()), Welcome)
    return channel


async def test_a_key_is_needed_for_everything_but_health(keys: Path) -> None:
    async with door(keys) as d:
        assert await blocking(get, d.address(), "/healthz", 10) == b"ok\n"
        assert await blocking(get, d.address(), "/readyz", 10) == b"ok\n"
        for wrong in (None, "x" * 20):
            with pytest.raises(LinkError, match="wants a key"):
                await SocketChannel.connect(d.address(key=wrong))
            with pytest.raises(LinkError, match="wants a key"):
                await blocking(ask_model, d.address(key=wrong))
        channel = await greeted(d.address(key=KEY), d.house)
        await channel.close()


async def test_tls_is_spoken_and_an_unknown_authority_is_not_trusted(certificate: Path) -> None:
    async with door(tls=tls_context(certificate, None, None)) as d:
        assert (await blocking(ask_model, d.address("wss", authority=certificate))).model == "toy"
        await (await greeted(d.address("wss", authority=certificate), d.house)).close()
        with pytest.raises(LinkError, match="not trusted"):
            await SocketChannel.connect(d.address("wss"))
        with pytest.raises(LinkError, match="not trusted"):
            await blocking(ask_model, d.address("wss"))


async def test_mutual_tls_wants_a_certificate_of_the_edge(certificate: Path) -> None:
    async with door(tls=tls_context(certificate, None, certificate)) as d:
        mine = d.address("wss", authority=certificate, certificate=certificate)
        await (await greeted(mine, d.house)).close()
        with pytest.raises(LinkError):
            await blocking(ask_model, d.address("wss", authority=certificate))


async def test_what_failed_handshakes_and_gone_edges_leave_is_let_go(certificate: Path) -> None:
    def left() -> int:
        return sum(type(o) is SSLProtocol for o in gc.get_objects())

    gc.disable()  # nothing else collects
    try:
        async with door(tls=tls_context(certificate, None, None)) as d:
            d.house.session_ttl = 0.0
            channel = await greeted(d.address("wss", authority=certificate), d.house)
            await channel.send(encode(Open(sid=1, prompt=(1, 2), sampling=Sampling(), max_tokens=4000)))
            await channel.receive()
            await channel.close()
            async with asyncio.timeout(60):
                while not d.house.waiting:  # noqa: ASYNC110 - asked of the house
                    await asyncio.sleep(0.01)
            tidying = asyncio.create_task(keep_small(0.05, d.house.forget_old))
            await asyncio.sleep(0)
            ring: list[object] = [threading.Event()]
            ring.append(ring)
            known = weakref.ref(ring[0])
            del ring
            assert known() is not None
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", d.port)
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                await reader.read()
                writer.close()
            async with asyncio.timeout(60):
                while known() is not None or left() or d.house.waiting:  # noqa: ASYNC110 - asked of the collector
                    await asyncio.sleep(0.01)
            tidying.cancel()
            await asyncio.wait([tidying])
    finally:
        gc.enable()
    assert gc.get_freeze_count() == 0


def test_files_that_are_no_certificates_are_named(tmp_path: Path, certificate: Path) -> None:
    (tmp_path / "junk").write_text("junk")
    for arguments in (
        (tmp_path / "junk", None, None),
        (tmp_path / "none", None, None),
        (certificate, None, tmp_path / "junk"),
    ):
        with pytest.raises(PacelineError, match=r"junk|none"):
            tls_context(*arguments)


@pytest.mark.parametrize("url", ["ws://10.1.2.3:1", "ws://example.org", "http://127.0.0.1", "ws://", "nonsense"])
def test_nothing_is_sent_in_the_clear_to_another_machine(url: str) -> None:
    with pytest.raises(LinkError, match=r"not encrypted|not a websocket address"):
        Address(url, key=KEY).check()
    Address("ws://127.0.0.1:1").check()
    Address("ws://[::1]:1").check()
    Address("wss://example.org").check()
    Address("ws://10.1.2.3:1", insecure=True).check()


async def test_metrics_count_what_happened() -> None:
    async with door() as d:
        channel = await greeted(d.address(), d.house)
        await channel.send(encode(Open(sid=1, prompt=(1, 2), sampling=Sampling(), max_tokens=5)))
        tokens = 0
        while tokens < 5:
            message = decode_from_cloud(await channel.receive())
            tokens += len(message.tokens) if isinstance(message, Commit) else 0
        text = (await blocking(get, d.address(), "/metrics", 1 << 20)).decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(values["paceline_generation_tokens_total"]) == 5
        assert float(values["paceline_steps_total"]) == 5
        assert float(values["paceline_connections"]) == 1
        assert float(values["paceline_ready"]) == 1
        assert "version" in json.loads(await blocking(get, d.address(), "/version", 100))
        await channel.close()


async def test_draining_lets_running_sessions_end_and_takes_no_new_ones() -> None:
    async with door(floor=0.01) as d:
        channel = await greeted(d.address(), d.house)
        await channel.send(encode(Open(sid=1, prompt=(1, 2), sampling=Sampling(), max_tokens=20)))
        assert isinstance(decode_from_cloud(await channel.receive()), Opened)
        d.house.drain(5.0)
        await channel.send(encode(Open(sid=2, prompt=(1, 2), sampling=Sampling(), max_tokens=20)))
        seen = []
        while not any(isinstance(m, Commit) and m.finish for m in seen):
            seen.append(decode_from_cloud(await channel.receive()))
        assert any(isinstance(m, Goaway) and m.drain == 5.0 for m in seen)
        refused = next(m for m in seen if isinstance(m, Error))
        assert (refused.sid, refused.code, refused.retryable) == (2, Code.OVERLOADED, True)
        assert sum(len(m.tokens) for m in seen if isinstance(m, Commit)) == 20
        await asyncio.wait_for(d.house.scheduler.idle.wait(), 1)
        with pytest.raises(LinkError, match="503"):
            await blocking(get, d.address(), "/readyz", 100)
        await channel.close()


@pytest.fixture
def limited_keys(tmp_path: Path) -> Path:
    path = tmp_path / "limited"
    path.write_text(f"laptop {KEY} connections=1\npi {KEY}pi\n")
    return path


async def test_connections_are_limited_before_a_websocket_begins(limited_keys: Path) -> None:
    async with door(limited_keys) as d:
        d.house.bounds = Bounds(connections=2)
        first = await greeted(d.address(key=KEY), d.house)
        with pytest.raises(LinkError, match="429"):
            await SocketChannel.connect(d.address(key=KEY))
        second = await greeted(d.address(key=f"{KEY}pi"), d.house)
        with pytest.raises(LinkError, match="503"):
            await SocketChannel.connect(d.address(key=f"{KEY}pi"))
        await first.close()
        await asyncio.sleep(0.1)
        await (await greeted(d.address(key=KEY), d.house)).close()
        await second.close()


async def test_the_audit_tells_whose_session_it_was_and_never_what(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="paceline.audit"):
        async with door(keys) as d:
            channel = await greeted(d.address(key=KEY), d.house)
            await channel.send(encode(Open(sid=7, prompt=(11, 9, 11), sampling=Sampling(), max_tokens=5)))
            tokens = 0
            while tokens < 5:
                message = decode_from_cloud(await channel.receive())
                tokens += len(message.tokens) if isinstance(message, Commit) else 0
            await channel.close()
    [figures] = [r.figures for r in caplog.records if r.name == "paceline.audit"]  # type: ignore[attr-defined]
    assert (figures["key"], figures["sid"], figures["tokens"], figures["prompt_tokens"]) == ("laptop", 7, 5, 3)
    assert (figures["end"], figures["steps"]) == ("length", 5)
    assert figures["connection"]
    assert not any(isinstance(v, list | tuple) for v in figures.values())
    assert KEY not in str(figures)
