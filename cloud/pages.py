"""Bookkeeping of the paged KV cache: which page belongs to whom, which prefixes are stored, what may be let go.

A full page of committed tokens is indexed by a digest of everything up to its end; sequences with the same prefix then share
it, and it stays behind, reclaimable, when the last of them is gone. Pages are counted by reference; only full, indexed pages
are ever shared, so nobody writes into a page that another reads. Knows nothing about tensors.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from paceline.kernels.layout import PAGE
from paceline.protocol.errors import EngineError

Digest = bytes


@dataclass
class Held:
    """One sequence: its cached tokens and the pages they, and nodes under verification, lie in."""

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)  # of its leading full pages
    used: int = 0  # step of last use


class Pages:
    """`count` pages. Page 0 is never handed out: padding points there."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._references = [0] * count
        self._digest: dict[int, Digest] = {}  # of indexed pages
        self._index: dict[Digest, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # indexed, referenced by nobody; longest idle first

    @property
    def available(self) -> int:
        """Pages that can be had without taking anything from a sequence."""
        return len(self._free) + len(self._idle)

    @property
    def total(self) -> int:
        """Pages that can be handed out."""
        return self.count - 1

    @property
    def in_use(self) -> int:
        return self.total - self.available

    def match(self, held: Held, tokens: Sequence[int]) -> None:
        """Give an empty sequence the stored pages of its longest prefix, short of the last token."""
        assert not held.pages
        digest = b""
        for first in range(0, (len(tokens) - 1) // PAGE * PAGE, PAGE):
            chunk = tokens[first : first + PAGE]
            digest = _digest(digest, chunk)
            page = self._index.get(digest)
            if page is None:
                return
            self._reference(page)
            held.pages.append(page)
            held.digests.append(digest)
            held.tokens.extend(chunk)

    def grow(self, held: Held, length: int) -> bool:
        """Pages for `length` keys. False, with nothing changed, if there are not enough."""
        wanted = -(-length // PAGE) - len(held.pages)
        if wanted > self.available:
            return False
        held.pages.extend(self._take() for _ in range(wanted))
        return True

    def commit(self, held: Held, tokens: Sequence[int]) -> None:
        """`tokens` now stand at the end of the sequence: index the pages that filled up, let go of those beyond."""
        held.tokens.extend(tokens)
        self._trim(held, -(-len(held.tokens) // PAGE))
        for i in range(len(held.digests), len(held.tokens) // PAGE):
            before = held.digests[i - 1] if i else b""
            digest = _digest(before, held.tokens[i * PAGE : (i + 1) * PAGE])
            held.digests.append(digest)
            held.pages[i] = self._store(digest, held.pages[i])

    def drop(self, held: Held, pages: int | None = None) -> None:
        """Take the last `pages` pages from a sequence (all by default): it goes on from what is left, or from nothing."""
        self._trim(held, 0 if pages is None else max(0, len(held.pages) - pages))

    def distrust(self, held: Held) -> None:
        """What this sequence holds may be wrong: let go of it, and let nobody find it again."""
        for page in held.pages:
            digest = self._digest.pop(page, None)
            if digest is not None:
                del self._index[digest]
        self.drop(held)

    def reclaimable(self, held: Held) -> int:
        """Pages that would become available if this sequence lost all of its own."""
        return sum(self._references[page] == 1 for page in held.pages)

    def _trim(self, held: Held, pages: int) -> None:
        for page in reversed(
            held.pages[pages:]
        ):  # the end of a sequence goes idle first: it is the least likely shared
            self._release(page)
        del held.pages[pages:]
        del held.digests[pages:]
        del held.tokens[pages * PAGE :]

    def _store(self, digest: Digest, page: int) -> int:
        """Index a filled page; where the same prefix is stored already, that page takes its place."""
        known = self._index.get(digest)
        if known is None:
            self._index[digest], self._digest[page] = page, digest
            return page
        if known != page:
            self._reference(known)
            self._release(page)
        return known

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._index[self._digest.pop(page)]
        self._references[page] = 1
        return page

    def _reference(self, page: int) -> None:
        self._references[page] += 1
        self._idle.pop(page, None)

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        assert self._references[page] >= 0, "a page was released twice"
        if self._references[page]:
            return
        if page in self._digest:
            self._idle[page] = None
        else:
            self._free.append(page)


def _digest(before: Digest, tokens: Sequence[int]) -> Digest:
    return hashlib.blake2b(np.asarray(tokens, dtype="<i4").tobytes(), key=before[:64], digest_size=32).digest()


def pages_for(budget: int, page_bytes: int) -> int:
    """Pages that fit into `budget` bytes. Raises EngineError if that is not even room for one sequence of one page."""
    count = budget // page_bytes
    if count < 2:
        raise EngineError(
            f"{budget} bytes for the KV cache are too few: a page takes {page_bytes}; give it more memory"
        )
    return count
