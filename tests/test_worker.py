"""A model's thread beside the loop."""

import asyncio
import sys
import threading
import time

import pytest
from paceline.kernels.worker import OneThread


def busy(seconds: float) -> float:
    """Keep the interpreter's lock for so long; returns when that ended."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
    return until


def test_work_begins_before_the_loop_goes_on() -> None:
    """Though what the loop has to do keeps the interpreter's lock: a thread that waited for it would get it only then."""

    async def main() -> bool:
        thread, begun = OneThread("model"), list[float]()
        await thread(lambda: None)  # the thread is there
        for _ in range(10):
            running = thread(lambda: begun.append(time.perf_counter()))
            ended = busy(0.02)
            await running
            if begun[-1] < ended - 0.015:
                return True
        return False

    interval = sys.getswitchinterval()
    sys.setswitchinterval(5.0)
    try:
        assert asyncio.run(main())
    finally:
        sys.setswitchinterval(interval)


def test_calls_run_one_after_another_and_their_errors_come_back() -> None:
    async def main() -> None:
        thread, order = OneThread("model"), list[str]()
        gate = threading.Event()
        first = thread(lambda: (gate.wait(), order.append("first")))
        second = thread(lambda: order.append("second"))  # does not wait for its turn for ever
        gate.set()
        await asyncio.gather(first, second)
        assert order == ["first", "second"]
        with pytest.raises(ZeroDivisionError):
            await thread(lambda: 1 // 0)
        thread.close()

    asyncio.run(main())
