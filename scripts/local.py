"""A verifier of one's own: the same `paceline cloud` that runs elsewhere, as a child process on this machine."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread

from paceline.cloud.settings import READY as READY  # what its first line of output begins with
from paceline.protocol.errors import PacelineError


@contextmanager
def local_verifier(arguments: Sequence[str]) -> Iterator[str]:
    """The address of a verifier started with these arguments of `paceline cloud`; it ends with the block.

    It also ends when this process is killed: it watches its standard input. Raises PacelineError with what it said.
    """
    command = [sys.executable, "-m", "paceline.scripts.cli", "cloud", "--port", "0", *arguments]
    with serving(command, "local verifier") as url:
        yield url


@contextmanager
def serving(command: Sequence[str], name: str, patience: float = 5) -> Iterator[str]:
    """The address of one of our servers, started by `command`, once it says it; it has `patience` seconds to end in.

    Raises PacelineError with what it said.
    """
    # Not a pipe: nobody reads along, and a full pipe stops a process.
    said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the process
    process = subprocess.Popen(
        [*command, "--stop-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        text=True,
        start_new_session=True,  # Ctrl-C in this terminal stops an answer, not the server
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline().strip()
        if not line.startswith(READY):
            process.wait()
            said.seek(0)
            raise PacelineError(_reason(said.read(), name))
        yield line.removeprefix(READY)
    finally:
        process.stdin.close()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        said.close()


def _reason(said: str, name: str) -> str:
    """The server's own line of error, of all that it said."""
    lines = [line for line in said.splitlines() if line.strip()]
    own = [line.removeprefix("paceline: ") for line in lines if line.startswith("paceline: ")]
    return own[-1] if own else f"the {name} ended before it was ready: {lines[-1] if lines else 'it said nothing'}"


def when_stdin_ends(then: Callable[[], object]) -> None:
    """Call `then` on the running loop when standard input ends: a parent that is killed takes its child along."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock would be held when the interpreter ends
            pass
        with suppress(RuntimeError):  # the loop has ended by itself meanwhile
            loop.call_soon_threadsafe(then)

    Thread(target=wait, daemon=True, name="stdin").start()
