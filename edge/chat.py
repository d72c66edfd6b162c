"""The terminal chat: reads lines, writes the answer as it comes, keeps the conversation.

It takes its input, output and agent from outside, so that tests run whole transcripts.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from paceline.edge.agent import Agent
from paceline.edge.generation import Generation
from paceline.edge.text import Text, Turn
from paceline.protocol.errors import PacelineError, ProtocolError
from paceline.protocol.sampling import Sampling


@dataclass
class Chat:
    """A conversation. `write` gets text to show at once, `say` a line about the conversation rather than of it."""

    agent: Agent
    text: Text
    sampling: Sampling
    max_tokens: int
    write: Callable[[str], None]
    say: Callable[[str], None]
    stats: bool = False
    turns: list[Turn] = field(default_factory=list)
    summary: str = ""  # how the last whole answer was made

    async def turn(self, question: str) -> None:
        """One turn with what belongs around it: the end of the line, and the summary where `stats` asks for it."""
        await self.ask(question)
        self.write("\n")
        if self.stats:
            self.say(self.summary)

    async def ask(self, question: str) -> str:
        """One turn: what was asked and what was answered stay in the conversation, also when the answer was stopped."""
        self.turns.append({"role": "user", "content": question})
        answer = ""
        try:
            async for piece in self._answer():
                answer += piece
                self.write(piece)
        finally:
            if answer:
                self.turns.append({"role": "assistant", "content": answer})
            else:
                self.turns.pop()
        return answer

    async def _answer(self) -> AsyncIterator[str]:
        decoder, generations, begun = self.text.decoder(), list[Generation](), time.perf_counter()
        count = 0
        events = self.agent.generate(
            self.text.prompt(self.turns),
            self.sampling,
            self.max_tokens,
            stop_ids=self.text.end_tokens,
            report=generations.append,
        )
        try:
            async for event in events:
                count += len(event.tokens)
                if piece := decoder.feed(event.tokens):
                    yield piece
        finally:
            await events.aclose()
        if piece := decoder.end():
            yield piece
        self.summary = self._summary(generations[0], count, time.perf_counter() - begun)

    def _summary(self, generation: Generation, count: int, seconds: float) -> str:
        f = generation.figures
        hit, accepted = f.hits / max(f.steps, 1), f.accepted / max(f.steps, 1)
        trip = self.agent.link.round_trip.seconds
        return (
            f"[{count} tokens, {count / max(seconds, 1e-9):.1f} tokens/s, {count / max(f.steps, 1):.2f} a step,"
            f" hit rate {hit:.0%},"
            f" {accepted:.2f} accepted a step, round trip {1000 * trip:.0f} ms, seed {self.sampling.seed}]"
        )


async def interactive(chat: Chat, read: Callable[[], Awaitable[str]], interrupts: "Interrupts") -> None:
    """Ask and answer until the input ends. An interrupt stops the answer, which is kept; one at the prompt leaves."""
    while True:
        try:
            question = await read()
        except (EOFError, KeyboardInterrupt):
            return
        if not question.strip():
            continue
        task = asyncio.ensure_future(chat.turn(question))
        interrupts.target = task
        try:
            await task
        except asyncio.CancelledError:
            chat.write("\n")
            chat.say("[stopped]")
        except ProtocolError as e:
            chat.say(f"the verifier refused: {e}")
        except PacelineError as e:
            chat.say(str(e))
            return
        finally:
            interrupts.target = None


class Interrupts:
    """Ctrl-C while an answer runs cancels that task and nothing else."""

    def __init__(self) -> None:
        self.target: asyncio.Task[None] | None = None

    def __call__(self) -> None:
        if self.target is not None:
            self.target.cancel()


def write_out(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def say_aside(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
