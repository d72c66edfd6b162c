"""A part of `ray_check`: a real model on two replicas, a real edge, and kill -9 of the replica that answers it."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paceline.edge.agent import Agent
from paceline.edge.draft import Extended
from paceline.edge.policies import policy
from paceline.edge.predictor import Predictor
from paceline.edge.text import Text
from paceline.protocol.channel import Channel
from paceline.protocol.errors import PacelineError
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling
from paceline.scripts.lab.cases import write_text
from paceline.scripts.pairs import files_of, vocabulary_of

TOKENS = 48
KILL_AFTER = 8  # tokens of an answer
QUESTIONS = ("Why is the sky blue?", "Name three colours.", "Write a sentence about the sea.")
CHOICES = (Sampling(), Sampling(temperature=0.8, seed=7), Sampling())


@dataclass(frozen=True)
class Right:
    request: GenerationRequest
    text: list[int]


def right_answers(pair: str) -> tuple[Text, list[Right]]:
    """What the target writes alone, in this process."""
    from paceline.cloud.engines.llamacpp import LlamaEngine

    files = files_of(pair, None, None)
    text = Text(vocabulary_of(files.target))
    engine, found = LlamaEngine(files.target, context=1024, slots=1, threads=1), []
    for question, sampling in zip(QUESTIONS, CHOICES, strict=True):
        prompt = tuple(text.prompt([{"role": "user", "content": question}]))
        request = GenerationRequest(prompt, sampling, TOKENS, text.end_tokens)
        found.append(Right(request, write_text(engine, request)))
    return text, found


async def ask_and_kill(
    pair: str, connect: Callable[[], Awaitable[Channel]], pids: Callable[[], Sequence[int]]
) -> dict[str, object]:
    """Each answer loses its replica in the middle. Raises PacelineError if a text is not the target's."""
    from paceline.edge.drafts.llamacpp import LlamaDraft

    text, answers = await asyncio.to_thread(right_answers, pair)
    draft = LlamaDraft(files_of(pair, None, None).draft, text.vocabulary, threads=1)
    pool, cuts, killed = ThreadPoolExecutor(1), list[str](), 0

    def run(work: Callable[[], Extended]) -> Awaitable[Extended]:
        return asyncio.get_running_loop().run_in_executor(pool, work)

    agent = Agent(
        connect, text.vocabulary, policy("stream"), draft, Predictor(), run,
        clock=time.perf_counter, random=random.Random(0),
    )  # fmt: skip
    down = agent.link_down

    def link_down(reason: str) -> None:
        cuts.append(reason)
        down(reason)

    setattr(agent, "link_down", link_down)  # noqa: B010 - a method is replaced
    async with agent:
        for answer in answers:
            got, before = list[int](), len(cuts)
            async for event in agent.generate(answer.request):
                got.extend(event.tokens)
                if len(got) >= KILL_AFTER and len(cuts) == before and (alive := pids()):
                    os.kill(alive[killed % len(alive)], signal.SIGKILL)
                    killed += 1
                    await asyncio.sleep(0.2)  # for the cut to be heard of
            if got != answer.text:
                raise PacelineError(f"{text.decode(got)!r} instead of {text.decode(answer.text)!r}")
        links, tokens = len(cuts), sum(len(answer.text) for answer in answers)
    pool.shutdown(cancel_futures=True)
    if not links:
        raise PacelineError("no kill hit the replica that was answering")
    return {"answers": len(answers), "tokens": tokens, "killed": killed, "links_cut": links}
