"""Real agents and a real verifier, over TLS through a proxy that breaks bytes, until it has broken enough of them."""

import asyncio
from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from paceline.edge.websocket import Address, connecting
from paceline.scripts.chaos.answers import Tally
from paceline.scripts.chaos.kills import ask_until, real_agent, running
from paceline.scripts.chaos.pipe import NO_FAULTS, ByteFaults, ByteRates, HostileProxy
from paceline.scripts.chaos.soak import self_signed

RATES = ByteRates(
    reset=0.004, end=0.004, truncate=0.004, flip=0.004, duplicate=0.004, swap=0.004, stall=0.001, half_open=0.0003
)
EDGES = 16  # each of them spends most of its time coming back
WITHOUT_HARM = ("delay", "stall")  # these break nothing, and are not counted among what does


def breaking(
    broken: int, seed: int = 0, rates: ByteRates = RATES, edges: int = EDGES, longest: int = 200
) -> tuple[Counter[str], Tally]:
    """Break connections so many times under load. What was done, and what became of the answers."""
    return asyncio.run(_breaking(broken, seed, rates, edges, longest))


async def _breaking(broken: int, seed: int, rates: ByteRates, edges: int, longest: int) -> tuple[Counter[str], Tally]:
    faults, tally, done = ByteFaults(Random(seed), rates), Tally(), asyncio.Event()
    with TemporaryDirectory() as folder:
        certificate, both = self_signed(Path(folder))
        async with (
            running(1, "--tls-certificate", str(both)) as [verifier],
            HostileProxy(verifier.port, faults) as proxy,
        ):
            address = Address(f"wss://127.0.0.1:{proxy.port}", authority=certificate)
            asking = [
                asyncio.create_task(
                    ask_until(done, real_agent(connecting([address]), i), tally, seed + i, longest, leaves=0.1)
                )
                for i in range(edges)
            ]
            while sum(n for fault, n in faults.done.items() if fault not in WITHOUT_HARM) < broken:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            done.set()
            faults.rates = NO_FAULTS  # the last answers come to their ends
            await asyncio.gather(*asking)
    return faults.done, tally
