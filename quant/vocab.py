"""The vocabulary of a GGUF file, alone.

A vocabulary-only GGUF is the header of a model (tokenizer, chat template, hyper-parameters) without its tensors:
llama.cpp opens it with `vocab_only`, and a device tokenises with it as the target does, at a hundredth of the size.

Its entries are copied as they are: the result is exact even for tokens that are not UTF-8.
"""

import struct
from pathlib import Path

from paceline.kernels.gguf_file import MAGIC, GgufHeader
from paceline.protocol.errors import PacelineError
from paceline.quant.landing import landing


class CorruptModelError(PacelineError):
    """A model file is not what its name says, or is cut off."""


def write_vocabulary(src: Path, dst: Path) -> None:
    """Write the vocabulary-only GGUF of the model at `src` to `dst`, whole or not at all.

    Raises EngineError when `src` is not a whole GGUF, `CorruptModelError` when it has no vocabulary, and `DiskError`.
    """
    header = GgufHeader(src)
    if "tokenizer.ggml.tokens" not in header.metadata:
        raise CorruptModelError(f"{src} has no vocabulary: choose a GGUF that carries its tokenizer.")
    # A part of a split model names its siblings, which would not be beside the vocabulary.
    kept = [header.entry(key) for key in header.metadata if not key.startswith("split.")]
    with landing(dst, needed=sum(map(len, kept))) as part:
        part.write_bytes(b"".join([MAGIC, struct.pack("<IQQ", header.version, 0, len(kept)), *kept]))
