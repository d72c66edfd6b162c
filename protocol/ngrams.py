"""What a target is known to write: which tokens followed its last three, two or one, in text of its own, and how often.

A table of some hundred kilobytes drafts for nothing, on a device that is too slow for a model or beside the target, and together
with what a text repeats of itself it goes further than either. It is made once (`paceline draft ngrams`); what it says is
believed as often as it turns out right. Knows neither trees nor models.
"""

import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from paceline.protocol.errors import PacelineError
from paceline.protocol.odds import Odds
from paceline.protocol.vocabulary import Vocabulary

SIZES = (3, 2, 1)  # tokens of context, the most first
IDEAS = 4  # followers of a context that are kept
BITS = 21  # of a token in a key
REMEMBERED = 4096  # contexts looked up last
LEAST, MOST = 1e-4, 0.99  # of a chance
MOST_BYTES = 1 << 28  # of a table
PRIOR, RIGHT = 4.0, 0.6  # outcomes that the beginning counts for, and how much of what was promised came
DECAY = 0.995  # of the outcomes before, with each token

Idea = tuple[int, int, float]  # a token, tokens of context, its share among what followed that context


@dataclass(frozen=True)
class Gram:
    """Contexts of one size. keys: int64 [M], rising, see `packed`; tokens: int32 [M, IDEAS], the most frequent first, -1 where
    there are fewer; shares: uint8 [M, IDEAS], of all that followed, in 255ths."""

    keys: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    shares: npt.NDArray[np.uint8]


class Ngrams:
    def __init__(self, grams: Mapping[int, Gram], vocabulary: str) -> None:
        """`grams` by size; `vocabulary`: the fingerprint of what its tokens mean."""
        self.grams, self.vocabulary = dict(grams), vocabulary
        # Single numbers are read sooner from memory than from arrays.
        self._columns = [
            (size, gram.keys.data, gram.tokens.ravel().data, gram.shares.ravel().data)
            for size in SIZES
            if (gram := self.grams.get(size)) is not None
        ]
        self._remembered = lru_cache(REMEMBERED)(self._after)  # from one step to the next most paths stay

    def __len__(self) -> int:
        return sum(len(gram.keys) for gram in self.grams.values())

    def after(self, end: Sequence[int]) -> tuple[Idea, ...]:
        """At most `IDEAS` of what may follow `end`, each another token: those of the longest context first."""
        return self._remembered(tuple(end[-SIZES[0] :]))

    def _after(self, end: tuple[int, ...]) -> tuple[Idea, ...]:
        found: dict[int, Idea] = {}
        whole = packed(end)
        for size, keys, tokens, shares in self._columns:
            if len(end) < size:
                continue
            key = whole & ((1 << size * BITS) - 1)
            at = bisect_left(keys, key)
            if at == len(keys) or keys[at] != key:
                continue
            row = slice(at * IDEAS, (at + 1) * IDEAS)
            for token, share in zip(tokens[row], shares[row], strict=True):
                if token >= 0 and token not in found:
                    found[token] = token, size, share / 255
                    if len(found) == IDEAS:
                        return tuple(found.values())
        return tuple(found.values())

    def check(self, vocabulary: Vocabulary) -> None:
        """Raise PacelineError unless it is of this vocabulary."""
        if self.vocabulary != vocabulary.fingerprint:
            raise PacelineError(f"this table of n-grams is of another vocabulary than {vocabulary.name}: make it anew")
        worst = max((int(g.tokens.max(initial=-1)) for g in self.grams.values()), default=-1)
        if worst >= vocabulary.size:
            raise PacelineError(f"this table of n-grams names token {worst}; {vocabulary.name} has {vocabulary.size}")

    def save(self, path: Path) -> None:
        arrays = {
            f"{name}{n}": getattr(g, name) for n, g in self.grams.items() for name in ("keys", "tokens", "shares")
        }
        with path.open("wb") as file:
            np.savez_compressed(file, vocabulary=np.array(self.vocabulary), **arrays)

    @classmethod
    def load(cls, path: Path) -> "Ngrams":
        """Raises PacelineError where the file is damaged."""
        try:
            with zipfile.ZipFile(path) as file:
                if sum(part.file_size for part in file.infolist()) > MOST_BYTES:
                    raise ValueError(f"it unpacks to more than {MOST_BYTES:,} bytes")
            with np.load(path, allow_pickle=False) as arrays:
                grams = {n: Gram(arrays[f"keys{n}"], arrays[f"tokens{n}"], arrays[f"shares{n}"]) for n in SIZES}
                vocabulary = str(arrays["vocabulary"])
            if not all(_sound(gram) for gram in grams.values()):
                raise ValueError("its arrays contradict each other")
        except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as e:
            why = getattr(e, "strerror", None) or e
            raise PacelineError(
                f"{path} is not a usable table of n-grams: {why}. Make it with `paceline draft ngrams`."
            ) from e
        return cls(grams, vocabulary)


def packed(tokens: Sequence[int]) -> int:
    """The key of a context."""
    key = 0
    for token in tokens:
        key = key << BITS | token
    return key


def _sound(gram: Gram) -> bool:
    kinds = [array.dtype.name for array in (gram.keys, gram.tokens, gram.shares)]
    shapes = [gram.keys.ndim, gram.tokens.shape, gram.shares.shape] == [1, *[(len(gram.keys), IDEAS)] * 2]
    return shapes and kinds == ["int64", "int32", "uint8"] and bool((np.diff(gram.keys) > 0).all())


class Trust:
    """How often what a table says comes true, for each size of context: learned from every token that is written."""

    def __init__(self) -> None:
        self._odds = {size: Odds(RIGHT, PRIOR, DECAY) for size in SIZES}

    def chance(self, idea: Idea) -> float:
        """How likely it comes next."""
        _, size, share = idea
        return min(max(share * self._odds[size].ratio, LEAST), MOST)

    def learn(self, ideas: Sequence[Idea], token: int) -> None:
        """These stood to reason, and `token` came."""
        for idea, size, share in ideas:
            self._odds[size].learn(idea == token, share)
