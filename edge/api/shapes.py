"""Answers as JSON, in the shapes of OpenAI's API: whole completions, chunks of a stream, log-probabilities, usage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.edge.answer import Answer, Piece, Token
from paceline.edge.text import Text

Json = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The shape of one answer. `chat` or bare text; `created` in seconds since 1970; `marks` adds which tokens were drafted.

    `signature` is the system_fingerprint, of an answer that the draft gave alone.
    """

    chat: bool
    id: str
    model: str
    created: int
    text: Text
    with_logprobs: bool = False
    with_usage: bool = False
    marks: bool = False
    signature: str | None = None

    def whole(self, answer: Answer, pieces: Sequence[Piece], echo: str = "") -> Json:
        tokens = [t for p in pieces for t in p.tokens]
        text = echo + "".join(p.text for p in pieces)
        said: Json = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        )
        choice = {"index": 0, **said, "logprobs": self._logprobs(tokens), "finish_reason": answer.finish}
        kind = "chat.completion" if self.chat else "text_completion"
        return self._around(kind, [choice]) | {"usage": usage(answer)} | self._marks(tokens)

    def first(self) -> Json | None:
        """What opens a stream of chat: the role."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}) if self.chat else None

    def piece(self, piece: Piece) -> Json:
        said: Json = {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
        return self._chunk(said, piece.tokens) | self._marks(piece.tokens)

    def last(self, answer: Answer) -> Json:
        said: Json = {"delta": {}} if self.chat else {"text": ""}
        return self._chunk(said, finish=answer.finish)

    def usage(self, answer: Answer) -> Json:
        return self._around(self._chunk_kind, []) | {"usage": usage(answer)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, said: Json, tokens: Sequence[Token] = (), finish: str | None = None) -> Json:
        choice = {"index": 0, **said, "logprobs": self._logprobs(tokens) if tokens else None, "finish_reason": finish}
        return self._around(self._chunk_kind, [choice]) | ({"usage": None} if self.with_usage else {})

    def _around(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.signature,
            "choices": choices,
        }

    def _marks(self, tokens: Sequence[Token]) -> Json:
        return {"paceline": {"tokens": [[t.text, t.drafted] for t in tokens]}} if self.marks else {}

    # ---- log-probabilities

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if not self.with_logprobs:
            return None
        return {"content": [self._entry(t) for t in tokens], "refusal": None} if self.chat else self._columns(tokens)

    def _entry(self, token: Token) -> Json:
        own, *top = token.logprobs or ((token.id, -9999.0),)
        return self._spelt(*own) | {"top_logprobs": [self._spelt(*entry) for entry in top]}

    def _spelt(self, token: int, logprob: float) -> Json:
        data = self.text.piece(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    def _columns(self, tokens: Sequence[Token]) -> Json:
        entries = [self._entry(t) for t in tokens]
        return {
            "tokens": [e["token"] for e in entries],
            "token_logprobs": [e["logprob"] for e in entries],
            "top_logprobs": [{t["token"]: t["logprob"] for t in e["top_logprobs"]} for e in entries],
            "text_offset": [t.end - len(t.text) for t in tokens],
        }


def usage(answer: Answer) -> Json:
    prompt, count = len(answer.request.prompt), answer.count
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def model(name: str, created: int) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": "paceline"}
