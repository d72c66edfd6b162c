"""A model's work on a thread of its own, beside an event loop. Imports no engine."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
HANDOVER = 0.002  # seconds that the loop waits at most for work to begin


class OneThread:
    """Runs a model's work, one call after another, so that the loop keeps serving sockets meanwhile.

    Work begins before the loop goes on. What the loop has to do would otherwise hold the interpreter's lock and keep the model
    waiting, though most of a model's work needs no lock.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]:
        began = threading.Event()

        def run() -> T:
            began.set()
            return work()

        running = asyncio.get_running_loop().run_in_executor(self._pool, run)
        began.wait(HANDOVER)
        return running

    def close(self) -> None:
        """Wait for what runs; nothing more begins."""
        self._pool.shutdown(cancel_futures=True)
