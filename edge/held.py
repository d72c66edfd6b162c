"""What a device holds of an answer, in a file: a process that is killed is followed by one that goes on with the same answer.

    keeping = Keeping(agent, path)
    keeping.generate(...)             # as the agent's; the file says at any time what could be gone on with
    held = read_held(path)            # in the next process
    keeping.go_on(held)               # streams what is still missing

The file is there only while an answer is unfinished. It holds the prompt and the text as token ids, so it is readable by its
owner alone. It may lag behind the text by a moment: what it lacks is written again, and comes out the same.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from paceline.edge.agent import Agent
from paceline.edge.generation import Generation, Report
from paceline.protocol.edge_session import Committed
from paceline.protocol.errors import PacelineError
from paceline.protocol.messages import Commit, Count, Digest, Tokens
from paceline.protocol.request import GenerationRequest

EVERY_SECONDS = 0.5  # between two writes
log = logging.getLogger(__name__)


class HeldError(PacelineError):
    """A file of held tokens cannot be used."""


class Held(GenerationRequest, frozen=True, kw_only=True):
    """An unfinished answer: what was asked for, and `tokens`, which are known of it.

    `fingerprint` is the vocabulary's, `note` whatever its owner wants to find again with it.
    """

    fingerprint: Digest
    tokens: Tokens = ()
    resume: str = ""
    note: str = ""
    format: Count = 1


def read_held(path: Path) -> Held | None:
    """The unfinished answer in `path`; None if there is none. Raises HeldError for a damaged file, or one of another format."""
    try:
        held = msgspec.json.decode(path.read_bytes(), type=Held)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise HeldError(f"{path}: cannot be read ({e.strerror or e})") from None
    except (ValueError, RecursionError) as e:
        raise HeldError(f"{path}: not an unfinished answer ({str(e)[:120]}); delete it to begin anew") from None
    if held.format != 1:
        raise HeldError(f"{path}: written by another version of Paceline; delete it to begin anew")
    return held


def write_held(path: Path, held: Held) -> None:
    """The whole file or nothing. Raises HeldError."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(held))
        part.replace(path)  # not synced: after a power cut an older state, or none, is found, and that is right too
    except OSError as e:
        with suppress(OSError):
            part.unlink()
        raise HeldError(f"{path}: cannot be written ({e.strerror or e}); the answer goes on without it") from None


class Keeping:
    """An agent whose answers are kept in `path`, one at a time. A disk that is full costs the file, not the answer."""

    def __init__(self, agent: Agent, path: Path, clock: Callable[[], float], *, fingerprint: str) -> None:
        self.note = ""
        self._agent, self._path, self._clock, self._fingerprint = agent, path, clock, fingerprint
        self._next = float("-inf")
        self._warned = False

    def generate(self, request: GenerationRequest, report: Report | None = None) -> AsyncGenerator[Committed, None]:
        """As the agent's."""
        held = Held(**msgspec.structs.asdict(request), fingerprint=self._fingerprint, note=self.note)
        return self.go_on(held, report)

    async def go_on(
        self, held: Held, report: Report | None = None, *, whole: bool = False
    ) -> AsyncGenerator[Committed, None]:
        """What follows `held.tokens`; if `whole`, those first. Raises HeldError for another vocabulary, else as `generate`."""
        if held.fingerprint != self._fingerprint:
            raise HeldError(f"{self._path}: the answer was begun with another model; delete it to begin anew")
        if whole and held.tokens:
            yield Committed(held.tokens, (), Commit(sid=0, base=0, tokens=held.tokens))
        generations: list[Generation] = []

        def tell(generation: Generation) -> None:
            generations.append(generation)
            if report is not None:
                report(generation)

        events = self._agent.generate(held, tell, held=held.tokens, resume=held.resume)
        try:
            async for event in events:
                self._keep(held, generations[0])
                yield event
        except (GeneratorExit, asyncio.CancelledError):
            self._forget()  # stopped on purpose
            raise
        finally:
            await events.aclose()
        self._forget()

    def _keep(self, held: Held, generation: Generation) -> None:
        now, session = self._clock(), generation.session
        if 0 <= self._next - now <= EVERY_SECONDS:
            return
        self._next = now + EVERY_SECONDS
        try:
            now_held = msgspec.structs.replace(held, tokens=tuple(session.committed), resume=session.resume)
            write_held(self._path, now_held)
        except HeldError as e:
            if not self._warned:
                log.warning("%s", e)
            self._warned = True

    def _forget(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


class GoingOn:
    """A writer of one answer that was begun before: all of it, what is held first."""

    def __init__(self, keeping: Keeping, held: Held) -> None:
        self._keeping, self._held = keeping, held

    def generate(self, request: GenerationRequest, report: Report | None = None) -> AsyncGenerator[Committed, None]:
        """As the agent's; what is asked for is what was asked for then."""
        return self._keeping.go_on(self._held, report, whole=True)
