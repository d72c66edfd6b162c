"""What a terminal shows of an answer: text as it comes, tokens marked by whose they are, guesses ahead, asides.

Output is only ever appended, with one exception that is asked for: a guess stands dimmed to the right of the cursor, on
what is left of the line, and is written over. Knows nothing about the conversation.
"""

from collections.abc import Callable

from paceline.edge.answer import Piece
from prompt_toolkit.utils import get_cwidth

DRAFTED = "\x1b[36m"  # cyan: the draft had it right
DIM = "\x1b[2m"
PLAIN = "\x1b[0m"
CLEAR_RIGHT = "\x1b[K"


class Screen:
    """`write` takes what goes to standard output, `aside` a line about the conversation rather than of it.

    `color` marks tokens; `guesses` shows what is not certain yet; `width` gives the columns of the terminal. `shared`: both
    go to one terminal, so that an aside needs a line of its own; where the answer is piped, nothing is added to it.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        aside: Callable[[str], None],
        *,
        color: bool = False,
        guesses: bool = False,
        shared: bool = True,
        width: Callable[[], int] = lambda: 80,
    ) -> None:
        self._write, self._aside, self._width = write, aside, width
        self._color, self._guesses, self._shared = color, guesses, shared
        self._column = 0
        self._begun = False  # something of an answer was shown
        self._mark = ""
        self._shown = ""  # the guess that stands to the right of the cursor

    def mark_lines(self, mark: str) -> None:
        """Every line of the answer that begins now has `mark` before it."""
        self._mark = mark

    def piece(self, piece: Piece) -> None:
        """Text that is certain."""
        self._begun = True
        wiped = self._unguessed()
        parts = [(t.text, t.drafted) for t in piece.tokens]
        if not self._color or "".join(text for text, _ in parts) != piece.text:
            parts = [(piece.text, False)]
        out = "".join(f"{DRAFTED}{self._placed(t)}{PLAIN}" if drafted else self._placed(t) for t, drafted in parts if t)
        self._write(wiped + out)

    def guess(self, text: str) -> None:
        """Show the beginning of `text` dimmed, as far as the line goes; the cursor stays where it is."""
        if not self._guesses:
            return
        text = self._fitting(text)
        if text != self._shown:
            back = f"\x1b[{get_cwidth(text)}D" if text else ""
            self._write(f"{CLEAR_RIGHT}{DIM}{text}{PLAIN}{back}" if text else CLEAR_RIGHT)
            self._shown = text

    def say(self, line: str) -> None:
        """A line about the conversation, on a line of its own."""
        if self._column and self._shared:
            self._break()
        self._aside(line)

    def end(self) -> None:
        """The answer is over; if there was one, its last line ends here."""
        if self._begun:
            self._break()
        self._mark, self._begun = "", False

    def _break(self) -> None:
        self._write(self._unguessed() + "\n")
        self._column = 0

    def _unguessed(self) -> str:
        """What wipes the rest of a guess. At the very end of a line it would wipe the last character, and nothing is left."""
        shown, self._shown = self._shown, ""
        return CLEAR_RIGHT if shown and self._column < self._width() else ""

    def _placed(self, text: str) -> str:
        """`text` with the mark at the beginning of each line; keeps count of the column."""
        out = []
        for char in text:
            if self._column == 0 and self._mark:
                out.append(self._mark)
                self._column = len(self._mark)
            out.append(char)
            self._advance(char)
        return "".join(out)

    def _advance(self, char: str) -> None:
        if char in "\n\r":
            self._column = 0
            return
        width, columns = get_cwidth(char), max(self._width(), 2)
        if char == "\t":
            width = 8 - self._column % 8
        self._column = self._column + width if self._column + width <= columns else width

    def _fitting(self, text: str) -> str:
        """What of `text` fits to the right of the cursor without touching the last column, up to the end of its line."""
        room, out = self._width() - self._column - 1, ""
        for char in text:
            width = get_cwidth(char)
            if not char.isprintable() or char == "\ufffd" or width > room:
                break
            out, room = out + char, room - width
        return out
