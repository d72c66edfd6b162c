"""The draft at work: the most useful rows of all generations, one batch after another, on a thread of its own.

What the draft has to hear of in between (a text begins, grows, is over) waits for the next batch and is told before it, in
order. Knows neither the link nor its messages: nodes that have come up are handed to `send`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from paceline.edge.draft import Candidates, Draft, Extended, Row
from paceline.edge.generation import Generation, share
from paceline.edge.timeline import Timeline
from paceline.protocol.cost import StepCost, best_count
from paceline.protocol.edge_session import Committed, Phase
from paceline.protocol.errors import EngineError

MAX_ROWS = 16  # rows of one draft step
log = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs a draft step outside the event loop; in virtual time it takes what its rows cost in virtual seconds."""

    def __call__(self, work: Callable[[], Extended], /) -> Awaitable[Extended]: ...


class Drafter:
    """Drafts for `generations`, those that are open at the cloud. Without a draft, or after a fault of it, for none."""

    def __init__(
        self,
        draft: Draft | None,
        width: int | None,
        run: Runner,
        timeline: Timeline,
        generations: Mapping[int, Generation],
        send: Callable[[Generation, float], None],
    ) -> None:
        """`width`: rows of a step; None: as many as pay. `send` is told how many seconds there are until its next occasion."""
        self.draft = draft
        self.run = run
        self.cost = StepCost(draft.step_cost if draft is not None else ())
        self.forward_seconds = 0.0  # spent in the draft's forward so far
        self._width, self._clock, self._timeline = width, timeline.clock, timeline
        self._generations, self._send = generations, send
        self._calls: list[Callable[[], None]] = []  # for the draft, before its next batch
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """There is something new to draft, or to tell the draft."""
        self._wake.set()

    def more_seconds(self) -> float:
        """What a further row of a step costs, in the mean over the first half of the rows that it may have."""
        return (self.cost(MAX_ROWS // 2) - self.cost(1)) / (MAX_ROWS // 2 - 1)

    # ---- what the draft hears of

    def open(self, generation: Generation) -> None:
        if (draft := self.draft) is not None:
            prompt = (*generation.session.prompt, *generation.session.committed)
            self._calls.append(lambda: self._open(generation, draft, prompt))

    def committed(self, generation: Generation, event: Committed) -> None:
        if self.draft is not None:
            live = generation.placed()
            self._calls.append(lambda: self._commit(generation, event, live))

    def close(self, generation: Generation) -> None:
        if self.draft is not None:
            self._calls.append(lambda: self._close(generation))
            self._wake.set()

    async def end(self) -> None:
        """Tell the draft what it has not heard yet, when no batch follows: it may serve another agent, and has its room back."""
        if self.draft is not None and self._calls:
            calls, self._calls = self._calls, []
            await self.run(lambda: self._work(calls, []))

    def _open(self, generation: Generation, draft: Draft, prompt: Sequence[int]) -> None:
        with suppress(EngineError):  # no room in the draft: this one is decoded plainly
            generation.handle = draft.open(prompt) if prompt else None

    def _commit(self, generation: Generation, event: Committed, live: frozenset[int]) -> None:
        if generation.handle is not None and self.draft is not None:
            self.draft.commit(generation.handle, event.tokens, event.walked, live)

    def _close(self, generation: Generation) -> None:
        if generation.handle is not None and self.draft is not None:
            self.draft.close(generation.handle)
            generation.handle = None

    # ---- batches

    async def keep_drafting(self) -> None:
        """Draft until cancelled. A fault of the draft ends drafting, never an answer: they all go on plainly."""
        try:
            while True:
                await self._step()
        except Exception:
            log.exception("drafting failed; answers go on without it")
            self.draft = None

    async def _step(self) -> None:
        """One batch; or, where there is nothing to run, wait until there may be."""
        self._wake.clear()
        chosen = self._pick()
        if not chosen and not self._calls:
            for generation in self._generations.values():
                self._send(generation, 0.0)
            await self._wake.wait()
            return
        rows = [g.row(node) for g, node in chosen]
        for generation in {g: None for g, _ in chosen}:
            generation.in_flight = frozenset(node for g, node in chosen if g is generation)
        calls, self._calls = self._calls, []
        begin = self._clock()
        done = await self.run(lambda: self._work(calls, rows))
        if 0 < done.ran <= MAX_ROWS:
            read = sum(candidates is not None for candidates in done.found)
            self.cost.learn(done.ran, self._clock() - begin, unread=done.ran - read)
        if done.ran:
            self._timeline.drafted(begin, done.ran)
        self.forward_seconds += done.forward
        for (generation, node), candidates in zip(chosen, done.found, strict=True):
            _ran(generation, node, candidates)
        for generation in {g: None for g, _ in chosen}:
            generation.in_flight = frozenset()
            self._send(generation, self.cost(len(chosen)))

    def _pick(self) -> list[tuple[Generation, int]]:
        live = (Phase.OPENING, Phase.RUNNING)  # what is drafted while a session opens is sent when it is open
        running = [g for g in self._generations.values() if g.session.phase in live and g.handle is not None]
        if not running:
            return []
        chosen = share(running, self._width or MAX_ROWS, self._clock())
        count = best_count([u for u, _, _ in chosen], self.cost) if self._width is None else len(chosen)
        return [(g, node) for _, g, node in chosen[: max(count, 1)]]

    def _work(self, calls: Sequence[Callable[[], None]], rows: Sequence[Row]) -> Extended:
        """On the draft's thread: what happened meanwhile, in order, then the batch."""
        assert self.draft is not None
        for call in calls:
            call()
        if not rows:
            return Extended()
        try:
            return self.draft.extend(rows)
        except EngineError as e:  # these generations go on plainly
            log.warning("the draft could not run: %s", e)
            return Extended([None] * len(rows))


def _ran(generation: Generation, node: int, found: Candidates | None) -> None:
    if found is not None:
        generation.ran(node, found)
    else:
        generation.frontier.discard(node)
