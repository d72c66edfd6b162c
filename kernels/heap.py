"""Keeping a process that serves for weeks as small as on its first day: two things pile up that nothing of ours holds.

Rings of objects that have grown old stay until a full collection, which may take hours to come: a TLS handshake that fails
leaves one in Python 3.11, with a buffer of 256 KiB in it. And glibc keeps what was freed between what is still in use; under TLS
and websockets, whose buffers come in all sizes, such holes add up to megabytes. Where the C library has no `malloc_trim` (musl,
macOS, Windows) they stay.
"""

import asyncio
import ctypes
import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache

EVERY = 60.0  # seconds
YOUNG = 3000  # objects after which the youngest are looked through: the interpreter's 700 are fewer than a step of a crowd makes


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


async def keep_small(seconds: float = EVERY, let_go: Callable[[], object] = lambda: None) -> None:
    """Let go of what is over, collect and trim, for ever at that interval; cancel it to end.

    What was loaded before is not looked at any more, so that a collection costs what the sessions are worth: some milliseconds.
    And none comes in the middle of everything that makes a few hundred objects.
    """
    gc.collect()
    gc.freeze()
    youngest, *older = gc.get_threshold()
    if youngest:  # 0: whoever runs this does not want any
        gc.set_threshold(max(youngest, YOUNG), *older)
    try:
        while True:
            await asyncio.sleep(seconds)
            let_go()
            gc.collect()
            trim()
    finally:
        gc.set_threshold(youngest, *older)
        gc.unfreeze()
