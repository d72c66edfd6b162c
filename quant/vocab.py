"""The vocabulary of a GGUF file, alone.

A vocabulary-only GGUF is the header of a model (tokenizer, chat template, hyper-parameters) without its tensors:
llama.cpp opens it with `vocab_only`, and a device tokenises with it as the target does, at a hundredth of the size.

The header is walked as bytes, by the GGUF specification (ggml, docs/gguf.md), and its entries are copied as they are:
the result is exact even for tokens that are not UTF-8. Knows nothing about tensors or tokenising.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from paceline.protocol.errors import PacelineError
from paceline.quant.landing import landing

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
#: Bytes of a value by its type number; strings and arrays carry their own length.
_WIDTH = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
#: Ends any walk over a hostile header; the largest vocabularies have some hundred thousand tokens.
_MOST_ITEMS = 1 << 24


class CorruptModelError(PacelineError):
    """A model file is not what its name says, or is cut off."""


@dataclass(frozen=True)
class Header:
    """The metadata of a GGUF file: each key with its entry's bytes (key, type and value), in the file's order."""

    version: int
    tensors: int
    entries: dict[str, bytes]


def write_vocabulary(src: Path, dst: Path) -> None:
    """Write the vocabulary-only GGUF of the model at `src` to `dst`, whole or not at all.

    Raises `CorruptModelError` when `src` is not a whole GGUF or has no vocabulary, and `DiskError`.
    """
    header = read_header(src)
    if "tokenizer.ggml.tokens" not in header.entries:
        raise CorruptModelError(f"{src} has no vocabulary: choose a GGUF that carries its tokenizer.")
    # A part of a split model names its siblings, which would not be beside the vocabulary.
    kept = [entry for key, entry in header.entries.items() if not key.startswith("split.")]
    with landing(dst, needed=sum(map(len, kept))) as part:
        part.write_bytes(b"".join([MAGIC, struct.pack("<IQQ", header.version, 0, len(kept)), *kept]))


def read_header(path: Path) -> Header:
    """The metadata of the GGUF at `path`. Raises `CorruptModelError` when it is no GGUF or ends too early."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(data, path).header()
    except (OSError, ValueError) as error:  # mmap refuses an empty file with a ValueError
        raise CorruptModelError(f"Cannot read {path} as a GGUF model: {error}.") from error


class _Walk:
    """A position in the header's bytes; every step is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def header(self) -> Header:
        if self.data[:4] != MAGIC:
            raise CorruptModelError(f"{self.path} is not a GGUF file. Fetch or convert it again.")
        self.skip(4)
        (version,) = self.take("<I")
        if version not in (2, 3):
            raise CorruptModelError(
                f"{self.path} is GGUF version {version}; versions 2 and 3 (little-endian) are read."
            )
        tensors, count = self.take("<QQ")
        return Header(version, tensors, dict(self.entry() for _ in range(self.bounded(count))))

    def entry(self) -> tuple[str, bytes]:
        start = self.at
        (length,) = self.take("<Q")
        key = bytes(self.data[self.at : self.at + length])
        self.skip(length)
        self.value(*self.take("<I"))
        return key.decode("utf-8", "replace"), bytes(self.data[start : self.at])

    def value(self, kind: int, depth: int = 0) -> None:
        if kind == _STRING:
            self.skip(*self.take("<Q"))
        elif kind == _ARRAY and depth < 4:
            item, count = self.take("<IQ")
            if item in _WIDTH:
                return self.skip(_WIDTH[item] * count)
            for _ in range(self.bounded(count)):
                self.value(item, depth + 1)
        elif kind in _WIDTH:
            self.skip(_WIDTH[kind])
        else:
            raise CorruptModelError(f"{self.path} has a value of unknown type {kind} in its header. Fetch it again.")

    def take(self, layout: str) -> tuple[int, ...]:
        start = self.at
        self.skip(struct.calcsize(layout))
        return struct.unpack_from(layout, self.data, start)

    def skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise CorruptModelError(
                f"{self.path} is cut off: its header goes on after its {len(self.data):,} bytes. Fetch it again."
            )

    def bounded(self, count: int) -> int:
        if count > _MOST_ITEMS:
            raise CorruptModelError(f"{self.path} is damaged: its header claims {count:,} entries. Fetch it again.")
        return count
