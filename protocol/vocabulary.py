"""Is this the same vocabulary? A fingerprint of what the token ids mean.

Only ids travel, so both ends must mean the same text by each id. The fingerprint covers the real tokens in the order
of their ids; the padding rows that engines append to reach a round number are left out, so a model padded to 151,936
rows and one padded to 152,064 agree. Knows nothing about merges or normalisation: they decide how the device
tokenises, not what an id means.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

_PADDING = re.compile(r"\[PAD\d+\]|")


def real_size(tokens: Sequence[str]) -> int:
    """Number of tokens without the trailing padding rows ("[PAD151643]" as GGUF converters write them, or empty)."""
    n = len(tokens)
    while n and _PADDING.fullmatch(tokens[n - 1]):
        n -= 1
    return n


def fingerprint(tokens: Sequence[str]) -> str:
    """Hexadecimal SHA-256 over the real tokens, as a vocabulary file spells them ("Ġthe", "▁the"), in the order of ids."""
    digest = hashlib.sha256()
    for token in tokens[: real_size(tokens)]:
        data = token.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "little"))
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Vocabulary:
    """What one end knows of its vocabulary: a name for messages, the number of real tokens, the fingerprint."""

    name: str
    size: int
    fingerprint: str

    @classmethod
    def of(cls, name: str, tokens: Sequence[str]) -> "Vocabulary":
        return cls(name, real_size(tokens), fingerprint(tokens))
