"""Networks that go wrong below TCP, in namespaces of their own: an address that changes, a peer that is gone without a word.

They need root on Linux. A real verifier and a real edge stand on either side, as processes. What is asserted is the text and that
the fault was felt, never how long anything took; the faults run side by side, as most of them are waited out.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import pytest
from paceline.cloud.engines.toy import ToyEngine
from paceline.edge.held import read_held
from paceline.protocol.sampling import Sampling
from paceline.scripts.chaos.answers import Question
from paceline.scripts.local import READY

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or which("ip") is None, reason="needs root on Linux, and iproute2"
)
TOKENS, SEED = 500, 5
CLOUD = "10.78.0.1"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Scene:
    """Two namespaces with a cable between them, a verifier in one and an edge in the other."""

    def __init__(self, number: int, folder: Path) -> None:
        self.edge, self.cloud = (f"pace{side}{number}x{os.getpid()}" for side in "ec")
        self.state = folder / f"{number}.json"
        self.tried = self.connections = 0  # attempts of the edge to connect, and those that succeeded
        self._verifier: asyncio.subprocess.Process | None = None

    # ---- what may go wrong

    def address(self, host: int) -> None:
        """Give the edge another address instead of the one it has."""
        ip("-n", self.edge, "addr", "flush", "dev", "cable")
        ip("-n", self.edge, "addr", "add", f"10.78.0.{host}/24", "dev", "cable")

    def deaf(self, on: bool) -> None:
        """What the cloud sends gets lost; what the edge sends arrives, and neither end is told."""
        ip("-n", self.cloud, "route", "add" if on else "del", "blackhole", "10.78.0.2/32")

    async def power_cut(self) -> None:
        """The verifier is gone, with its machine's memory of connections, and comes back: nothing was said at its end."""
        ip("-n", self.cloud, "link", "set", "cable", "down")
        await self.stop()
        await self.serve()
        ip("-n", self.cloud, "link", "set", "cable", "up")

    # ---- who takes part

    async def serve(self) -> None:
        command = ["ip", "netns", "exec", self.cloud, sys.executable, "-m", "paceline.scripts.cli", "cloud"]
        command += ["--engine", "toy", "--host", "0.0.0.0", "--verify-floor", "0.02", "--stop-with-stdin"]
        pipe = asyncio.subprocess.PIPE
        self._verifier = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert self._verifier.stdout is not None
        assert (await self._verifier.stdout.readline()).decode().startswith(READY)

    async def stop(self) -> None:
        assert self._verifier is not None
        self._verifier.kill()
        await self._verifier.communicate()

    async def answer(self, go_wrong: Callable[["Scene"], Awaitable[None]]) -> list[int]:
        """What the edge writes, with something going wrong when it has a part of it."""
        command = ["ip", "netns", "exec", self.edge, sys.executable, "-m", "paceline.scripts.chaos.edge"]
        command += [
            "--url",
            f"ws://{CLOUD}:8765",
            "--state",
            str(self.state),
            "--tokens",
            str(TOKENS),
            "--seed",
            str(SEED),
        ]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        assert process.stdout is not None
        assert process.stderr is not None
        listening = asyncio.create_task(self._listen(process.stderr))
        while len(held.tokens if (held := read_held(self.state)) else ()) < 20:
            assert process.returncode is None
            await asyncio.sleep(0.02)
        await go_wrong(self)
        out = await process.stdout.read()
        await asyncio.gather(process.wait(), listening)
        text: list[int] = json.loads(out)
        return text

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - another process makes it true
            await asyncio.sleep(0.02)

    async def _listen(self, said: asyncio.StreamReader) -> None:
        while line := await said.readline():
            self.tried += line == b"connects\n"
            self.connections += line == b"connected\n"


@contextmanager
def scene(number: int, folder: Path) -> Iterator[Scene]:
    made = Scene(number, folder)
    try:
        try:
            for name in (made.edge, made.cloud):
                ip("netns", "add", name)
            ip("-n", made.edge, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", made.cloud)
        except subprocess.CalledProcessError as e:
            pytest.skip(f"no namespaces with virtual cards here: {e.stderr.strip()}")
        for name in (made.edge, made.cloud):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
        ip("-n", made.cloud, "addr", "add", f"{CLOUD}/24", "dev", "cable")
        made.address(2)
        yield made
    finally:
        for name in (made.edge, made.cloud):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


async def changed_address(s: Scene) -> None:
    s.address(3)
    await s.until(lambda: s.connections > 1)


async def half_open(s: Scene) -> None:
    s.deaf(True)
    await s.until(lambda: s.tried > 1)  # given up by the edge alone; the cloud knows of nothing
    s.deaf(False)
    await s.until(lambda: s.connections > 1)


async def ten_seconds_of_silence(s: Scene) -> None:
    s.deaf(True)
    await asyncio.sleep(10)
    s.deaf(False)


async def power_cut(s: Scene) -> None:
    await s.power_cut()
    await s.until(lambda: s.connections > 1)


FAULTS = [changed_address, half_open, ten_seconds_of_silence, power_cut]


async def test_the_text_is_the_same_whatever_happens_below(tmp_path: Path) -> None:
    async def play(number: int, fault: Callable[[Scene], Awaitable[None]]) -> tuple[list[int], int]:
        with scene(number, tmp_path) as s:
            await s.serve()
            try:
                return await s.answer(fault), s.connections
            finally:
                await s.stop()

    played = await asyncio.gather(*(play(i, fault) for i, fault in enumerate(FAULTS)))
    right = Question((1, 2, SEED), Sampling(seed=SEED, temperature=0.9), TOKENS).answer(ToyEngine())
    for fault, (text, connections) in zip(FAULTS, played, strict=True):
        assert text == right, fault.__name__
        assert connections > 1 or fault is ten_seconds_of_silence, fault.__name__
