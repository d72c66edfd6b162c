"""The chat's input line: history, completion, several lines between triple quotes, and what Ctrl-C and Ctrl-D do."""

from collections.abc import Iterable
from pathlib import Path

from paceline.edge.commands import NAMES, PARAMETERS
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.shortcuts import CompleteStyle

TAKING = ("/load", "/read", "/save", "/set")  # commands after which something has to come
QUOTES = '"""'


class Reader:
    """Reads questions and commands. `history` None: nothing is remembered."""

    def __init__(self, history: Path | None, conversations: Path) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            completer=_Completer(conversations),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
        )

    async def __call__(self) -> str:
        """The next question or command. Raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C."""
        line = await self._line(">>> ")
        begin, quoted, rest = line.partition(QUOTES)
        if not quoted or (begin and not begin.startswith("/")):
            return line
        while QUOTES not in rest:
            rest += "\n" + await self._line("... ")
        return begin + rest.partition(QUOTES)[0].strip("\n")

    async def _line(self, prompt: str) -> str:
        return await self._session.prompt_async(prompt, handle_sigint=False)


def _history(path: Path | None) -> History:
    """A history that cannot be written to is worth less than a chat."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


class _Completer(Completer):
    """Commands, parameters, files and names of saved conversations."""

    def __init__(self, conversations: Path) -> None:
        self._conversations, self._paths = conversations, PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        words = text.split(" ")
        match words:
            case [name]:
                yield from _beginning([f"{n} " if n in TAKING else n for n in NAMES], name)
            case ["/set", what]:
                yield from _beginning(["parameter ", "system "], what)
            case ["/set", "parameter", name]:
                yield from _beginning([f"{p} " for p in PARAMETERS], name)
            case ["/stats", word]:
                yield from _beginning(["off", "on"], word)
            case ["/load" | "/save", name] if "/" not in name:
                yield from _beginning(sorted(p.stem for p in self._conversations.glob("*.json")), name)
            case ["/read" | "/load" | "/save", *_]:
                path = text.partition(" ")[2]
                yield from self._paths.get_completions(Document(path, len(path)), complete_event)


def _beginning(words: Iterable[str], start: str) -> Iterable[Completion]:
    return (Completion(word, start_position=-len(start)) for word in words if word.startswith(start))
