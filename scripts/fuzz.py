"""python -m paceline.scripts.fuzz TARGET: frames that nobody would send; with --corpus guided by coverage (atheris).

Targets: `codec` (both directions), `session` (both ends of one generation), `connection` (a verifier's whole connection with the
toy engine, steps included), `server` (the same behind a real socket: bytes of no handshake, of no websocket, or of its messages).
An input is a sequence of frames, each behind its length in two bytes. A finding is any exception but
ProtocolError, a hang, or growth of what is kept; inputs that did it are left in the working directory by libFuzzer, or printed.
"""

import argparse
import asyncio
import inspect
import json
import random
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FunctionType

from paceline.cloud import connection, scheduler, server
from paceline.cloud.connection import MAX_WAITING, Connection, House
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.scheduler import Scheduler
from paceline.cloud.server import start
from paceline.protocol import cloud_session, codec, edge_session, intake, rejection, tree
from paceline.protocol.cloud_session import CloudSession, Limits
from paceline.protocol.codec import decode_from_cloud, decode_from_edge
from paceline.protocol.edge_session import EdgeSession
from paceline.protocol.errors import ProtocolError
from paceline.protocol.messages import REJECTION, SUBPROTOCOL, Draft, Open
from paceline.protocol.proposal import Proposal
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling
from paceline.scripts.lab.virtual import MemoryChannel, VirtualLoop, run_engine

MAX_INPUT = 8192
HANG_SECONDS = 60.0
REPORT_EVERY = 50_000  # inputs
Target = Callable[[Sequence[bytes]], None]
LIMITS = Limits(vocabulary=12, context=512, nodes=64)


def fuzz_codec(frames: Sequence[bytes]) -> None:
    for frame in frames:
        for decode in (decode_from_edge, decode_from_cloud):
            with suppress(ProtocolError):
                decode(frame)


def fuzz_session(frames: Sequence[bytes]) -> None:
    """What decodes goes to both ends of one generation."""
    request = GenerationRequest((1, 2, 3), Sampling(temperature=1.0), 64)
    edge = EdgeSession(request, rule=REJECTION, vocabulary_size=12)
    cloud = CloudSession(edge.open(1), LIMITS, "token")
    for frame in frames:
        with suppress(ProtocolError):
            edge.receive(decode_from_cloud(frame))
        with suppress(ProtocolError):
            message = decode_from_edge(frame)
            if isinstance(message, Draft):
                cloud.receive(message)
            elif isinstance(message, Open):
                CloudSession(message, LIMITS, "token")
        assert len(cloud.tree) <= LIMITS.nodes + 1, "the tree outgrew its limit"
        plan = cloud.plan(16)
        for node in {-1, *plan.parents}:
            plan.drawn_below(node)


class ConnectionTarget:
    """One verifier that lives through all inputs, a fresh connection for each."""

    def __init__(self) -> None:
        self._loop = VirtualLoop()
        self._loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        self._engine = ToyEngine(12, context=512)
        steps = Scheduler(self._engine, run_engine, self._loop.time, floor=0.01)
        self._house = House(steps, "toy", self._engine.vocabulary, 512, nodes=64, sessions=4, clock=self._loop.time)
        self._stepping = self._loop.create_task(steps.run())

    def __call__(self, frames: Sequence[bytes]) -> None:
        self._loop.run_until_complete(self._one(frames))

    def close(self) -> None:
        """End the verifier and its loop."""
        self._stepping.cancel()
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._stepping)
        self._loop.close()

    async def _one(self, frames: Sequence[bytes]) -> None:
        near, far = MemoryChannel.pair()
        serving = self._loop.create_task(Connection(far, self._house).serve())
        for frame in frames:
            if far._closed:
                break
            await near.send(frame)
            await asyncio.sleep(0.004)
        await asyncio.sleep(0.02)
        await near.close()
        await serving
        await asyncio.sleep(0.02)
        assert not self._stepping.done(), "the scheduler ended"
        assert not len(self._house.scheduler), "a session outlived its connection"
        assert not self._engine._sequences, "a sequence outlived its session"
        assert len(self._house.waiting) <= MAX_WAITING, "too many wait"


HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nSec-WebSocket-Protocol: " + SUBPROTOCOL.encode() + b"\r\n\r\n"
)


class ServerTarget:
    """One running server that lives through all inputs, a fresh TCP connection for each."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        self._engine = ToyEngine(12, context=512)
        steps = Scheduler(self._engine, run_engine, self._loop.time, floor=0.001)
        self._house = House(steps, "toy", self._engine.vocabulary, 512, nodes=64, sessions=4, clock=self._loop.time)
        self._stepping = self._loop.create_task(steps.run())
        self._server = await start(self._house, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]

    def __call__(self, frames: Sequence[bytes]) -> None:
        self._loop.run_until_complete(asyncio.wait_for(self._one(frames), HANG_SECONDS))

    def close(self) -> None:
        """End the server and its loop."""
        self._stepping.cancel()
        self._server.close()
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._stepping)
        self._loop.run_until_complete(self._server.wait_closed())
        self._loop.close()

    async def _one(self, frames: Sequence[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        kind = sum(map(len, frames)) % 3  # before the handshake, instead of frames, or as messages
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            if kind:
                writer.write(HANDSHAKE)
                await reader.readuntil(b"\r\n\r\n")
            for frame in frames:
                writer.write(frame if kind < 2 else _as_message(frame))
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.transport.abort()
        while self._house.connections or self._engine._sequences:  # noqa: ASYNC110 - the end may come late, never not at all
            await asyncio.sleep(0.001)
        assert not self._stepping.done(), "the scheduler ended"
        assert not len(self._house.scheduler), "a session outlived its connection"


def _as_message(frame: bytes) -> bytes:
    """A binary message of a client, with a mask of zeros."""
    return b"\x82" + bytes([0x80 | 126]) + struct.pack(">H", len(frame)) + bytes(4) + frame


def split(data: bytes) -> list[bytes]:
    """The frames of an input."""
    frames, at = [], 0
    while at + 2 <= len(data):
        (size,) = struct.unpack_from("<H", data, at)
        frames.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return frames


def join(frames: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<H", len(f)) + f for f in frames)


def seeds(vectors: Path) -> list[bytes]:
    """Golden frames, as they are and as conversations with the toy verifier."""
    from paceline.protocol.codec import encode
    from paceline.protocol.messages import Ack, Cancel, Hello, Message, Ping

    known = json.loads(vectors.read_text())
    written = [v["hex"] for kind in ("good", "bad") for v in known[kind] if "hex" in v]
    golden = [bytes.fromhex(text) for text in written if set(text) <= set("0123456789abcdef")]
    own = ToyEngine(12).vocabulary
    talk: list[Message] = [
        Hello((1,), own.name, own.size, own.fingerprint),
        Open(1, (1, 2, 3), Sampling(), 30),
        Draft(1, 0, 0, (0, 1, 1, 3), (4, 5, 6, 7), bytes((0, 5, 9, 40))),
        Ack(1, 1),
        Open(2, (3,), Sampling(seed=1, temperature=0.8, top_p=0.9), 9, held=(1, 2)),
        Ping(1.0),
        Draft(2, 2, 0, (0,), (3,)),
        Cancel(1),
        Open(3, (1, 2), Sampling(seed=2, temperature=1.0), 30, rule=REJECTION),
        Draft(
            3, 0, 0, (0, 0, 1), (4, 5, 6), b"", (Proposal(2, (4, 5, 6), b"\x09\x02\x01"), Proposal(1, (6,), b"\x01"))
        ),
        Draft(3, 0, 3, (0, 2), (7, 8), b"", (Proposal(2),)),
    ]
    spoken = [encode(m) for m in talk]
    whole = [join(spoken[: n + 1]) for n in range(len(spoken))]
    return [join([frame]) for frame in golden] + whole + [join([*spoken[:2], frame]) for frame in golden]


def mutants(corpus: Sequence[bytes], rng: random.Random) -> Iterator[bytes]:
    """Without guidance: bytes changed, cut out, doubled and taken over from elsewhere."""
    while True:
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.choice([1, 1, 2, 4, 8])):
            at, size = rng.randrange(len(data) + 1), rng.randrange(1, 16)
            match rng.randrange(5):
                case 0:
                    data[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    del data[at : at + size]
                case 2:
                    data[at:at] = data[at : at + size]
                case 3:
                    other = rng.choice(corpus)
                    start = rng.randrange(len(other) + 1)
                    data[at:at] = other[start : start + size]
                case 4:
                    data[at : at + 1] = rng.choice(
                        [b"\xc1", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8]
                    )
        yield bytes(data[:MAX_INPUT])


class Count:
    """Frames given to a target so far, and how much the process grew."""

    def __init__(self, target: Target) -> None:
        self.inputs = self.frames = 0
        self.begun, self.peak = time.monotonic(), 0
        self._target = target

    def __call__(self, data: bytes) -> None:
        frames = split(data)
        self.inputs, self.frames = self.inputs + 1, self.frames + len(frames)
        self._target(frames)
        if self.inputs == 2000:
            self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if self.inputs % REPORT_EVERY == 0:
            print(self.line(), flush=True)

    def line(self) -> str:
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.peak) / 1024
        return (
            f"{self.frames} frames in {self.inputs} inputs, {time.monotonic() - self.begun:.0f} s,"
            f" {grown:.0f} MB more than after 2,000 inputs"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=["codec", "session", "connection", "server"])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--blind", action="store_true", help="without atheris")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vectors", type=Path, default=Path("tests/vectors/frames.json"))
    parser.add_argument("--corpus", type=Path, help="folder in which atheris keeps what reached new code")
    given = parser.parse_args()
    targets: dict[str, Callable[[], Target]] = {
        "codec": lambda: fuzz_codec,
        "session": lambda: fuzz_session,
        "connection": ConnectionTarget,
        "server": ServerTarget,
    }
    count, corpus = Count(targets[given.target]()), seeds(given.vectors)
    for seed in corpus:
        count(seed)
    if given.blind or not given.corpus:
        blindly(count, corpus, given.inputs, given.seed)
    else:
        guided(count, corpus, given.inputs, given.seed, given.corpus)
    return 0


def blindly(count: Count, corpus: Sequence[bytes], inputs: int, seed: int) -> None:
    for data in mutants(corpus, random.Random(seed)):
        if count.inputs >= inputs:
            break
        try:
            count(data)
        except Exception:
            print(f"input {data.hex()}", file=sys.stderr)
            raise
    print(count.line())


def own_functions() -> Iterator[FunctionType]:
    """Those whose coverage guides."""
    for module in (codec, cloud_session, intake, rejection, edge_session, tree, connection, scheduler, server):
        for holder in (module, *(v for v in vars(module).values() if inspect.isclass(v))):
            for value in vars(holder).values():
                if inspect.isfunction(value) and value.__module__ == module.__name__:
                    yield value


def guided(count: Count, corpus: Sequence[bytes], inputs: int, seed: int, folder: Path) -> None:
    """Ends the process, as libFuzzer does."""
    import atheris  # type: ignore[import-untyped, unused-ignore]

    folder.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(corpus):
        (folder / f"seed{i:03}").write_bytes(data)
    for function in own_functions():
        atheris.instrument_func(function)
    arguments = [sys.argv[0], str(folder), f"-runs={inputs}", f"-seed={seed + 1}", f"-max_len={MAX_INPUT}"]
    atheris.Setup([*arguments, f"-timeout={HANG_SECONDS:.0f}", "-rss_limit_mb=1024", "-print_final_stats=1"], count)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
