"""A drafter that costs nothing: where the text goes on as it went on before, in the prompt or in itself.

It looks the end of a path up among all earlier places with the same last tokens and offers what followed at the one that
agrees furthest back. How often that is right is learned, apart for short and long agreements: one token of agreement is right
once in ten times or so, and where nothing else is drafted that is worth its few bytes.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from paceline.protocol.odds import Odds

KEYS, LONGEST = (3, 2, 1), 24  # tokens by whose agreement places are found; tokens of agreement that are looked for
PLACES = 8  # latest places that are compared
STEPS = (2, 3, 4, 5, 7, 10, 16)  # agreements from which on a chance is kept apart
FIRST_CHANCES = (0.1, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85)
PRIOR, DECAY = 3.0, 0.98
BITS = 32  # of a token


class Repeats:
    """The text so far and its places: a place is the index of a token, and found by the tokens before it."""

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._text = array("i")
        self._latest: dict[int, int] = {}  # after so many tokens, packed: the latest place
        self._before = array(
            "i", [-1] * KEYS[0]
        )  # of each place: the one before it after the same three tokens; -1: none
        self._odds = [Odds(chance, PRIOR, DECAY) for chance in FIRST_CHANCES]
        self._append(prompt)

    def extend(self, tokens: Iterable[int]) -> None:
        """The text grew: learn whether it went on as was to be expected."""
        for token in tokens:
            found = self._find(())
            if found is not None:
                self._odds[bisect_right(STEPS, found[1])].learn(found[0] == token)
            self._append((token,))

    def next(self, path: Sequence[int], shortest: int = 1) -> tuple[int, float] | None:
        """What is to follow the text and then `path`, and the chance of it; None: this end never came before.

        shortest: tokens of agreement, at least.
        """
        found = self._find(path)
        if found is None or found[1] < shortest:
            return None
        return found[0], min(self._odds[bisect_right(STEPS, found[1])].ratio, 0.99)

    def _append(self, tokens: Iterable[int]) -> None:
        text, latest = self._text, self._latest
        for token in tokens:
            place = len(text)
            keys = _keys(text[-KEYS[0] :])
            if len(keys) == len(KEYS):
                self._before.append(latest.get(keys[0], -1))
            for key in keys:
                latest[key] = place
            text.append(token)

    def _find(self, path: Sequence[int]) -> tuple[int, int] | None:
        """(token, tokens of agreement) at the place that agrees furthest back, the latest of equals."""
        text, latest = self._text, self._latest
        end = path if len(path) >= KEYS[0] else (*text[-KEYS[0] :], *path)
        keys = _keys(end)
        size = len(keys)
        for key in keys:
            if (place := latest.get(key, -1)) >= 0:
                break
            size -= 1
        else:
            return None
        if size < KEYS[0]:
            return text[place], size  # nowhere did more agree
        end = [*text[-LONGEST:], *path][-LONGEST:]
        best, length = place, self._agreement(place, end, size)
        for _ in range(PLACES - 1):
            if length == len(end) or (place := self._before[place]) < 0:
                break
            if (agreed := self._agreement(place, end, size)) > length:
                best, length = place, agreed
        return text[best], length

    def _agreement(self, place: int, end: Sequence[int], length: int) -> int:
        """Tokens before `place` that are those of `end`; the last `length` are."""
        text, most = self._text, min(len(end), place)
        while length < most and text[place - length - 1] == end[-length - 1]:
            length += 1
        return length


def _keys(end: Sequence[int]) -> tuple[int, ...]:
    """The last three, two and one tokens of an `end`, packed, as far as it has so many; no two kinds have one key."""
    if len(end) < 2:
        return tuple(end)
    two = (end[-2] + 1) << BITS | end[-1]
    return ((end[-3] + 1) << 2 * BITS | two, two, end[-1]) if len(end) > 2 else (two, end[-1])
