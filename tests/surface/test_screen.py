"""What stands on a terminal after marks and guesses, by a terminal's own rules."""

import random
from collections.abc import Callable

import pyte
import pytest
from paceline.edge.answer import Piece, Token
from paceline.edge.screen import DRAFTED, PLAIN, Screen

COLUMNS = 20


def lines_after(write: Callable[[Callable[[str], None]], None]) -> tuple[list[str], list[str]]:
    """The screen's lines in the end, and all that was written."""
    screen = pyte.Screen(COLUMNS, 50)
    stream, written = pyte.Stream(screen), list[str]()

    def out(text: str) -> None:
        written.append(text)
        stream.feed(text.replace("\n", "\r\n"))

    write(out)
    return [line.rstrip() for line in screen.display], written


@pytest.mark.parametrize("seed", range(40))
def test_guesses_leave_no_trace(seed: int) -> None:
    """Guesses too long for the line, line ends at every place: the text stands as if nothing was guessed."""
    rng = random.Random(seed)
    # wide characters in guesses alone: pyte puts one that does not fit half beyond the edge, where terminals begin a line
    words = ["a", "bcd", " efghij", "\n", " ", "0123456789"]
    pieces = [rng.choice(words) for _ in range(60)]
    guesses = [rng.choice(["", "xyz", "X" * 40, "\u4f60" * 15, "end\nnext"]) for _ in pieces]

    def plain(out: Callable[[str], None]) -> None:
        screen = Screen(out, out, width=lambda: COLUMNS)
        for text in pieces:
            screen.piece(Piece(text))
        screen.end()

    def guessing(out: Callable[[str], None]) -> None:
        screen = Screen(out, out, guesses=True, width=lambda: COLUMNS)
        for text, guess in zip(pieces, guesses, strict=True):
            screen.guess(guess)
            screen.piece(Piece(text))
        screen.end()

    expected, _ = lines_after(plain)
    found, written = lines_after(guessing)
    assert found == expected
    assert any("\x1b[2m" in text for text in written)


def test_drafted_tokens_are_marked() -> None:
    written: list[str] = []
    screen = Screen(written.append, written.append, color=True)
    screen.piece(Piece("ab c", (Token(1, "ab", 2, True), Token(2, " c", 4, False))))
    assert written == [f"{DRAFTED}ab{PLAIN} c"]


def test_a_mark_stands_before_every_line() -> None:
    written: list[str] = []
    screen = Screen(written.append, written.append)
    screen.mark_lines("draft| ")
    for text in ("one\n", "two", " three\nfour"):
        screen.piece(Piece(text))
    screen.end()
    assert "".join(written) == "draft| one\ndraft| two three\ndraft| four\n"
