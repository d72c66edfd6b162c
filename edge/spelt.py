"""Control tokens that people spell: `<|im_start|>` in a message is text about a token, never the token.

A template writes control tokens by their spelling too, so the spelling alone does not tell whose it is. Before a message
goes into the template, every spelling in it is broken by a character that occurs nowhere else; where the character comes
out again, the text is a person's. Knows spellings and tokenisers, no templates.
"""

import re
from collections.abc import Callable, Sequence

from paceline.protocol.errors import PacelineError

# Noncharacters first, which no text should hold; then planes for private use, so that one is always free.
_MARKS = (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xFFFFE))


class Spelt:
    """The spellings of a vocabulary's control tokens."""

    def __init__(self, spellings: Sequence[str]) -> None:
        longest_first = sorted({s for s in spellings if len(s) > 1}, key=lambda s: (-len(s), s))
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def found(self, text: str) -> bool:
        return self._any.search(text) is not None

    def broken(self, text: str, mark: str) -> str:
        """`text` with `mark` inside every spelling, overlapping ones too: none is left."""
        while (changed := self._any.sub(lambda m: m[0][0] + mark + m[0][1:], text)) != text:
            text = changed
        return text

    def tokenize(self, text: str, mark: str, tokenizer: Callable[[str, bool], list[int]]) -> list[int]:
        """Token ids of `text`, in which marked spellings are text. `tokenizer` is told whether spellings are tokens.

        Only the stretch between two real control tokens is cut out, so that everything else is tokenised as ever.
        """
        ids: list[int] = []
        begin = at = 0
        while at < len(text):
            match = self._any.search(text, at)
            end = match.start() if match else len(text)
            if mark in text[at:end]:
                ids += tokenizer(text[begin:at], True) if at > begin else []
                ids += tokenizer(text[at:end].replace(mark, ""), False)
                begin = end
            at = match.end() if match else len(text)
        return ids + (tokenizer(text[begin:], True) if begin < len(text) else [])


def unused_mark(texts: Sequence[str]) -> str:
    """A character that occurs in none of `texts`. Raises PacelineError if they hold every one there is."""
    used = {c for text in texts for c in text if ord(c) >= _MARKS[0]}
    free = next((chr(i) for i in _MARKS if chr(i) not in used), None)
    if free is None:
        raise PacelineError("the conversation holds every character for private use; take some out of it")
    return free
