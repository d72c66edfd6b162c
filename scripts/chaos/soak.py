"""An hour of mixed load with faults: does memory stay flat, do hits stay as frequent, is every answer right?

Three parts: a verifier and a crowd of agents, each a process as users have them, and between them a proxy that breaks bytes
under TLS; now and then strangers come to the verifier who speak no protocol, or half of one. Both processes are sampled all
along.
"""

import asyncio
import itertools
import json
import ssl
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from paceline.protocol.errors import PacelineError
from paceline.scripts.chaos.answers import Tally
from paceline.scripts.chaos.kills import Process
from paceline.scripts.chaos.pipe import ByteFaults, HostileProxy
from paceline.scripts.chaos.trend import Memory, Trend, trend

FLOOR = 0.05  # seconds of a verification step; a draft step takes half of it
WARM_SHARE = 0.25  # of the time, before what is measured begins: tables are learned, time lines and pools are filled
SAMPLES = 720  # over the measured time
MIB = 1024 * 1024
STRANGERS = [  # what comes to an open port
    b"",
    b"GET / HTTP/1.1\r\nUpgrade: websoc",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    b"\x00" * 4096,
    b"GET /" + b"x" * 70_000,
]


@dataclass
class Sample:
    """`steps` of sessions so far and `hits` among them, as the verifier counts them."""

    at: float
    verifier: Memory
    edge: Memory
    steps: float
    hits: float
    sessions: float

    def line(self) -> str:
        return (
            f"{self.at:6.0f} s: verifier {self.verifier.own / MIB:.2f} MiB, edge {self.edge.own / MIB:.2f} MiB of their own,"
            f" {self.steps:.0f} steps, {self.hits:.0f} hits, {self.sessions:.0f} sessions"
        )


@dataclass
class Soak:
    samples: list[Sample] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)

    def memory(self, who: str, kind: str) -> Trend:
        """Of `verifier` or `edge`, `resident`, `proportional` or `own`."""
        return trend([s.at for s in self.samples], [getattr(getattr(s, who), kind) for s in self.samples])

    @property
    def hits(self) -> Trend:
        """Share of sessions' steps that began with a node held, between samples; where nobody stepped, the share in all."""
        whole = self.hit_rate(0.0, 1.0)
        pairs = list(itertools.pairwise(self.samples))
        shares = [(b.hits - a.hits) / (b.steps - a.steps) if b.steps > a.steps else whole for a, b in pairs]
        return trend([b.at for _, b in pairs], shares)

    def hit_rate(self, begin: float, end: float) -> float:
        """Over a part of the measured time, given in shares of it."""
        first, last = (self.samples[round(x * (len(self.samples) - 1))] for x in (begin, end))
        return (last.hits - first.hits) / max(last.steps - first.steps, 1.0)

    @property
    def passed(self) -> bool:
        flat = all(self.memory(who, "own").flat() for who in ("verifier", "edge"))
        return self.tally.whole and self.tally.answers > 0 and flat and self.hits.flat(0.02)

    def lines(self) -> list[str]:
        done = ", ".join(f"{n} {name}" for name, n in sorted(self.faults.items(), key=lambda f: -f[1]) if n)
        said = [
            f"{len(self.samples)} samples over {self.samples[-1].at - self.samples[0].at:.0f} s",
            f"{sum(self.faults.values())} faults ({done})",
            f"{self.tally.answers} answers, {self.tally.tokens} tokens, {self.tally.stopped} left on purpose",
            f"{self.tally.altered} altered, {self.tally.lost} lost, {self.tally.crippled} agents stopped drafting",
            *self.tally.reasons[:20],
        ]
        for who in ("verifier", "edge"):
            for kind in ("own", "proportional", "resident"):
                said.append(f"memory of the {who}, {kind}: {_megabytes(self.memory(who, kind))}")
        hits = self.hits
        said.append(
            f"hits: {self.hit_rate(0, 0.1):.4f} in the first tenth, {self.hit_rate(0.9, 1):.4f} in the last;"
            f" {3600 * hits.slope:+.4f} an hour, noise {3600 * hits.noise:.4f}"
        )
        return [*said, "passed" if self.passed else "FAILED"]


def _megabytes(t: Trend) -> str:
    slope, noise = 3600 * t.slope / MIB, 3600 * t.noise / MIB
    return f"{t.mean / MIB:.1f} MiB, {slope:+.3f} MiB an hour, noise {noise:.3f}"


async def soak(
    seconds: float,
    seed: int = 0,
    edges: int = 4,
    longest: int = 400,
    tell: Callable[[str], None] = lambda line: None,
) -> Soak:
    """`tell` hears a line each hundredth of the time. Raises PacelineError if a process does not start or dies."""
    made, faults = Soak(), ByteFaults(Random(seed))
    with TemporaryDirectory() as folder:
        certificate, both = self_signed(Path(folder))
        verifier = Process("--tls-certificate", str(both), "--verify-floor", str(FLOOR), "--slots", "64")
        await verifier.start()
        try:
            async with (
                HostileProxy(verifier.port, faults) as proxy,
                crowd(proxy.port, certificate, seed, edges, longest, made.tally) as edge,
            ):
                strangers = asyncio.create_task(_strangers(verifier.port, made.faults, Random(seed + 1)))
                await asyncio.sleep(WARM_SHARE * seconds)
                await sample(made, seconds, verifier, edge, certificate, tell)
                strangers.cancel()
        finally:
            await verifier.kill()
    made.faults.update(faults.done)
    return made


@asynccontextmanager
async def crowd(
    port: int, certificate: Path, seed: int, edges: int, longest: int, tally: Tally
) -> AsyncIterator["asyncio.subprocess.Process"]:
    """Agents as a process; at the end of the block their last answers are waited for and counted into `tally`."""
    command = ["--url", f"wss://127.0.0.1:{port}", "--authority", str(certificate), "--seed", str(seed)]
    command += ["--edges", str(edges), "--longest", str(longest), "--draft-seconds", str(FLOOR / 2)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline.scripts.chaos.crowd", *command,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        out, _ = await process.communicate()
        if process.returncode:
            raise PacelineError(f"the process of the edges ended with status {process.returncode}")
        vars(tally).update(json.loads(out))
    finally:
        with suppress(ProcessLookupError):
            process.kill()


async def sample(
    made: Soak,
    seconds: float,
    verifier: Process,
    edge: "asyncio.subprocess.Process",
    certificate: Path | None,
    tell: Callable[[str], None],
) -> None:
    """Look at both processes for so long; without a `certificate` the verifier speaks in the clear. Raises PacelineError."""
    loop, begin = asyncio.get_running_loop(), time.monotonic()
    context = ssl.create_default_context(cafile=certificate) if certificate else None
    url = f"{'https' if certificate else 'http'}://127.0.0.1:{verifier.port}/metrics"
    count = max(min(SAMPLES, int(seconds)), 10)
    for i in range(count + 1):
        await asyncio.sleep(begin + i * seconds / count - time.monotonic())
        try:
            m = await loop.run_in_executor(None, metrics, url, context)
            memory = Memory.of(verifier.pid), Memory.of(edge.pid)
        except OSError as e:
            raise PacelineError(f"a process of the soak is gone after {time.monotonic() - begin:.0f} s ({e})") from None
        figures = (m[f"paceline_{name}"] for name in ("session_steps_total", "hits_total", "sessions"))
        made.samples.append(Sample(time.monotonic() - begin, *memory, *figures))
        if i % max(count // 100, 1) == 0:
            tell(made.samples[-1].line())


async def _strangers(port: int, faults: Counter[str], random: Random) -> None:
    """Connections that never become a websocket; some of them stay for a while."""
    while True:
        await asyncio.sleep(random.expovariate(1 / 5))
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(random.choice(STRANGERS))
            await asyncio.sleep(random.choice([0.0, 0.0, 3.0]))
            writer.transport.abort()
            faults["stranger"] += 1


def metrics(url: str, context: ssl.SSLContext | None) -> dict[str, float]:
    """Metrics without labels, by name. Blocking. Raises OSError."""
    with urllib.request.urlopen(url, timeout=30, context=context) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#") and "{" not in line)
    return {name: float(value) for name, value in pairs}


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, alone and together with its key. Raises PacelineError without openssl."""
    key, certificate, both = folder / "key.pem", folder / "cert.pem", folder / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=paceline"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as e:
        raise PacelineError(f"openssl could not make a certificate ({e}); is it installed?") from None
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    return certificate, both
