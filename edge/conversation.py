"""A conversation as it is kept: what was said, by which parameters, and its file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from paceline.edge.text import Turn
from paceline.protocol.errors import PacelineError
from paceline.protocol.sampling import Sampling

FILE_BYTES = 64 * 1024 * 1024


class _Turn(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str


class _File(msgspec.Struct):
    turns: list[_Turn]
    sampling: Sampling
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    system: str | None = None
    format: Literal["paceline-conversation-1"] = "paceline-conversation-1"


@dataclass
class Conversation:
    """`system` stands before the turns; `attached` is text that goes along with the next question."""

    sampling: Sampling
    max_tokens: int
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    attached: list[str] = field(default_factory=list)

    def prompt(self) -> list[Turn]:
        """All of it, as the model's template takes it."""
        before: list[Turn] = [{"role": "system", "content": self.system}] if self.system else []
        return [*before, *self.turns]

    def question(self, text: str) -> str:
        """`text` with what was attached, which is used up."""
        parts, self.attached = [*self.attached, text], []
        return "\n\n".join(parts)

    def clear(self) -> None:
        self.turns.clear()
        self.attached.clear()

    def take_back(self) -> str | None:
        """The last question, taken out together with its answer; None if there is none."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None

    def save(self, path: Path) -> None:
        """Write it to a file, whole or not at all. Raises PacelineError."""
        kept = _File([_Turn(t["role"], t["content"]) for t in self.turns], self.sampling, self.max_tokens, self.system)  # type: ignore[arg-type]
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
            part.replace(path)
        except OSError as e:
            part.unlink(missing_ok=True)
            raise PacelineError(f"cannot save to {path}: {e.strerror or e}") from None

    def load(self, path: Path) -> None:
        """Go on with a saved conversation in place of this one. Raises PacelineError and changes nothing."""
        try:
            kept = msgspec.json.decode(_read(path), type=_File)
        except msgspec.MsgspecError as e:
            raise PacelineError(f"{path} is not a saved conversation: {e}") from None
        self.sampling, self.max_tokens, self.system = kept.sampling, kept.max_tokens, kept.system
        self.turns, self.attached = [{"role": t.role, "content": t.content} for t in kept.turns], []


def read_text(path: Path) -> str:
    """A text file, to be asked about. Raises PacelineError."""
    try:
        return _read(path).decode("utf-8")
    except UnicodeDecodeError:
        raise PacelineError(f"{path} is not a text file in UTF-8") from None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES + 1)
    except OSError as e:
        raise PacelineError(f"cannot read {path}: {e.strerror or e}") from None
    if len(data) > FILE_BYTES:
        raise PacelineError(f"{path} is larger than {FILE_BYTES} bytes")
    return data
