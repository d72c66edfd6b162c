"""Edge processes that keep what they hold on a disk that is full, or fills up, and are killed: the next one writes the same text.

A full disk is a limit on the size of the files that the process may write: the system refuses the write as it does when no block
is left, and no right is needed to arrange it.
"""

import asyncio
import json
import resource
import sys
from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from paceline.cloud.engines.toy import ToyEngine
from paceline.protocol.sampling import Sampling
from paceline.scripts.chaos.answers import Question, Tally
from paceline.scripts.chaos.kills import Process, running

TOKENS = 120
ROOM = (0, 200, 500, None)  # bytes of the largest file that may be written; None: as many as there are
PATIENCE_SECONDS = 180.0


def filling(edges: int, seed: int = 0) -> tuple[Counter[str], Tally]:
    """So many edge processes, each killed once or twice. What was done, and what became of the answers."""
    return asyncio.run(_filling(edges, seed))


async def _filling(edges: int, seed: int) -> tuple[Counter[str], Tally]:
    faults, tally, random = Counter[str](), Tally(), Random(seed)
    with TemporaryDirectory() as folder:
        async with running(1, "--verify-floor", "0.01") as [verifier]:
            for i in range(edges):
                question = Question((1, 2, i % 12), Sampling(seed=i, temperature=0.9), TOKENS)
                right = question.answer(ToyEngine())
                try:
                    async with asyncio.timeout(PATIENCE_SECONDS):
                        got = await _answer(verifier, Path(folder) / f"{i}.json", i, random, faults)
                except (ValueError, TimeoutError) as e:
                    tally.lose(f"edge {i}: {type(e).__name__}: {e}")
                else:
                    tally.count(got, right)
    return faults, tally


async def _answer(verifier: Process, state: Path, seed: int, random: Random, faults: Counter[str]) -> list[int]:
    """From processes that are killed, then one that is not, each with a disk of its own size."""
    for _ in range(random.choice([1, 2])):
        edge = await _edge(verifier, state, seed, random.choice(ROOM), faults)
        assert edge.stderr is not None
        await edge.stderr.readline()  # it has begun
        await asyncio.sleep(random.uniform(0.0, 1.0))
        if edge.returncode is None:
            edge.kill()
            faults["kill -9 of an edge"] += 1
        await edge.communicate()
    edge = await _edge(verifier, state, seed, random.choice(ROOM), faults)
    out, said = await edge.communicate()
    if edge.returncode:
        raise ValueError(said.decode()[-200:])
    text: list[int] = json.loads(out)
    return text


async def _edge(
    verifier: Process, state: Path, seed: int, room: int | None, faults: Counter[str]
) -> "asyncio.subprocess.Process":
    def limit() -> None:
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))

    faults["full disk"] += room is not None
    command = ["--url", verifier.url, "--state", str(state), "--tokens", str(TOKENS), "--seed", str(seed)]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline.scripts.chaos.edge", *command,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, preexec_fn=limit,
    )  # fmt: skip
