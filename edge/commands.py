"""The chat's slash commands."""

import re
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from paceline.edge.chat import Chat
from paceline.edge.conversation import read_text
from paceline.protocol.codec import convert
from paceline.protocol.errors import PacelineError
from paceline.protocol.sampling import Sampling

#: What `/?` shows, and what is completed.
HELP = {
    "/?": "this list",
    "/bye": "leave (also Ctrl-D)",
    "/clear": "forget the conversation; the system message stays",
    "/load NAME": "go on with a saved conversation",
    "/read FILE": "send a text file along with the next question",
    "/regen": "answer the last question again, with the next seed",
    "/save NAME": "keep the conversation; a NAME with a slash or .json is a file",
    "/set parameter NAME VALUE": "change how tokens are chosen, or max_tokens",
    "/set system TEXT": "change the system message; without TEXT there is none",
    "/show": "parameters, system message, link",
    "/stats": "how the last answer was made; /stats on: after every answer",
}
NAMES = sorted({line.split()[0] for line in HELP} | {"/help", "/exit", "/quit"})
PARAMETERS = [
    name
    for name in (f.name for f in msgspec.structs.fields(Sampling))
    if name not in ("logit_bias", "temperature_last")
] + ["max_tokens"]


class Commands:
    """`folder` is where conversations are saved by name."""

    def __init__(self, chat: Chat, folder: Path) -> None:
        self._chat, self._folder = chat, folder

    async def __call__(self, line: str) -> bool:
        """Do what a line that begins with a slash says. True: the chat is over. Raises PacelineError in words."""
        name, _, rest = line.strip().partition(" ")
        known: dict[str, Callable[[str], Awaitable[None] | bool | None]] = {
            "/?": self._help,
            "/help": self._help,
            "/bye": self._bye,
            "/exit": self._bye,
            "/quit": self._bye,
            "/clear": self._clear,
            "/load": self._load,
            "/read": self._read,
            "/regen": self._regen,
            "/save": self._save,
            "/set": self._set,
            "/show": self._show,
            "/stats": self._stats,
        }
        if name not in known:
            raise PacelineError(f"there is no command {name}; /? lists them")
        done = known[name](rest.strip())
        if isinstance(done, Awaitable):
            await done
            return False
        return bool(done)

    def _say(self, line: str) -> None:
        self._chat.screen.say(line)

    def _help(self, rest: str) -> None:
        width = max(map(len, HELP))
        self._say("\n".join(f"{name:{width}}  {what}" for name, what in HELP.items()))
        self._say('\nBegin a message with """ to write several lines, and end it with """. Ctrl-C stops an answer.')

    def _bye(self, rest: str) -> bool:
        return True

    def _clear(self, rest: str) -> None:
        self._chat.conversation.clear()
        self._say("[the conversation is forgotten]")

    def _save(self, rest: str) -> None:
        path = self._path(rest, "/save")
        self._chat.conversation.save(path)
        self._say(f"[saved to {path}]")

    def _load(self, rest: str) -> None:
        conversation = self._chat.conversation
        conversation.load(self._path(rest, "/load"))
        self._say(f"[{len(conversation.turns)} messages; the last one]")
        if conversation.turns:
            self._say(conversation.turns[-1]["content"])

    def _path(self, name: str, command: str) -> Path:
        if not name:
            raise PacelineError(f"{command} needs a name")
        if "/" in name or name.endswith(".json"):
            return Path(name).expanduser()
        if re.fullmatch(r"[\w. -]{1,100}", name) is None:
            raise PacelineError(f"{name!r} is no name for a conversation: letters, digits, dots, spaces and dashes are")
        return self._folder / f"{name}.json"

    def _read(self, rest: str) -> None:
        if not rest:
            raise PacelineError("/read needs a file")
        parts = shlex.split(rest) if rest[0] in "'\"" else [rest]
        path = Path(parts[0]).expanduser()
        text = read_text(path)
        self._chat.conversation.attached.append(text)
        tokens = len(self._chat.text.plain(text))
        self._say(f"[{path.name}: {tokens} tokens, sent along with your next question]")

    async def _regen(self, rest: str) -> None:
        conversation = self._chat.conversation
        question = conversation.take_back()
        if question is None:
            raise PacelineError("there is no question to answer again")
        if conversation.sampling.greedy:
            self._say("[at temperature 0 the answer stays the same; /set parameter temperature 0.8]")
        seed = (conversation.sampling.seed + 1) % 2**63
        conversation.sampling = msgspec.structs.replace(conversation.sampling, seed=seed)
        await self._chat.turn(question)

    def _set(self, rest: str) -> None:
        what, _, value = rest.partition(" ")
        if what == "system":
            self._chat.conversation.system = value.strip() or None
            self._say("[system message set]" if value.strip() else "[no system message]")
        elif what == "parameter":
            self._set_parameter(*value.split())
        else:
            raise PacelineError("/set parameter NAME VALUE, or /set system TEXT")

    def _set_parameter(self, name: str = "", value: str = "", *more: str) -> None:
        conversation = self._chat.conversation
        if name not in PARAMETERS or not value or more:
            raise PacelineError(f"/set parameter NAME VALUE; the names are {', '.join(PARAMETERS)}")
        number = _number(value)
        if name == "max_tokens":
            if not isinstance(number, int) or not 1 <= number <= 1_000_000:
                raise PacelineError("max_tokens is a number from 1 to 1000000")
            conversation.max_tokens = number
        else:
            values = msgspec.structs.asdict(conversation.sampling) | {name: number}
            conversation.sampling = convert(values, Sampling, "sampling parameters")
        self._say(f"[{name} is {number}]")

    def _show(self, rest: str) -> None:
        conversation, link = self._chat.conversation, self._chat.agent.link
        values = msgspec.structs.asdict(conversation.sampling) | {"max_tokens": conversation.max_tokens}
        lines = [f"{name:20} {values[name]}" for name in PARAMETERS]
        lines.append(f"{'system':20} {conversation.system or '(the model template says)'}")
        lines.append(f"{'messages':20} {len(conversation.turns)}")
        lines.append(f"{'model':20} {link.welcome.model if link.welcome else '(not connected yet)'}")
        lines.append(f"{'link':20} {self._chat.state}, round trip {1000 * link.round_trip.seconds:.0f} ms")
        self._say("\n".join(lines))

    def _stats(self, rest: str) -> None:
        if rest in ("on", "off"):
            self._chat.stats = rest == "on"
            self._say(f"[stats are {rest}]")
        else:
            self._say(self._chat.summary or "[nothing has been answered yet]")


def _number(value: str) -> int | float:
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return float(value)
    except ValueError:
        raise PacelineError(f"{value!r} is not a number") from None
