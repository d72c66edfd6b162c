"""An edge as a process, to be killed: asks one question, keeps what it holds in a file, goes on from there when started again.

Its last line is the whole answer as JSON; on standard error it says from where it goes on, and every attempt to connect.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from paceline.cloud.engines.toy import ToyEngine
from paceline.edge.held import Keeping, read_held
from paceline.edge.websocket import Address, connecting
from paceline.protocol.channel import Channel
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling
from paceline.scripts.chaos.kills import real_agent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", action="append", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(json.dumps(asyncio.run(_answer(given.url, given.state, given.tokens, given.seed))), flush=True)


async def _answer(urls: list[str], state: Path, tokens: int, seed: int) -> list[int]:
    reach = connecting([Address(url, insecure=True) for url in urls])

    async def connect() -> Channel:
        print("connects", file=sys.stderr, flush=True)
        channel = await reach()
        print("connected", file=sys.stderr, flush=True)
        return channel

    agent = real_agent(connect, seed)
    keeping = Keeping(agent, state, time.perf_counter, fingerprint=ToyEngine().vocabulary.fingerprint)
    held = read_held(state)
    text = list(held.tokens) if held is not None else []
    print(f"from {len(text)}", file=sys.stderr, flush=True)
    async with agent:
        request = GenerationRequest((1, 2, seed % 12), Sampling(seed=seed, temperature=0.9), tokens)
        events = keeping.go_on(held) if held is not None else keeping.generate(request)
        async for event in events:
            text.extend(event.tokens)
    return text


if __name__ == "__main__":
    main()
