"""The draft alone, where there is no cloud: its own choices, one after the other, by the same rule as the target's.

What it writes is not the target's text, so whoever shows it says so.
"""

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable

from paceline.edge.draft import Choice, Draft, Extended, Row
from paceline.edge.generation import Generation, Report
from paceline.edge.predictor import Predictor
from paceline.protocol.edge_session import Committed, EdgeSession
from paceline.protocol.errors import EngineError
from paceline.protocol.messages import Commit, Opened
from paceline.protocol.request import GenerationRequest


class DraftAlone:
    """A writer (see `answer`) that asks nobody. `run` runs the draft's work, one piece at a time."""

    def __init__(
        self, draft: Draft, run: Callable[[Callable[[], Extended]], Awaitable[Extended]], clock: Callable[[], float]
    ) -> None:
        self._draft, self._run, self._clock = draft, run, clock

    async def generate(
        self, request: GenerationRequest, report: Report | None = None
    ) -> AsyncGenerator[Committed, None]:
        """As the agent's, but every token is the draft's. Raises EngineError when the draft has no room."""
        assert request.logprobs is None and not request.grammar, "not offered here"  # noqa: PT018
        session = EdgeSession(request, vocabulary_size=self._draft.vocabulary.size)
        session.open(0)
        session.receive(Opened(sid=0, committed_len=0, resume="", max_tokens=request.max_tokens))
        generation = Generation(session, Predictor(enabled=False), self._clock())
        if report is not None:
            report(generation)
        handles: list[int] = []
        await self._do(lambda: handles.append(self._draft.open(request.prompt)))
        try:
            for node in itertools.count():
                token = await self._next(session, handles[0], node)
                for event in session.receive(_commit(session, token)):
                    generation.committed(event, self._clock())
                    yield event
                if session.finish:
                    return
        finally:
            await self._do(lambda: self._draft.close(handles[0]))

    async def _next(self, session: EdgeSession, handle: int, node: int) -> int:
        text = session.committed
        last = text[-1] if text else session.prompt[-1]
        row = Row(handle, node, -1, last, session.position - 1, Choice(session.sampling, session.history))

        def step() -> Extended:
            if text:
                self._draft.commit(handle, text[-1:], (), ())
            return self._draft.extend([row])

        found = (await self._run(step)).found[0]
        if found is None:
            raise EngineError("the draft has no room for more of this text")
        return int(found.tokens[0])

    async def _do(self, work: Callable[[], None]) -> None:
        def call() -> Extended:
            work()
            return Extended()

        await self._run(call)


def _commit(session: EdgeSession, token: int) -> Commit:
    base = len(session.committed)
    finish = "stop" if token in session.stop_ids else "length" if base + 1 == session.max_tokens else ""
    return Commit(sid=0, base=base, tokens=(token,), finish=finish)
