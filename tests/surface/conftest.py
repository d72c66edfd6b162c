"""A whole system in this process, on a thread of its own: verifier, agent with a real draft, local server, real sockets."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from paceline.cloud.connection import House
from paceline.cloud.engine import Engine
from paceline.cloud.engines.llamacpp import LlamaEngine
from paceline.cloud.scheduler import Scheduler
from paceline.cloud.server import OneThread, start
from paceline.edge.agent import Agent
from paceline.edge.api.app import application
from paceline.edge.api.service import Service
from paceline.edge.policies import policy
from paceline.edge.runtime import Settings, running_agent
from paceline.edge.serve import listening
from paceline.edge.text import Text
from paceline.edge.websocket import Address
from paceline.scripts.pairs import vocabulary_of

T = TypeVar("T")


@dataclass
class System:
    """A running system. `verifier` is its websocket address, `url` that of the local server."""

    loop: asyncio.AbstractEventLoop
    scheduler: Scheduler
    agent: Agent
    text: Text
    service: Service
    verifier: str
    url: str

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the system's own loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def waits_for(self, condition: Callable[[], bool], seconds: float = 10.0) -> bool:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.02)
        return condition()


@asynccontextmanager
async def cloud_at(engine: Engine, vocabulary: Path) -> AsyncIterator[tuple[str, Scheduler]]:
    thread = OneThread("engine")
    scheduler = Scheduler(engine, thread, time.perf_counter)
    house = House(scheduler, engine.name, engine.vocabulary, engine.context, clock=time.perf_counter)
    server = await start(house, "127.0.0.1", 0, vocabulary)
    stepping = asyncio.create_task(scheduler.run())
    yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}", scheduler
    stepping.cancel()
    server.close()
    await server.wait_closed()
    thread.close()


@contextmanager
def running_system(
    engine: Engine,
    vocabulary: Path,
    draft: Path | None,
    cache: Path,
    keys: frozenset[str] = frozenset(),
    round_trip: float = 0.0,
) -> Iterator[System]:
    """The system on a loop in a thread; everything is closed when the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    stack = AsyncExitStack()

    async def bring_up() -> System:
        url, scheduler = await stack.enter_async_context(cloud_at(engine, vocabulary))
        text = Text(vocabulary)
        settings = Settings((Address(url),), vocabulary, draft, cache, round_trip=round_trip, attempts=None)
        chosen = policy("stream" if draft else "ar")
        agent = await stack.enter_async_context(running_agent(settings, text, chosen))
        service = Service(agent, text, "smollm2", "test", keys, patience=5)
        address = await stack.enter_async_context(listening(application(service), "127.0.0.1", 0))
        return System(loop, scheduler, agent, text, service, url, address)

    try:
        yield asyncio.run_coroutine_threadsafe(bring_up(), loop).result(120)
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


@pytest.fixture(scope="session")
def engine(smollm2_path: Path) -> Iterator[LlamaEngine]:
    engine = LlamaEngine(smollm2_path, context=1024, slots=4)
    yield engine
    engine.shut()


@pytest.fixture(scope="session")
def system(
    engine: LlamaEngine, smollm2_path: Path, smollm2_draft_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    with running_system(
        engine, vocabulary_of(smollm2_path), smollm2_draft_path, tmp_path_factory.mktemp("cache")
    ) as system:
        yield system


@pytest.fixture(scope="session")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool
