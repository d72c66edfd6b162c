"""Spans of connections and sessions: what they say, what they never say, and that nobody pays who did not ask."""

import asyncio
import http.server
import signal
import sys
import threading

import pytest
from paceline.cloud import asgi
from paceline.cloud.connection import Connection
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.settings import Settings
from paceline.cloud.spans import Spans
from paceline.edge.websocket import Address, SocketChannel
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.errors import PacelineError
from paceline.protocol.messages import Commit, Hello, Open, Opened
from paceline.protocol.sampling import Sampling
from paceline.scripts.chaos.kills import running
from paceline.scripts.lab.virtual import MemoryChannel, run
from rig import Verifier
from test_asgi import Caller, front

trace = pytest.importorskip("opentelemetry.sdk.trace", reason="pip install 'paceline[otel]'")
PROMPT = (9, 8, 7, 6, 5)


def talked(cut: bool) -> list[trace.ReadableSpan]:  # type: ignore[name-defined]
    """The spans of one connection with one session; `cut` in the middle, or to its end."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()

    async def main() -> None:
        verifier = Verifier()
        verifier.house.spans = Spans.exporting(SimpleSpanProcessor(memory))
        own = verifier.house.vocabulary
        near, far = MemoryChannel.pair()
        serving = asyncio.ensure_future(Connection(far, verifier.house, verifier.house.owner("laptop")).serve())
        await near.send(encode(Hello((1,), own.name, own.size, own.fingerprint)))
        await near.send(encode(Open(3, PROMPT, Sampling(), 20)))
        written = 0
        while written < (5 if cut else 20):
            message = decode_from_cloud(await near.receive())
            written += len(message.tokens) if isinstance(message, Commit) else 0
        await near.close()
        await serving

    run(main())
    return list(memory.get_finished_spans())


def test_a_session_is_a_span_below_its_connections() -> None:
    session, connection = talked(cut=False)
    assert (session.name, connection.name) == ("session", "connection")
    assert session.parent is not None
    assert session.parent.span_id == connection.context.span_id
    assert connection.attributes == {"paceline.key": "laptop"}
    said = dict(session.attributes)
    assert (said["paceline.prompt_tokens"], said["paceline.tokens"], said["paceline.end"]) == (5, 20, "length")
    assert said["paceline.resumed"] is False
    assert session.end_time > session.start_time


def test_a_session_that_lost_its_edge_says_so() -> None:
    session, _ = talked(cut=True)
    assert session.attributes["paceline.end"] == "detached"
    assert session.attributes["paceline.tokens"] >= 5


def test_a_span_never_holds_what_was_written() -> None:
    """Numbers and names alone: no list could hide a prompt, and there is no event that could quote one."""
    for span in talked(cut=False):
        assert all(isinstance(v, int | str) for v in span.attributes.values())
        assert not span.events
        assert not any(str(list(PROMPT))[1:-1] in str(v) for v in span.attributes.values())


async def test_an_application_sends_its_last_spans_before_it_ends() -> None:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    door, _, thread = front()
    memory, life = InMemorySpanExporter(), Caller({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    spans = door.house.spans = Spans.exporting(BatchSpanProcessor(memory, schedule_delay_millis=3_600_000))
    spans.came("1", "laptop")
    spans.went("1")
    assert not memory.get_finished_spans()
    await asgi.Verifier(door)({"type": "lifespan"}, life.receive, life.send)
    assert [span.name for span in memory.get_finished_spans()] == ["connection"]
    thread.close()


def test_without_the_library_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(PacelineError, match=r"spans need opentelemetry.*pip install 'paceline\[otel\]'"):
        Spans.exporting()


def test_they_are_off_unless_asked_for() -> None:
    assert not Settings().otel

    async def main() -> None:
        assert Verifier().house.spans is None

    run(main())


class Collector(http.server.BaseHTTPRequestHandler):
    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("listens", [True, False])
async def test_a_real_verifier_sends_them_and_ends_without_a_collector_too(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'paceline[otel]'")
    bodies: list[bytes] = []
    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Mine", (Collector,), {"bodies": bodies}))
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    if not listens:
        collector.shutdown()
        collector.server_close()
    async with running(1, "--otel") as [verifier]:
        channel = await SocketChannel.connect(Address(verifier.url))
        own = ToyEngine().vocabulary
        await channel.send(encode(Hello((1,), own.name, own.size, own.fingerprint)))
        await channel.send(encode(Open(1, PROMPT, Sampling(), 3)))
        while not isinstance(decode_from_cloud(await channel.receive()), Opened):
            pass
        await channel.close()
        assert await verifier.kill(signal.SIGTERM) == 0
        await verifier.start()
    if listens:
        collector.shutdown()
        collector.server_close()
        assert any(b"session" in body and b"paceline-cloud" in body for body in bodies)
