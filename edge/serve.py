"""The local server as a process: listen, tell who waits for it, serve until told to stop."""

import asyncio
import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from paceline.kernels.heap import keep_small
from paceline.protocol.errors import PacelineError
from starlette.types import ASGIApp

GRACE_SECONDS = 3  # for answers that are being written when the server is told to stop


class _Server(uvicorn.Server):
    """Leaves signals alone: the process that runs the server knows what else has to end with it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def listening(app: ASGIApp, host: str, port: int) -> AsyncIterator[str]:
    """The address of `app` while it is served. Raises PacelineError if it cannot listen there."""
    bound = _bind(host, port)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        await server.up.wait()
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        bound.close()


async def serve_until_stopped(
    app: ASGIApp, host: str, port: int, ready: Callable[[str], None], stop: asyncio.Event
) -> None:
    """Serve until `stop` is set. `ready` is told the address, and systemd that the service is up."""
    async with listening(app, host, port) as address:
        ready(address)
        notify_systemd("READY=1")
        tasks = [asyncio.create_task(task) for task in (_keep_watched(), keep_small())]
        await stop.wait()
        for task in tasks:
            task.cancel()
        notify_systemd("STOPPING=1")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, reuse_port=False)
    except OSError as e:
        text = f"cannot listen on {host}:{port}: {e.strerror or e}; choose another with --port"
        raise PacelineError(text) from None


async def _keep_watched() -> None:
    """Tell systemd that this loop still turns, twice in the time after which it would restart us (sd_watchdog_enabled(3))."""
    told, whose = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not told.isdigit() or int(told) == 0 or whose not in ("", str(os.getpid())):
        return
    while True:
        notify_systemd("WATCHDOG=1")
        await asyncio.sleep(int(told) / 2e6)


def notify_systemd(state: str) -> None:
    """Tell systemd, where it started this process and waits for a word (sd_notify(3)); elsewhere nothing happens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address or sys.platform == "win32":
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
