"""Text to tokens and back with the target's vocabulary, which is all the device holds of the target.

The chat template is applied and the text tokenised once, here; from then on only ids travel. `Text.stream` gives text
as it becomes certain: a character whose bytes are spread over several tokens appears with the last of them.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from paceline.edge.spelt import Spelt, unused_mark
from paceline.protocol.errors import PacelineError
from paceline.protocol.vocabulary import Vocabulary

Turn = dict[str, str]  # "role" and "content"


class Tokenizer(Protocol):
    """A vocabulary file as `Text` needs it."""

    adds_bos: bool
    bos: int
    chat_template: str | None
    name: str

    def tokens(self) -> list[str]: ...
    def tokenize(self, text: str, *, special: bool = True) -> list[int]: ...
    def piece(self, token: int, *, special: bool = False) -> bytes: ...
    def end_tokens(self) -> list[int]: ...
    def control_tokens(self) -> list[int]: ...
    def close(self) -> None: ...


class Text:
    """Tokeniser and chat template of a vocabulary file: a GGUF, with or without weights, or a tokenizer.json bundle."""

    def __init__(self, path: str | Path) -> None:
        self._model = _tokenizer(Path(path))
        self.vocabulary = Vocabulary.of(self._model.name, self._model.tokens())
        self.end_tokens = tuple(self._model.end_tokens())
        self._template = self._model.chat_template
        self._spelt = Spelt([self._spelling(i) for i in self._model.control_tokens()])

    def close(self) -> None:
        """Free the vocabulary; the text is not used afterwards."""
        self._model.close()

    def prompt(self, turns: Sequence[Turn]) -> list[int]:
        """Token ids of a conversation, up to where the assistant begins to speak. Raises PacelineError.

        Control tokens come from the template alone: those spelt in a turn stay text. A model without a chat template gets
        the text of the turns as it is.
        """
        if self._template is None:
            return self.plain("\n".join(t["content"] for t in turns))
        if not any(self._spelt.found(t["content"]) for t in turns):
            text = self._render(turns)
            return self._begin(self._model.tokenize(text), text)
        mark = unused_mark([self._template, *(t["content"] for t in turns)])
        text = self._render([{**t, "content": self._spelt.broken(t["content"], mark)} for t in turns])
        ids = self._spelt.tokenize(text, mark, lambda part, special: self._model.tokenize(part, special=special))
        return self._begin(ids, text)

    def plain(self, text: str) -> list[int]:
        """Token ids of bare text, with the begin token where the model wants one. Control tokens spelt in it stay text."""
        return self._begin(self._model.tokenize(text, special=False), "")

    def decoder(self) -> "Decoder":
        return Decoder(self._model)

    def piece(self, token: int) -> bytes:
        """Bytes of a token as it is spelt, control tokens too; none for an id that is not in the vocabulary."""
        return self._model.piece(token, special=True) if token < self.vocabulary.size else b""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of whole sequences of tokens; control tokens have none."""
        decoder = self.decoder()
        return decoder.feed(tokens) + decoder.end()

    def _begin(self, ids: list[int], rendered: str) -> list[int]:
        """Exactly one begin token, where the model wants one: some templates write it themselves."""
        if self._model.adds_bos and (not ids or ids[0] != self._model.bos):
            return [self._model.bos, *ids]
        return ids

    def _render(self, turns: Sequence[Turn]) -> str:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        values: dict[str, Any] = {"messages": list(turns), "add_generation_prompt": True}
        values["bos_token"] = self._spelling(self._model.bos)
        values["eos_token"] = self._spelling(self.end_tokens[0] if self.end_tokens else -1)
        try:
            assert self._template is not None
            return environment.from_string(self._template).render(**values)
        except TemplateError as e:
            raise PacelineError(f"the model's chat template does not take this conversation: {e}") from None

    def _spelling(self, token: int) -> str:
        return self._model.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""


class Decoder:
    """Text of a stream of tokens, without ever cutting a character in two."""

    def __init__(self, model: Tokenizer) -> None:
        self._model = model
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Iterable[int]) -> str:
        return "".join(self._decoder.decode(self._model.piece(t)) for t in tokens)

    def end(self) -> str:
        """What is left when nothing more comes: a replacement sign for a character that was never finished."""
        return self._decoder.decode(b"", final=True)


def _tokenizer(path: Path) -> Tokenizer:
    try:
        with path.open("rb") as file:
            first = file.read(1)
    except OSError as e:
        raise PacelineError(f"{path}: {e.strerror or e}") from None
    if first == b"{":
        from paceline.edge.tokenizer_json import JsonTokenizer

        return JsonTokenizer(path)
    from paceline.kernels.llama import Model

    return Model(path, vocabulary_only=True)


def _refuse(message: str) -> None:
    raise TemplateError(re.sub(r"\s+", " ", message))
