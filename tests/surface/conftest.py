"""A whole system in this process, on a thread of its own: verifier, agent with a real draft, local server, real sockets."""

import asyncio
import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyte
import pytest
from paceline.cloud.connection import House
from paceline.cloud.engine import Engine
from paceline.cloud.engines.llamacpp import LlamaEngine
from paceline.cloud.grammar import Grammars
from paceline.cloud.scheduler import Scheduler
from paceline.cloud.server import start
from paceline.edge.agent import Agent
from paceline.edge.api.app import application
from paceline.edge.api.service import Service
from paceline.edge.policies import policy
from paceline.edge.runtime import Settings, running_agent
from paceline.edge.serve import listening
from paceline.edge.text import Text
from paceline.edge.websocket import Address
from paceline.kernels.worker import OneThread
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
    vocabulary: Path

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the system's own loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def waits_for(self, condition: Callable[[], bool], seconds: float = 60.0) -> bool:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.02)
        return condition()


@asynccontextmanager
async def cloud_at(engine: Engine, vocabulary: Path) -> AsyncIterator[tuple[str, Scheduler]]:
    thread = OneThread("engine")
    # paced, so that a draft on a busy machine has something to do
    scheduler = Scheduler(engine, thread, time.perf_counter, floor=0.05)
    house = House(scheduler, engine.name, engine.vocabulary, engine.context, clock=time.perf_counter)
    house.grammars = Grammars.of(vocabulary, engine.vocabulary.size)
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
        return System(loop, scheduler, agent, text, service, url, address, vocabulary)

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


@pytest.fixture
def prompts(system: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Prompts as they reach the verifier's engine."""
    seen: list[list[int]] = []
    open_handle = system.scheduler.engine.open

    def watched(sequence: Any) -> Any:
        seen.append(list(sequence))
        return open_handle(sequence)

    monkeypatch.setattr(system.scheduler.engine, "open", watched)
    return seen


@pytest.fixture(scope="session")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Terminal:
    """A command in a pseudo-terminal of 100 columns: what it wrote, and what stands on the screen."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.raw = ""
        self._screen = pyte.HistoryScreen(100, 40, history=5000)
        self._stream = pyte.Stream(self._screen)
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.environ.update(environment)
            os.execv(sys.executable, [sys.executable, "-m", "paceline.scripts.cli", *arguments])
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, pattern: str, seconds: float = 120.0) -> str:
        """Wait until what has been written since the last match matches; returns the match."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.raw[self._seen :], re.DOTALL)) is None:
            assert time.monotonic() < end, f"{pattern!r} never came:\n{self.raw[self._seen :]}"
            if not self._read(0.1):
                assert re.search(pattern, self.raw[self._seen :], re.DOTALL), (
                    f"it ended before {pattern!r}:\n{self.raw}"
                )
        self._seen += found.end()
        return found[0]

    def prompt(self) -> None:
        """Wait for the prompt, and until the line is being edited."""
        self.expect(r">>>\x1b\[3D\x1b\[4C")  # an empty line, not one that is painted again
        time.sleep(0.2)

    def ends(self, seconds: float = 60.0) -> int:
        """The exit status; waits for it."""
        end = time.monotonic() + seconds
        while self._read(0.1):
            assert time.monotonic() < end, "it did not end"
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def close(self) -> None:
        with suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        with suppress(OSError):
            os.close(self._fd)

    @property
    def lines(self) -> list[str]:
        """All lines that stand on the screen or were scrolled out of it, from the top."""
        above = ["".join(row[i].data for i in range(100)).rstrip() for row in self._screen.history.top]
        return above + [line.rstrip() for line in self._screen.display]

    def _read(self, seconds: float) -> bool:
        """False once the command has ended."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:
            return False
        text = self._decoder.decode(data)
        self.raw += text
        self._stream.feed(text)
        return bool(data)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Starts commands in terminals, which end with the test."""
    started: list[Terminal] = []

    def start_command(*arguments: str, **environment: str) -> Terminal:
        private = {"PACELINE_DATA": str(tmp_path / "data"), "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        started.append(Terminal(arguments, private | environment))
        return started[-1]

    yield start_command
    for one in started:
        one.close()
