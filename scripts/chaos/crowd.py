"""A device with several agents that never stop asking, as a process: what a verifier's hour of mixed load is made of.

It ends when its standard input does; its last line is the tally as JSON.
"""

import argparse
import asyncio
import json
import logging
import random
from dataclasses import asdict
from pathlib import Path

from paceline.edge.websocket import Address, connecting
from paceline.kernels.heap import keep_small
from paceline.scripts.chaos.answers import Tally
from paceline.scripts.chaos.kills import ask_until, real_agent
from paceline.scripts.local import when_stdin_ends

NOISE = 1.0  # of the draft: it is often right


async def ask_on(addresses: list[Address], edges: int, seed: int, longest: int, draft_seconds: float) -> Tally:
    """Until standard input ends. Every third agent does not draft; one answer in ten is left before its end."""
    tally, done = Tally(), asyncio.Event()
    when_stdin_ends(done.set)
    drawn = random.Random(seed)
    agents = [
        real_agent(connecting(addresses, i), seed + i, draft_seconds=draft_seconds, noise=NOISE, drafts=i % 3 != 2)
        for i in range(edges)
    ]
    trimming = asyncio.create_task(keep_small())  # as `paceline edge` does
    await asyncio.gather(
        *(ask_until(done, a, tally, drawn.randrange(2**32), longest, leaves=0.1) for a in agents),
    )
    trimming.cancel()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", action="append", required=True)
    parser.add_argument("--authority", type=Path)
    parser.add_argument("--edges", type=int, default=4)
    parser.add_argument("--longest", type=int, default=400, help="tokens of an answer")
    parser.add_argument("--draft-seconds", type=float, default=0.025, help="of a draft step")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # what is logged here was done on purpose
    addresses = [Address(url, authority=given.authority) for url in given.url]
    tally = asyncio.run(ask_on(addresses, given.edges, given.seed, given.longest, given.draft_seconds))
    print(json.dumps(asdict(tally)), flush=True)


if __name__ == "__main__":
    main()
