"""What the machinery costs: seconds outside the draft's and the target's forward, as shares of those forwards.

One answer, verifier and edge in one process on threads of their own, over a real websocket on loopback. The clocks count
CPU seconds of each thread, so a busy machine changes little and waiting counts nothing:

    edge outside     the edge's event loop (link, sessions, planner, predictor, frames) + the draft's thread - its forward
    cloud outside    the verifier's event loop (frames, sessions, scheduler) + the engine's thread - its forward

A forward is llama_decode alone, its model on one thread; choosing tokens, ranking candidates and all else is outside it.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from msgspec.structs import replace
from paceline.cloud.connection import House
from paceline.cloud.engines.llamacpp import LlamaEngine
from paceline.cloud.scheduler import Scheduler
from paceline.cloud.server import start
from paceline.edge.agent import Agent
from paceline.edge.drafts.files import FileDraft, open_draft
from paceline.edge.generation import Generation
from paceline.edge.policies import policy
from paceline.edge.predictor import Predictor
from paceline.edge.text import Text
from paceline.edge.websocket import Address, SocketChannel
from paceline.protocol.channel import Channel
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling

T = TypeVar("T")


class Thread:
    """Runs work on one thread and counts its CPU seconds."""

    def __init__(self, name: str) -> None:
        self.seconds = 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, self._timed, work)

    def _timed(self, work: Callable[[], T]) -> T:
        begin = time.thread_time()
        try:
            return work()
        finally:
            self.seconds += time.thread_time() - begin

    def close(self) -> None:
        self._pool.shutdown()


@dataclass
class Side:
    """CPU seconds of one side so far: its event loop, its model's thread, and of that the forward alone."""

    loop: float = 0.0
    thread: float = 0.0
    forward: float = 0.0

    def since(self, other: "Side") -> "Side":
        return Side(self.loop - other.loop, self.thread - other.thread, self.forward - other.forward)

    @property
    def outside(self) -> float:
        return self.loop + self.thread - self.forward

    @property
    def share(self) -> float:
        """Seconds outside the forward for each second of it."""
        return self.outside / self.forward


class CloudThread:
    """A verifier on an event loop of its own, in a thread of this process."""

    def __init__(self, target: Path, floor: float) -> None:
        self.floor = floor
        self.engine = LlamaEngine(target, threads=1, slots=2, clock=time.thread_time)
        self.thread = Thread("engine")
        self.port = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._running = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._running.start()
        self._ready.wait()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        scheduler = Scheduler(self.engine, self.thread, time.perf_counter, floor=self.floor)
        engine = self.engine
        house = House(scheduler, engine.name, engine.vocabulary, engine.context, clock=time.perf_counter)
        server = await start(house, "127.0.0.1", 0)
        stepping = asyncio.create_task(scheduler.run())
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        stepping.cancel()
        with suppress(asyncio.CancelledError):
            await stepping
        await server.wait_closed()

    def side(self) -> Side:
        async def loop_seconds() -> float:
            return time.thread_time()

        loop = asyncio.run_coroutine_threadsafe(loop_seconds(), self._loop).result()
        return Side(loop, self.thread.seconds, self.engine.forward_seconds)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._running.join()
        self._loop.close()
        self.thread.close()
        self.engine.shut()


@asynccontextmanager
async def _edge(draft: FileDraft, text: Text, thread: Thread, port: int) -> AsyncIterator[Agent]:
    async def connect() -> Channel:
        return await SocketChannel.connect(Address(f"ws://127.0.0.1:{port}"))

    clock = time.perf_counter
    stream = policy("stream")
    agent = Agent(connect, text.vocabulary, stream, draft, Predictor(), thread, clock=clock, random=Random(0))
    async with agent:
        yield agent


@dataclass(frozen=True)
class Overhead:
    """What one answer cost each side, with the bytes that went up."""

    edge: Side
    cloud: Side
    tokens: int
    draft_rows: int
    steps: int
    uplink_bytes: int
    largest_message: int


async def _measure(
    cloud: CloudThread, draft: FileDraft, text: Text, question: str, sampling: Sampling, max_tokens: int
) -> Overhead:
    thread = Thread("draft")
    prompt = tuple(text.prompt([{"role": "user", "content": question}]))
    request = GenerationRequest(prompt, sampling, max_tokens, text.end_tokens)
    async with _edge(draft, text, thread, cloud.port) as agent:
        async for _ in agent.generate(replace(request, max_tokens=1)):  # both ends have read the prompt
            pass
        made: list[Generation] = []
        up, begin_cloud = agent.link.traffic.up, cloud.side()
        begin = Side(time.thread_time(), thread.seconds, agent.drafter.forward_seconds)
        tokens = 0
        async for event in agent.generate(request, made.append):
            tokens += len(event.tokens)
        edge = Side(time.thread_time(), thread.seconds, agent.drafter.forward_seconds).since(begin)
        figures, traffic = made[0].figures, agent.link.traffic
        sent = traffic.up - up
        found = cloud.side().since(begin_cloud)
    thread.close()
    return Overhead(edge, found, tokens, figures.rows, figures.steps, sent, traffic.largest)


def measure(
    target: Path,
    draft: Path,
    vocabulary: Path,
    questions: list[str],
    sampling: Sampling,
    max_tokens: int,
    floor: float,
) -> list[Overhead]:
    """One answer to each question, each step of the verifier paced to `floor` seconds. Sums are of CPU seconds."""
    text, cloud = Text(vocabulary), CloudThread(target, floor)
    model = open_draft(draft, text.vocabulary, threads=1, clock=time.thread_time)
    try:
        return [asyncio.run(_measure(cloud, model, text, q, sampling, max_tokens)) for q in questions]
    finally:
        cloud.close()
        model.shut()


def report(found: list[Overhead]) -> dict[str, float | int]:
    """Sums over the answers."""
    edge = Side(*(sum(getattr(o.edge, k) for o in found) for k in ("loop", "thread", "forward")))
    cloud = Side(*(sum(getattr(o.cloud, k) for o in found) for k in ("loop", "thread", "forward")))
    tokens = sum(o.tokens for o in found)
    rows, steps = sum(o.draft_rows for o in found), sum(o.steps for o in found)
    return {
        "tokens": tokens,
        "draft_rows": rows,
        "steps": steps,
        "edge_forward_seconds": round(edge.forward, 3),
        "edge_loop_seconds": round(edge.loop, 3),
        "edge_thread_outside_seconds": round(edge.thread - edge.forward, 3),
        "edge_share": round(edge.share, 4),
        "cloud_forward_seconds": round(cloud.forward, 3),
        "cloud_loop_seconds": round(cloud.loop, 3),
        "cloud_thread_outside_seconds": round(cloud.thread - cloud.forward, 3),
        "cloud_share": round(cloud.share, 4),
        "uplink_bytes_per_token": round(sum(o.uplink_bytes for o in found) / tokens, 1),
        "largest_message_bytes": max(o.largest_message for o in found),
    }
