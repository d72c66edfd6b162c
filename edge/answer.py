"""An answer as text: tokens in, pieces of text out as they become certain.

A character appears when its last byte has come, and what may turn out to be the beginning of a stop string is held back
until it is certain not to be one; nothing after a stop string is ever shown or counted. The terminal and the local server
both write their answers through this, so that they are the same. Knows nothing about HTTP or terminals.
"""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from paceline.edge.generation import Generation, Report
from paceline.edge.text import Text
from paceline.protocol.edge_session import Committed
from paceline.protocol.request import GenerationRequest

Logprob = tuple[int, float]  # token id, natural log-probability


class Writer(Protocol):
    """Whoever writes tokens: the agent, or the draft alone where there is no cloud."""

    def generate(self, request: GenerationRequest, report: Report | None = None) -> AsyncGenerator[Committed, None]: ...


@dataclass(frozen=True)
class Token:
    """A token of the answer. `text` is what it added to the whole characters; `end` how many there are with it.

    `logprobs` are those of the token itself and then of the likeliest, if they were asked for.
    """

    id: int
    text: str
    end: int
    drafted: bool
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class Piece:
    """Text that is certain, and the tokens whose text is out with it."""

    text: str
    tokens: tuple[Token, ...] = ()


class StopStrings:
    """Text on its way out, stopped before the string that is complete first, however the text is cut into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """What of the text so far has become certain. After a hit nothing more does."""
        if self.hit:
            return ""
        self._held += text
        found = [(begin + len(s), begin) for s in self._stops if (begin := self._held.find(s)) >= 0]
        if found:
            self.hit = True
            out, self._held = self._held[: min(found)[1]], ""
            return out
        return self._release(len(self._held) - max((_overlap(self._held, s) for s in self._stops), default=0))

    def end(self) -> str:
        """What was held back and is the end of the text after all."""
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass
class Answer:
    """One answer. `stop` are strings that end it and are not part of it.

    `finish` is "stop" or "length" once it has ended, `count` the tokens that were written for it.
    """

    text: Text
    request: GenerationRequest
    stop: tuple[str, ...] = ()
    finish: str = ""
    count: int = 0
    generation: Generation | None = None
    _waiting: list[Token] = field(default_factory=list)  # tokens whose text is not all out
    _made: int = 0  # characters decoded
    _out: int = 0  # characters let out

    async def pieces(self, writer: Writer) -> AsyncGenerator[Piece, None]:
        """The answer as it becomes certain. Leaving early cancels the generation. Raises what `writer` raises."""
        stops, decoder = StopStrings(self.stop), self.text.decoder()
        async with aclosing(writer.generate(self.request, self._began)) as events:
            async for event in events:
                text = ""
                for token in self._tokens(event, lambda t: decoder.feed([t])):
                    text += stops.feed(token.text)
                    if stops.hit:
                        break
                if piece := self._piece(text, all_out=stops.hit):
                    yield piece
                if stops.hit:
                    self.finish = "stop"
                    return
        assert self.generation is not None
        self.finish = self.generation.session.finish
        if piece := self._piece(stops.end(), all_out=True):
            yield piece

    def _began(self, generation: Generation) -> None:
        self.generation = generation

    def _tokens(self, event: Committed, decode: Callable[[int], str]) -> Iterator[Token]:
        commit = event.commit
        known = len(commit.tokens) - len(event.tokens)
        for i, token in enumerate(event.tokens, known):
            self.count += 1
            text = decode(token)
            if token in self.request.stop_ids:
                continue  # it ends the text and is not part of it
            self._made += len(text)
            logprobs = commit.logprobs[i] if i < len(commit.logprobs) else ()
            new = Token(token, text, self._made, i < commit.accepted, logprobs)
            self._waiting.append(new)
            yield new

    def _piece(self, text: str, *, all_out: bool) -> Piece | None:
        """`text` with the tokens that are all out with it; at the end, with every token that has some of its text out."""
        self._out += len(text)
        out = [t for t in self._waiting if t.end <= self._out or (all_out and t.end - len(t.text) < self._out)]
        self._waiting = self._waiting[len(out) :]
        return Piece(text, tuple(out)) if text or out else None
