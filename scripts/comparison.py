"""The same question plainly and with a policy, through one verifier and link: what a demonstration reports."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from paceline.edge.agent import Agent
from paceline.edge.generation import Generation
from paceline.edge.policies import policy as policy_named
from paceline.edge.runtime import running_agent
from paceline.edge.text import Text
from paceline.edge.websocket import Address
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling
from paceline.scripts.verifier import Place, settings_of


@dataclass(frozen=True)
class Question:
    prompt: str
    sampling: Sampling
    max_tokens: int


@dataclass
class Answer:
    """One answer and what it took. `seconds` from asking to the last token; the prompt had been read before."""

    tokens: list[int]
    seconds: float
    generation: Generation
    uplink_bytes: int
    downlink_bytes: int
    largest_message: int
    draft_seconds: float


async def compare(
    url: str,
    vocabulary: Path,
    draft: Path | None,
    policy: str,
    question: Question,
    rtt: float,
    threads: int | None,
    provider: str | None = None,
) -> dict[str, Any]:
    """Ask plainly, then with `policy`; figures of the second, and both texts."""
    text = Text(vocabulary)
    settings = settings_of(Place((Address(url),), vocabulary, draft), threads, rtt, 3, provider)
    async with running_agent(settings, text, policy_named("ar")) as agent:
        plain = await answer(agent, text, question)
    async with running_agent(settings, text, policy_named(policy)) as agent:
        ours = await answer(agent, text, question)
        round_trip = agent.link.round_trip.seconds
    return report(text, plain, ours, round_trip)


async def answer(agent: Agent, text: Text, question: Question) -> Answer:
    """One answer, after a one-token answer to the same question: the prompt is then cached at both ends."""
    prompt = tuple(text.prompt([{"role": "user", "content": question.prompt}]))
    request = GenerationRequest(prompt, question.sampling, question.max_tokens, text.end_tokens)
    async for _ in agent.generate(replace(request, max_tokens=1)):
        pass
    begun, traffic, drafting = time.perf_counter(), agent.link.traffic, agent.drafter.forward_seconds
    up, down, traffic.largest = traffic.up, traffic.down, 0
    tokens: list[int] = []
    made: list[Generation] = []
    async for event in agent.generate(request, made.append):
        tokens.extend(event.tokens)
    return Answer(
        tokens,
        time.perf_counter() - begun,
        made[0],
        traffic.up - up,
        traffic.down - down,
        traffic.largest,
        agent.drafter.forward_seconds - drafting,
    )


def report(text: Text, plain: Answer, ours: Answer, round_trip: float) -> dict[str, Any]:
    f, n = ours.generation.figures, len(ours.tokens)
    return {
        "text": text.decode(ours.tokens),
        "plain_text": text.decode(plain.tokens),
        "identical": ours.tokens == plain.tokens,
        "tokens": n,
        "seconds": round(ours.seconds, 4),
        "tokens_per_second": round(n / ours.seconds, 2),
        "plain_tokens_per_second": round(len(plain.tokens) / plain.seconds, 2),
        "hit_rate": round(f.hits / max(f.steps, 1), 4),
        "accepted_per_step": round(f.accepted / max(f.steps, 1), 3),
        "tokens_per_forward": round(n / max(f.steps, 1), 3),
        "drafted": f.drafted,
        "stale": f.stale,
        "draft_rows": f.rows,
        "uplink_bytes_per_token": round(ours.uplink_bytes / max(n, 1), 1),
        "downlink_bytes_per_token": round(ours.downlink_bytes / max(n, 1), 1),
        "largest_message_bytes": ours.largest_message,
        "round_trip_seconds": round(round_trip, 4),
        "first_token_seconds": round(f.first_token or 0.0, 4),
        "finish": ours.generation.session.finish,
    }


def as_lines(result: dict[str, Any]) -> str:
    """The same for a person, in a few lines."""
    same = "word for word what the target writes alone" if result["identical"] else "NOT what the target writes alone"
    if result["drawn"]:
        same = "of the target's own distribution, by draws: not the words that it would write alone"
    pace = f", each step paced to {1000 * result['verify_floor']:.0f} ms" if result["verify_floor"] else ""
    return "\n".join(
        (
            result["text"],
            "",
            f"{same} ({result['tokens']} tokens, policy {result['policy']}, engine {result['engine']}{pace})",
            f"{result['tokens_per_second']:.1f} tokens/s against {result['plain_tokens_per_second']:.1f} plain,"
            f" over a round trip of {1000 * result['round_trip_seconds']:.0f} ms",
            f"{result['hit_rate']:.0%} of the steps found drafted tokens; {result['tokens_per_forward']:.2f} tokens a step,"
            f" {result['drafted']} nodes sent, {result['stale']} stale,"
            f" {result['uplink_bytes_per_token']:.0f} bytes up a token",
        )
    )
