"""Text that must be an instance of a JSON schema: which tokens may come next, by the llguidance library.

The mask is part of the target's choice: it is laid over the logits before anything is chosen, and is a function of the
grammar and of the text so far alone. So a constrained text too is the same whatever was drafted. Knows vocabularies and
texts, nothing about engines.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from paceline.protocol.errors import Code, PacelineError, ProtocolError
from paceline.protocol.tokens import common_prefix

Mask = npt.NDArray[np.bool_]  # [V]
#: One way to lay the text out. Where any white space is allowed, a small model may write it for ever.
_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Makes constraints for one vocabulary of `size` tokens. `tokenizer` is llguidance's own."""

    def __init__(self, tokenizer: Any, size: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._size, self._ends = tokenizer, size, tuple(ends)

    @classmethod
    def of(cls, vocabulary: Path, size: int) -> "Grammars | None":
        """For the vocabulary file that the verifier gives out; None where llguidance is not installed, or has no end token."""
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            return None
        with vocabulary.open("rb") as file:
            bundled = file.read(1) == b"{"
        if bundled:
            bundle = json.loads(vocabulary.read_text())
            ends = [int(i) for i in bundle["end_tokens"]]
            source: Any = json.dumps(bundle["tokenizer"])
        else:
            spelling = _Spelling(vocabulary, size)
            source, ends = TokenizerWrapper(spelling), spelling.ends
        return cls(LLTokenizer(source, n_vocab=size, eos_token=ends), size, ends) if ends else None

    def constraint(self, schema: str) -> "Constraint":
        """Raises ProtocolError (bad_params) if `schema` is no JSON schema that can be kept to."""
        from llguidance import LLMatcher

        try:
            parsed = json.loads(schema)
            if not isinstance(parsed, dict):
                raise ValueError("a JSON schema is an object")
            matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_json_schema(parsed, overrides=_LAYOUT))
        except (ValueError, RecursionError) as e:
            raise ProtocolError(Code.BAD_PARAMS, f"the grammar cannot be used: {e}"[:1000]) from None
        if matcher.is_error():
            raise ProtocolError(Code.BAD_PARAMS, f"the grammar cannot be used: {matcher.get_error()}"[:1000])
        return Constraint(matcher, self._size, self._ends)


class Constraint:
    """One text's constraint. What it has read is only a cache: `mask` depends on its argument alone."""

    def __init__(self, matcher: Any, size: int, ends: Sequence[int]) -> None:
        self._matcher, self._size, self._ends = matcher, size, ends
        self._read: list[int] = []

    def mask(self, text: Sequence[int]) -> Mask:
        """Tokens [V] that may follow `text`; after its end, an end token.

        Raises PacelineError if the grammar has no such text.
        """
        self._follow(text)
        if self._matcher.is_stopped():
            only = np.zeros(self._size, np.bool_)
            only[list(self._ends)] = True
            return only
        words = np.zeros((self._size + 31) // 32, np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return np.unpackbits(words.view(np.uint8), bitorder="little")[: self._size].astype(np.bool_)

    def _follow(self, text: Sequence[int]) -> None:
        known = common_prefix(self._read, text)
        if known < len(self._read):
            self._matcher.reset()
            known, self._read = 0, []
        for token in text[known:]:
            if self._matcher.is_stopped():
                break
            if not self._matcher.consume_token(token):
                raise PacelineError(f"token {token} does not go with the grammar: {self._matcher.get_error()}")
            self._read.append(token)


class _Spelling:
    """A GGUF's vocabulary as llguidance wants to see it."""

    def __init__(self, path: Path, size: int) -> None:
        from paceline.kernels.llama import Model

        model = self._model = Model(path, vocabulary_only=True)
        self.ends = model.end_tokens()
        self.tokens = [model.piece(i, special=True) for i in range(size)]
        self.special_token_ids = [i for i, t in enumerate(self.tokens) if t and not model.piece(i)]
        self.eos_token_id = self.ends[0] if self.ends else 0
        self.bos_token_id = model.bos if model.bos >= 0 else None

    def __call__(self, text: str | bytes) -> list[int]:
        spelt = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._model.tokenize(spelt, special=False)
