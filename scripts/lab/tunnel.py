"""A link for real processes: two network namespaces, a TUN device in each, and this program carrying packets between them.

    python -m paceline.scripts.lab.tunnel '{"round_trip": 0.05}'

Needs root on Linux. It prints the names of the namespaces and the verifier's address as JSON, carries packets with the
delay, jitter, bandwidth and loss asked for, and takes everything down when its standard input ends. Lost packets are
really lost: TCP sends them again.
"""

import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

from paceline.protocol.errors import PacelineError
from paceline.scripts.lab.network import LinkSpec, Wire

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
QUEUE_SECONDS = 1.0  # packets that would wait longer for the bandwidth are dropped, as a router does
SPIN = 0.0003  # seconds before a packet is due from which on the clock is watched: select wakes up late


def possible() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0 and os.path.exists("/dev/net/tun")


def hurry() -> None:
    """Let this process run as soon as it has something to do; without the right to it, it does what it can."""
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))


class Tunnel:
    def __init__(self, spec: LinkSpec, seed: int = 1) -> None:
        """Raises PacelineError if the system refuses."""
        self._loss, self._random = spec.loss, random.Random(seed)
        lossless = replace(spec, loss=0.0)
        self._wires = [Wire(lossless, b, self._random, overhead=0) for b in (spec.up, spec.down)]
        self.names = [f"pace{side}{os.getpid()}" for side in "ec"]
        self.addresses = [f"10.77.{os.getpid() % 256}.{n}" for n in (1, 2)]
        self._fds: list[int] = []
        try:
            for name, own, other in zip(self.names, self.addresses, reversed(self.addresses), strict=True):
                self._fds.append(_open_end(name, own, other))
        except BaseException:
            self.close()
            raise

    def run(self, until: int) -> None:
        """Carry packets until the file descriptor `until` can be read."""
        waiting: list[tuple[float, int, int, bytes]] = []  # due, order, descriptor to write, packet
        order = itertools.count()
        while True:
            gap = waiting[0][0] - time.monotonic() - SPIN if waiting else 1.0
            ready, _, _ = select.select([*self._fds, until], [], [], max(gap, 0.0))
            if until in ready:
                return
            for side, fd in enumerate(self._fds):
                if fd in ready:
                    self._take(side, os.read(fd, 65536), waiting, order)
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, fd, packet = heapq.heappop(waiting)
                with suppress(OSError):  # the other end has gone down
                    os.write(fd, packet)

    def _take(
        self, side: int, packet: bytes, waiting: list[tuple[float, int, int, bytes]], order: "itertools.count[int]"
    ) -> None:
        now, wire = time.monotonic(), self._wires[side]
        if wire.busy_until - now > QUEUE_SECONDS or (self._loss and self._random.random() < self._loss):
            return
        heapq.heappush(waiting, (wire.arrival(now, len(packet)), next(order), self._fds[1 - side], packet))

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _open_end(name: str, own: str, other: str) -> int:
    """A namespace `name` with a TUN device of that name; packets sent there are read from the descriptor returned."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode()[:15], IFF_TUN | IFF_NO_PI))
    device = name[:15]
    _ip("netns", "add", name)
    _ip("link", "set", device, "netns", name)
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "addr", "add", own, "peer", other, "dev", device)
    _ip("-n", name, "link", "set", device, "up", "txqueuelen", "1000")
    return fd


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PacelineError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def main() -> None:
    spec = LinkSpec(**json.loads(sys.argv[1]))
    hurry()
    tunnel = Tunnel(spec)
    try:
        print(json.dumps({"edge": tunnel.names[0], "cloud": tunnel.names[1], "host": tunnel.addresses[1]}), flush=True)
        tunnel.run(sys.stdin.fileno())
    finally:
        tunnel.close()


if __name__ == "__main__":
    main()
