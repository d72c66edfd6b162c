"""A tokenizer.json vocabulary, as a verifier with safetensors weights gives it out, through the `tokenizers` library.

The file is the bundle of `paceline.quant.vocab_bundle`: tokenizer.json with the chat template and the ids of begin
and end tokens.
"""

import json
from pathlib import Path
from typing import Any

from paceline.protocol.errors import EngineError

_META_SPACE = "\u2581"


class JsonTokenizer:
    """The same face as a GGUF's vocabulary (`paceline.kernels.llama.Model`)."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            bundle = json.loads(path.read_text())
            self._tokenizer: Any = Tokenizer.from_str(json.dumps(bundle["tokenizer"]))
            self.name: str = bundle["name"]
            self.chat_template: str | None = bundle["chat_template"]
            self.bos: int = bundle["bos"]
            self._ends: list[int] = [int(i) for i in bundle["end_tokens"]]
        except Exception as e:  # the library raises bare Exception for what it cannot read
            raise EngineError(f"{path}: not a vocabulary that can be read ({type(e).__name__})") from None
        self._spellings = self._in_order()
        self._special = {i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        self._bytes = _byte_alphabet() if "ByteLevel" in json.dumps(bundle["tokenizer"].get("decoder")) else None
        self.adds_bos = self.bos >= 0 and self._tokenizer.encode("a").ids[:1] == [self.bos]

    def tokens(self) -> list[str]:
        """Spelling of every token in the order of ids; ids without a token are empty."""
        return list(self._spellings)

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`. With `special`, spellings of control tokens in it become those tokens."""
        self._tokenizer.encode_special_tokens = not special
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes that `token` stands for; control tokens have none unless asked for."""
        if token in self._special:
            return self._spellings[token].encode() if special else b""
        spelling = self._spellings[token] if 0 <= token < len(self._spellings) else ""
        if self._bytes is not None:
            return b"".join(bytes([self._bytes[c]]) if c in self._bytes else c.encode() for c in spelling)
        if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
            return bytes([int(spelling[3:5], 16)])
        return spelling.replace(_META_SPACE, " ").encode()

    def end_tokens(self) -> list[int]:
        return list(self._ends)

    def control_tokens(self) -> list[int]:
        """Ids whose spelling in a text becomes the token only with `special`."""
        return sorted(self._special)

    def close(self) -> None:
        """Nothing to free."""

    def _in_order(self) -> list[str]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        spellings = [""] * (max(vocabulary.values(), default=-1) + 1)
        for spelling, i in vocabulary.items():
            spellings[i] = spelling
        return spellings


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(moved)}
