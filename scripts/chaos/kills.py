"""kill -9 of real verifier processes, while edges ask them over real sockets.

Two verifiers run the toy target, as `paceline cloud --engine toy` runs any; one of them is killed after every few frames and
started again on the same port. The edges know both addresses.
"""

import asyncio
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from paceline.cloud.engines.toy import ToyEngine
from paceline.edge.agent import Agent
from paceline.edge.draft import Extended
from paceline.edge.policies import policy
from paceline.edge.predictor import Predictor
from paceline.edge.websocket import Address, connecting
from paceline.protocol.channel import Channel
from paceline.protocol.errors import PacelineError
from paceline.scripts.chaos.answers import Question, Tally
from paceline.scripts.chaos.guess import GuessingDraft
from paceline.scripts.local import READY

EDGES = 4
STEP_SECONDS = 0.02  # so that an answer takes long enough to be hit
PATIENCE_SECONDS = 600.0  # an answer that takes longer is lost; machines may be busy


class Process:
    """A verifier as a process on a port of its own. `stop` is drained, `kill` is not."""

    def __init__(self, *arguments: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Until it is ready. Raises PacelineError with what it said if it is not."""
        line = await asyncio.get_running_loop().run_in_executor(None, self._spawn)
        if not line.decode().startswith(READY):
            raise PacelineError(f"the verifier on port {self.port} did not start: {line!r}")

    def _spawn(self) -> bytes:
        command = [sys.executable, "-m", "paceline.scripts.cli", "cloud", "--engine", "toy", "--port", str(self.port)]
        command += ["--verify-floor", str(STEP_SECONDS), "--stop-with-stdin", *self._arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    async def kill(self, signal_number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal and wait for the end. The exit status."""
        assert self._process is not None
        self._process.send_signal(signal_number)
        status = await asyncio.get_running_loop().run_in_executor(None, self._process.wait)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return status


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@asynccontextmanager
async def running(count: int, *arguments: str) -> AsyncIterator[list[Process]]:
    """So many verifiers, all of them ended with the block."""
    processes = [Process(*arguments) for _ in range(count)]
    await asyncio.gather(*(p.start() for p in processes))
    try:
        yield processes
    finally:
        await asyncio.gather(*(p.kill() for p in processes))


def real_agent(
    connect: Callable[[], Awaitable[Channel]],
    seed: int = 0,
    *,
    draft_seconds: float = 0.005,
    noise: float = 2.0,
    drafts: bool = True,
) -> Agent:
    """An agent in real time with the toy target's draft, that is wrong the more often the more `noise` there is."""
    target = ToyEngine()

    async def run_draft(work: Callable[[], Extended]) -> Extended:
        done = work()
        await asyncio.sleep(draft_seconds)
        return done

    return Agent(
        connect,
        target.vocabulary,
        policy("stream" if drafts else "ar"),
        GuessingDraft(target, noise),
        Predictor(),
        run_draft,
        clock=time.perf_counter,
        random=random.Random(seed),
    )


async def ask(
    agent: Agent, question: Question, right: list[int], tally: Tally, *, stop_after: int | None = None
) -> None:
    """Count the answer; one that is left after `stop_after` tokens must be the beginning of the right one."""
    got: list[int] = []
    events = agent.generate(question)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS), aclosing(events):
            async for event in events:
                got.extend(event.tokens)
                if stop_after is not None and len(got) >= stop_after:
                    break
    except (PacelineError, TimeoutError) as e:
        tally.lose(f"{type(e).__name__}: {e} after {len(got)} of {len(right)} tokens")
    else:
        tally.count(got, right, stopped=stop_after is not None)


async def ask_until(
    done: asyncio.Event, agent: Agent, tally: Tally, seed: int, longest: int = 400, *, leaves: float = 0.0
) -> None:
    """Question after question; the last one is still answered when `done` is set. `leaves`: the share of those left early."""
    drawn, target = random.Random(seed), ToyEngine()
    drafts = agent.draft is not None
    async with agent:
        while not done.is_set():
            question = Question.drawn(drawn, target.vocabulary.size, longest)
            right = question.answer(target)
            stop_after = drawn.randrange(len(right) + 1) if drawn.random() < leaves else None
            await ask(agent, question, right, tally, stop_after=stop_after)
            if drafts and agent.draft is None:
                drafts = False
                tally.reasons.append("drafting ended for good: an error of the draft or the planner")
                tally.crippled += 1


def killing(kills: int, seed: int = 0) -> tuple[Counter[str], Tally]:
    """Kill verifiers so many times under load. What was done, and what became of the answers."""
    return asyncio.run(_killing(kills, seed))


async def _killing(kills: int, seed: int) -> tuple[Counter[str], Tally]:
    faults, tally, drawn, done = Counter[str](), Tally(), random.Random(seed), asyncio.Event()
    async with running(2) as verifiers:
        addresses = [Address(v.url) for v in verifiers]
        agents = [real_agent(connecting(addresses, i), i) for i in range(EDGES)]
        asking = [asyncio.create_task(ask_until(done, a, tally, seed + i)) for i, a in enumerate(agents)]
        while faults["kill -9"] < kills:
            await _progress(agents, drawn.randrange(1, 60))
            victims = verifiers if drawn.random() < 0.2 else [drawn.choice(verifiers)]  # now and then all at once
            await asyncio.gather(*(v.kill() for v in victims))
            faults["kill -9"] += len(victims)
            await asyncio.gather(*(v.start() for v in victims))
        done.set()
        await asyncio.gather(*asking)
    return faults, tally


async def _progress(agents: Sequence[Agent], frames: int) -> None:
    """Until so many more frames have come down: on a busy machine too, answers get on between two kills."""
    begin = sum(a.link.traffic.frames_down for a in agents)
    while sum(a.link.traffic.frames_down for a in agents) < begin + frames:  # noqa: ASYNC110 - other processes send them
        await asyncio.sleep(0.01)
