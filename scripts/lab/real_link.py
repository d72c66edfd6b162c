"""The real clock's link between two processes: namespaces and TUN when root, a proxy otherwise; and how to measure it."""

import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from paceline.protocol.errors import PacelineError
from paceline.scripts.lab import tunnel
from paceline.scripts.lab.network import OVERHEAD, LinkSpec
from paceline.scripts.lab.proxy import CHUNK

BULK_SECONDS = 2.0
HEADERS = {
    "tun": 1500 / 1448,
    "proxy": (CHUNK + OVERHEAD) / CHUNK,
}  # bytes that count against the bandwidth, a payload byte


@dataclass
class Ends:
    """How to run a program on either end, and where the edge finds what listens at the cloud's."""

    kind: str
    spec: LinkSpec
    edge: list[str] = field(default_factory=list)
    cloud: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"
    _proxies: list["subprocess.Popen[str]"] = field(default_factory=list)

    def reach(self, port: int) -> tuple[str, int]:
        """Address and port at which the edge reaches `port` of the cloud's end."""
        if self.kind == "tun":
            return self.host, port
        process = child(
            [sys.executable, "-m", "paceline.scripts.lab.proxy", json.dumps(asdict(self.spec)), self.host, str(port)]
        )
        self._proxies.append(process)
        return "127.0.0.1", int(first_line(process))


@contextmanager
def link_between(spec: LinkSpec, kind: str = "auto") -> Iterator[Ends]:
    """`kind`: tun, proxy, or auto. Raises PacelineError where TUN was asked for and cannot be had."""
    if kind == "tun" and not tunnel.possible():
        raise PacelineError("the TUN link needs root on Linux and /dev/net/tun; use --via proxy")
    if kind == "proxy" or not tunnel.possible():
        ends = Ends("proxy", spec)
        try:
            yield ends
        finally:
            for process in ends._proxies:
                end(process)
        return
    process = child([sys.executable, "-m", "paceline.scripts.lab.tunnel", json.dumps(asdict(spec))])
    try:
        names = json.loads(first_line(process))
        inside = ["ip", "netns", "exec"]
        yield Ends("tun", spec, [*inside, names["edge"]], [*inside, names["cloud"]], names["host"])
    finally:
        end(process)


def child(command: Sequence[str]) -> "subprocess.Popen[str]":
    """A process that ends when its standard input does."""
    pipe = subprocess.PIPE
    return subprocess.Popen(list(command), stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def first_line(process: "subprocess.Popen[str]") -> str:
    """Raises PacelineError with what the process said, if it ended instead."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        end(process)
        said = process.stderr.read().strip().splitlines() if process.stderr else []
        raise PacelineError(f"the lab's process ended before it was ready: {said[-1] if said else 'no message'}")
    return line


def end(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Measured:
    """Medians: seconds there and back of a small message; bits a second each way of a bulk, headers included."""

    round_trip: float
    up: float
    down: float


def measure(spec: LinkSpec, kind: str) -> Measured:
    """What two processes on the ends of such a link measure."""
    me = [sys.executable, "-m", "paceline.scripts.lab.real_link"]
    with link_between(spec, kind) as ends:
        server = child([*ends.cloud, *me, "serve", ends.host])
        try:
            host, port = ends.reach(int(first_line(server)))
            bulk = "1" if spec.up or spec.down else "0"
            client = child([*ends.edge, *me, "ask", host, str(port), bulk])
            try:
                found = Measured(**json.loads(first_line(client)))
                headers = HEADERS[ends.kind]
                return Measured(found.round_trip, found.up * headers, found.down * headers)
            finally:
                end(client)
        finally:
            end(server)


def _serve(host: str) -> None:
    """Echo small messages; swallow a bulk and say how fast it came; send a bulk back."""
    with socket.create_server((host, 0)) as door:
        print(door.getsockname()[1], flush=True)
        threading.Thread(target=_answer, args=(door,), daemon=True).start()
        sys.stdin.buffer.read()


def _answer(door: socket.socket) -> None:
    while True:
        peer, _ = door.accept()
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while kind := peer.recv(1):
                if kind == b"p":
                    peer.sendall(kind)
                elif kind == b"u":
                    peer.sendall(json.dumps(_receive_bulk(peer)).encode().ljust(32))
                elif kind == b"d":
                    _send_bulk(peer)


def _send_bulk(peer: socket.socket) -> None:
    finish, block = time.monotonic() + BULK_SECONDS, b"x" * 16384
    while time.monotonic() < finish:
        peer.sendall(block)
    peer.sendall(b"end")


def _receive_bulk(peer: socket.socket) -> float:
    """Bits a second over the second half: TCP has found the bandwidth by then."""
    marks, total, tail = list[tuple[float, int]](), 0, b""
    while not tail.endswith(b"end"):
        data = peer.recv(65536)
        if not data:
            break
        total, tail = total + len(data), data[-3:]
        marks.append((time.monotonic(), total))
    middle = marks[0][0] + (marks[-1][0] - marks[0][0]) / 2
    half = next(m for m in marks if m[0] >= middle)
    return 8 * (marks[-1][1] - half[1]) / max(marks[-1][0] - half[0], 1e-6)


def _ask(host: str, port: int, bulk: bool) -> None:
    with socket.create_connection((host, port), timeout=30) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(40):
            begin = time.monotonic()
            peer.sendall(b"p")
            peer.recv(1)
            trips.append(time.monotonic() - begin)
        up = down = 0.0
        if bulk:
            peer.sendall(b"u")
            _send_bulk(peer)
            up = float(json.loads(peer.recv(32, socket.MSG_WAITALL)))
            peer.sendall(b"d")
            down = _receive_bulk(peer)
    print(json.dumps({"round_trip": statistics.median(trips), "up": up, "down": down}), flush=True)


if __name__ == "__main__":
    tunnel.hurry()  # the link is measured here, not how busy the machine is
    if sys.argv[1] == "serve":
        _serve(sys.argv[2])
    else:
        _ask(sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")
