"""What a live verifier's link and pace are: a few pings and a short answer of plain decoding."""

import asyncio
import statistics
from pathlib import Path

from paceline.edge.policies import policy
from paceline.edge.runtime import Settings, running_agent
from paceline.edge.text import Text
from paceline.edge.websocket import Address
from paceline.protocol.errors import PacelineError
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling
from paceline.scripts.models import cache_folder

TOKENS = 24


def measured(address: Address, vocabulary: Path) -> tuple[float, float]:
    """Seconds of (a round trip, a verification). Raises PacelineError if the verifier cannot be reached."""
    return asyncio.run(_measure(address, vocabulary))


async def _measure(address: Address, vocabulary: Path) -> tuple[float, float]:
    text = Text(vocabulary)
    prompt, steps = tuple(text.prompt([{"role": "user", "content": "Count from one to fifty."}])), list[float]()
    async with running_agent(
        Settings((address,), vocabulary, None, cache_folder(), attempts=3), text, policy("ar")
    ) as agent:
        async for event in agent.generate(GenerationRequest(prompt, Sampling(), TOKENS)):
            steps.append(event.commit.step)
        await asyncio.sleep(0.5)  # some more pings
        round_trip = agent.link.round_trip.seconds
    if len(steps) < 2:
        raise PacelineError(f"{address.url}: the verifier wrote too little to be measured")
    return round_trip, statistics.median(steps[1:])
