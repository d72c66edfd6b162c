"""A verifier as a process: engine, scheduler and door put together, until it is told to stop."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.cloud.connection import House
from paceline.cloud.engine import Engine
from paceline.cloud.scheduler import Scheduler
from paceline.cloud.server import OneThread, start
from paceline.protocol.errors import PacelineError


@dataclass(frozen=True)
class Settings:
    """How a verifier runs. Times in seconds; `width` None: as many nodes as the engine takes."""

    engine: str = "llamacpp"
    host: str = "127.0.0.1"
    port: int = 8765
    context: int = 2048
    slots: int = 8
    threads: int | None = None
    gpu_layers: int = 0
    width: int | None = None
    verify_floor: float = 0.0
    session_ttl: float = 60.0
    keep_order: bool = True


def load_engine(settings: Settings, model: Path | None) -> Engine:
    """The engine of that name. Raises PacelineError if there is none, or the model cannot be loaded."""
    if settings.engine == "toy":
        from paceline.cloud.engines.toy import ToyEngine

        return ToyEngine(context=settings.context)
    if settings.engine == "llamacpp":
        from paceline.cloud.engines.llamacpp import LlamaEngine

        assert model is not None
        return LlamaEngine(
            model,
            context=settings.context,
            slots=settings.slots,
            threads=settings.threads,
            gpu_layers=settings.gpu_layers,
            keep_order=settings.keep_order,
        )
    raise PacelineError(f"engine {settings.engine!r} is not known; there are llamacpp and toy")


async def serve(
    settings: Settings,
    engine: Engine,
    vocabulary: Path | None,
    ready: Callable[[str], None],
    *,
    stop_with_stdin: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM (or, if asked, until standard input ends). `ready` is told the address."""
    thread = OneThread("engine")
    scheduler = Scheduler(engine, thread, time.perf_counter, width=settings.width, floor=settings.verify_floor)
    house = House(
        scheduler,
        engine.name,
        engine.vocabulary,
        engine.context,
        session_ttl=settings.session_ttl,
        clock=time.perf_counter,
    )
    server = await start(house, settings.host, settings.port, vocabulary)
    stepping = asyncio.create_task(scheduler.run())
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):
            loop.add_signal_handler(name, stop.set)
    if stop_with_stdin:
        loop.run_in_executor(None, _wait_for_end_of_stdin, lambda: loop.call_soon_threadsafe(stop.set))
    host, port = server.sockets[0].getsockname()[:2]
    ready(f"ws://{host}:{port}")
    await asyncio.wait([stepping, asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
    server.close()
    stepping.cancel()
    with suppress(asyncio.CancelledError):
        await stepping
    await server.wait_closed()
    thread.close()


def _wait_for_end_of_stdin(then: Callable[[], object]) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    then()
