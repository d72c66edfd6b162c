"""The real clock's edge: the real draft and agent, asking every prompt with every policy, in a process of its own.

    python -m paceline.scripts.lab.device JOB.json URL

Each answer is printed as one line of JSON as soon as it is there.
An answer to a prompt is preceded by one of a single token, so that both ends have read the prompt.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from paceline.edge.agent import Agent
from paceline.edge.draft import Draft, Extended
from paceline.edge.drafts.llamacpp import LlamaDraft
from paceline.edge.policies import policy as policy_named
from paceline.edge.predictor import Predictor
from paceline.edge.websocket import Address, SocketChannel
from paceline.protocol.channel import Channel
from paceline.protocol.codec import convert
from paceline.protocol.sampling import Sampling
from paceline.protocol.vocabulary import Vocabulary
from paceline.scripts.lab.cases import Case
from paceline.scripts.lab.edges import measured
from paceline.scripts.lab.experiment import SETTLE, Events, ask
from paceline.scripts.lab.proxy import precise_loop
from paceline.scripts.lab.verifier import pin
from paceline.scripts.pairs import ngrams_of


async def answer(job: dict[str, Any], draft: Draft, policy: str, case: Case, url: str) -> dict[str, Any]:
    vocabulary, predictor = Vocabulary(**job["vocabulary"]), Predictor()
    if job["learned"]:
        predictor.load(Path(job["learned"]))
    pool = ThreadPoolExecutor(1, thread_name_prefix="draft")

    def run(work: Callable[[], Extended]) -> Awaitable[Extended]:
        return asyncio.get_running_loop().run_in_executor(pool, work)

    async def connect() -> Channel:
        return await SocketChannel.connect(Address(url, insecure=True))  # between two namespaces of this machine

    agent = Agent(
        connect, vocabulary, policy_named(policy), draft, predictor, run,
        clock=time.perf_counter, random=random.Random(0), attempts=3,
        ngrams=ngrams_of(vocabulary.fingerprint, Path(job["draft"])),
    )  # fmt: skip
    async with agent:
        await asyncio.sleep(SETTLE)
        async for _ in agent.generate(replace(case.request, max_tokens=1)):
            pass
        found = await ask(agent, case, time.perf_counter, Events())
    pool.shutdown(cancel_futures=True)
    return asdict(found)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    pin(job["edge_core"])
    sampling = convert(job["sampling"], Sampling, "sampling parameters")
    draft = LlamaDraft(job["draft"], Vocabulary(**job["vocabulary"]), threads=1)
    print(json.dumps({"step_cost": measured(draft)}), flush=True)
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        for case in job["cases"]:
            one = Case(case["name"], case["category"], tuple(case["prompt"]), sampling, tuple(case["text"]))
            for policy in job["policies"]:
                run = runner.run(answer(job, draft, policy, one, sys.argv[2]))
                print(
                    json.dumps({"policy": policy, "case": one.name, "category": one.category, "run": run}), flush=True
                )


if __name__ == "__main__":
    main()
