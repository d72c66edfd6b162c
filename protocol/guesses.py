"""Guesses that need no row: what a text repeats of itself, and what its target is known to write."""

from collections.abc import Iterable, Sequence

from paceline.protocol.ngrams import SIZES, Ngrams, Trust
from paceline.protocol.repeats import Repeats


class Guesses:
    """Of one generation. `trust` is shared by all that use the table."""

    def __init__(self, prompt: Iterable[int], table: Ngrams | None = None, trust: Trust | None = None) -> None:
        begin = [*prompt]
        self._repeats, self._table, self._trust = Repeats(begin), table, trust or Trust()
        self._end = begin[-SIZES[0] :]

    def extend(self, tokens: Sequence[int]) -> None:
        """The text grew: learn whether it went on as was to be expected."""
        self._repeats.extend(tokens)
        for token in tokens:
            if self._table is not None:
                self._trust.learn(self._table.after(self._end), token)
            self._end = [*self._end, token][-SIZES[0] :]

    def repeat(self, path: Sequence[int], shortest: int) -> tuple[int, float] | None:
        """What follows the text and then `path` if it goes on as before, where so many tokens agree; and its chance."""
        return self._repeats.next(path, shortest)

    def after(self, path: Sequence[int]) -> list[tuple[int, float]]:
        """All that may follow the text and then `path`, and the chance of each; the likeliest first."""
        chances: dict[int, float] = {}
        if (repeat := self._repeats.next(path)) is not None:
            chances[repeat[0]] = repeat[1]
        if self._table is not None:
            for idea in self._table.after(path if len(path) >= SIZES[0] else [*self._end, *path]):
                chances[idea[0]] = max(chances.get(idea[0], 0.0), self._trust.chance(idea))
        return sorted(chances.items(), key=lambda found: -found[1])
