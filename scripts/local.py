"""A verifier of one's own: the same `paceline cloud` that runs elsewhere, as a child process on this machine."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.protocol.errors import PacelineError

READY = "ready at "  # how the verifier's first line of output begins


@contextmanager
def local_verifier(arguments: Sequence[str]) -> Iterator[str]:
    """The address of a verifier started with these arguments of `paceline cloud`; it ends with the block.

    It also ends when this process is killed: it watches its standard input. Raises PacelineError with what it said.
    """
    command = [sys.executable, "-m", "paceline.scripts.cli", "cloud", "--port", "0", "--stop-with-stdin", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline().strip()
        if not line.startswith(READY):
            process.stdin.close()
            said = process.stderr.read().strip().removeprefix("paceline: ")
            raise PacelineError(said or "the local verifier ended before it was ready")
        yield line.removeprefix(READY)
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        process.stderr.close()
