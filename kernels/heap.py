"""Giving freed memory back to the system.

glibc keeps what was freed between what is still in use. Under TLS and websockets, whose buffers come in all sizes, a process that
serves for weeks grows by such holes, though it holds no more objects than on its first day. Where the C library has no
`malloc_trim` (musl, macOS, Windows) nothing happens.
"""

import asyncio
import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache

EVERY = 60.0  # seconds


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    with suppress(OSError, AttributeError):
        found = ctypes.CDLL(None).malloc_trim
        found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
        return found
    return None


def trim() -> bool:
    """Give back every whole free page; whether there were any. Takes a millisecond or so for each 20 MiB of heap."""
    found = _malloc_trim()
    return found is not None and bool(found(0))


async def keep_small(seconds: float = EVERY) -> None:
    """Trim for ever, at that interval; cancel it to end."""
    while True:
        await asyncio.sleep(seconds)
        trim()
