"""What the real draft says along a text and beside it, written down once, so that thousands of edges can read it.

A page stands for a path from the prompt: the draft's candidates there with their calibrated chances, as the real agent's
predictor gives them, and the pages that follow. Where the agent never ran a row there is no page, and an edge that gets there
finds no candidates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from paceline.edge.generation import ENOUGH
from paceline.edge.predictor import Predictor
from paceline.scripts.lab.cases import Case
from paceline.scripts.lab.memo import Digest, Memo, begin, onward


@dataclass(eq=False)
class Page:
    """`candidates`: (token, log-probability that the target takes it), likeliest first."""

    candidates: Sequence[tuple[int, float]]
    next: "dict[int, Page]" = field(default_factory=dict)


@dataclass(frozen=True)
class Book:
    """A case and its pages; `along[i]` is the page after i tokens of the text."""

    case: Case
    along: Sequence[Page]


def write_book(memo: Memo, case: Case, predictor: Predictor) -> Book:
    """All that `memo` holds for the case; the rows along the text are computed if they are not there."""
    digests = [begin(case)]
    for token in case.text:
        digests.append(onward(digests[-1], token))
    memo.of([(digest, case.text[:i]) for i, digest in enumerate(digests)])
    pages: dict[Digest, Page] = {}
    for digest in reversed(digests):
        _fill(memo, digest, predictor, pages, seeded=not case.sampling.greedy)
    return Book(case, [pages[digest] for digest in digests])


def _fill(memo: Memo, top: Digest, predictor: Predictor, pages: dict[Digest, Page], *, seeded: bool) -> None:
    """The page of `top`, and all those below it that are not written yet."""
    left = [top]
    while left:
        digest = left.pop()
        if digest in pages:
            continue
        found = memo.held(digest)
        assert found is not None
        chances = predictor.probabilities(found, seeded=seeded)
        count = 1 + int(np.searchsorted(np.cumsum(chances), ENOUGH))
        tokens = [int(token) for token in found.tokens[:count]]
        pages[digest] = Page([(t, math.log(c)) for t, c in zip(tokens, chances, strict=False)])
        left += [below for t in tokens if memo.held(below := onward(digest, t)) is not None]
    _bind(top, pages)


def _bind(top: Digest, pages: dict[Digest, Page]) -> None:
    left = [top]
    while left:
        digest = left.pop()
        page = pages[digest]
        if page.next:
            continue
        for token, _ in page.candidates:
            if (below := onward(digest, token)) in pages:
                page.next[token] = pages[below]
                left.append(below)
