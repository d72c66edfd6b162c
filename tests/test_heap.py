"""Freed memory goes back to the system."""

import asyncio
import gc
import platform
import subprocess
import sys

import pytest
from paceline.kernels import heap

# Blocks of a kilobyte or so come from the heap; what is kept of them holds the top of it in place.
HOLES = """
import ctypes
from pathlib import Path
from paceline.kernels.heap import trim
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def resident(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
blocks = [c.malloc(16_000) for _ in range(2_000)]
for block in blocks: ctypes.memset(block, 1, 16_000)
for i, block in enumerate(blocks):
    if i % 16: c.free(block)
full = resident()
trim()
print(full - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="holes are glibc's")
def test_holes_between_what_is_in_use_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 2_000 * 16_000 / 2


async def test_it_goes_on_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    times, twice = 0, asyncio.Event()

    def count() -> bool:
        nonlocal times
        times += 1
        if times == 2:
            twice.set()
        return False

    monkeypatch.setattr(heap, "trim", count)
    task = asyncio.create_task(heap.keep_small(0.001))
    await twice.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_meanwhile_the_collector_comes_seldom_and_afterwards_as_before() -> None:
    before = gc.get_threshold()
    try:
        for youngest, meanwhile in ((700, heap.YOUNG), (10**6, 10**6), (0, 0)):  # 0: whoever runs this wants none
            gc.set_threshold(youngest, 10, 10)
            task = asyncio.create_task(heap.keep_small())
            await asyncio.sleep(0)
            assert gc.get_threshold() == (meanwhile, 10, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert gc.get_threshold() == (youngest, 10, 10)
    finally:
        gc.set_threshold(*before)


def test_where_the_c_library_has_nothing_of_the_kind_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_malloc_trim", lambda: None)
    assert not heap.trim()
