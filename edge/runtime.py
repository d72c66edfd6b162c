"""The agent in real time: clock, thread, websocket, draft file and learned table put together."""

import hashlib
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.edge.agent import Agent
from paceline.edge.delay import DelayedChannel
from paceline.edge.drafts.files import open_draft
from paceline.edge.policies import Policy
from paceline.edge.predictor import Predictor
from paceline.edge.text import Text
from paceline.edge.websocket import Address, connecting
from paceline.kernels.worker import OneThread
from paceline.protocol.channel import Channel
from paceline.protocol.messages import COUPLED
from paceline.protocol.ngrams import Ngrams


@dataclass(frozen=True)
class Settings:
    """What an agent on this machine needs.

    The next of `addresses` is tried whenever one cannot be reached. `round_trip` seconds are added to the link, for trying
    things out. `provider` runs an ONNX draft. `ngrams`: what the target of a vocabulary is known to write, by its fingerprint.
    """

    addresses: tuple[Address, ...]
    vocabulary: Path
    draft: Path | None
    cache: Path
    threads: int | None = None
    round_trip: float = 0.0
    attempts: int | None = 8
    predictor: bool = True
    provider: str | None = None
    ngrams: Callable[[str], Ngrams | None] = lambda fingerprint: None


@asynccontextmanager
async def running_agent(settings: Settings, text: Text, policy: Policy) -> AsyncIterator[Agent]:
    """An agent with its link coming up; the predictor's table is kept for the next run."""
    draft = None
    if policy.drafts and settings.draft is not None:
        draft = open_draft(settings.draft, text.vocabulary, threads=settings.threads, provider=settings.provider)
    predictor = Predictor(enabled=settings.predictor)
    table = table_file(settings.cache, settings.draft, text.vocabulary.fingerprint, policy.rule)
    predictor.load(table)
    reach = connecting(settings.addresses)
    thread = OneThread("draft")

    async def connect() -> Channel:
        channel = await reach()
        return DelayedChannel(channel, settings.round_trip) if settings.round_trip else channel

    agent = Agent(
        connect,
        text.vocabulary,
        policy,
        draft,
        predictor,
        thread,
        clock=time.perf_counter,
        random=random.Random(),
        attempts=settings.attempts,
        ngrams=settings.ngrams(text.vocabulary.fingerprint) if policy.drafts else None,
    )
    try:
        async with agent:
            yield agent
    finally:
        thread.close()
        if draft is not None and predictor.enabled:
            with suppress(OSError):  # a table that cannot be written is only learned again
                predictor.save(table)


def table_file(cache: Path, draft: Path | None, fingerprint: str, rule: str = COUPLED) -> Path:
    """Where what the predictor learned of (draft, target vocabulary) is kept: it is only good for that pair, and for that
    rule, as draws are taken less often than ranked candidates.
    """
    kind = "" if rule == COUPLED else f".{rule}"
    known = f"{draft.name if draft else ''}:{draft.stat().st_size if draft else 0}:{fingerprint}"
    return cache / "predictor" / f"{hashlib.sha256(known.encode()).hexdigest()[:16]}{kind}.json"
