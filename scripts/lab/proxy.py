"""A link for real processes without root: a TCP proxy on this machine that lets bytes pass late.

    python -m paceline.scripts.lab.proxy '{"round_trip": 0.05}' HOST PORT

It prints the port on which it listens. Chunks keep their order; loss is a retransmission's delay. TCP runs over the
loop-back on both sides, so its own congestion control does not see the link.
"""

import asyncio
import json
import random
import selectors
import sys
import time
from contextlib import suppress

from paceline.scripts.lab.network import LinkSpec, Wire
from paceline.scripts.lab.tunnel import hurry

CHUNK = 1400  # bytes that pass as one packet


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: Wire) -> None:
    """One direction, until it ends."""
    late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(4096)

    async def push() -> None:
        while (item := await late.get())[1]:
            await asyncio.sleep(max(item[0] - time.monotonic(), 0.0))
            writer.write(item[1])
            await writer.drain()
        writer.close()

    pushing = asyncio.create_task(push())
    with suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            await late.put((wire.arrival(time.monotonic(), len(data)), data))
    await late.put((0.0, b""))
    with suppress(ConnectionError):
        await pushing


async def serve(spec: LinkSpec, host: str, port: int) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, port)
        up, down = Wire(spec, spec.up, random.Random(1)), Wire(spec, spec.down, random.Random(2))
        await asyncio.gather(carry(reader, far_writer, up), carry(far_reader, writer, down))

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    server.close()


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop that sleeps to the microsecond: epoll, which asyncio takes by itself, rounds up to a millisecond."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


if __name__ == "__main__":
    hurry()
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        runner.run(serve(LinkSpec(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
