"""What the documents tell people to type is there: commands, their options, scripts; and no output that nobody checks."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from paceline.scripts.cli import app
from typer.main import get_command

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "quant/README.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def typed(text: str) -> list[list[str]]:
    """The commands of a document's shell blocks and of its running text, as words."""
    blocks = "\n".join(body for kind, body in FENCE.findall(text) if kind == "sh").replace("\\\n", " ")
    spans = re.findall(r"`((?:paceline|\.?/?scripts/)[^`\n]*)`", FENCE.sub("", text))
    lines = [line.strip() for line in [*blocks.splitlines(), *spans]]
    return [shlex.split(line, comments=True) for line in lines if line and not line.startswith("#")]


def check(words: list[str]) -> None:
    command: Any = get_command(app)
    for i, word in enumerate(words):
        inner = getattr(command, "commands", {})
        if inner:
            assert word in inner, f"{word!r} in {' '.join(words)}"
            command = inner[word]
        elif word.startswith("-") and " " not in word:  # with one it is a value: options of another program
            known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
            assert word.split("=")[0] in known, f"{word} in {' '.join(words)}"
        elif i == 0:
            raise AssertionError(words)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_and_option_is_there(name: str) -> None:
    commands = typed((ROOT / name).read_text())
    own = [c[1:] for c in commands if c and Path(c[0]).name == "paceline" and len(c) > 1]
    assert name != "README.md" or len(own) > 10, "the document names commands: this test looks past them"
    for words in own:
        check(words)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_script_is_there(name: str) -> None:
    for words in typed((ROOT / name).read_text()):
        if re.match(r"\.?/?scripts/", words[0]):
            assert (ROOT / words[0].removeprefix("./")).exists(), words[0]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_output_is_shown_that_nobody_checks(name: str) -> None:
    """Blocks are what one types, a program that a test runs, or a drawing."""
    for kind, body in FENCE.findall((ROOT / name).read_text()):
        assert kind in ("sh", "python", "mermaid"), body


def test_a_wrong_option_would_be_noticed() -> None:
    check(["chat", "--local"])
    for words in (["chat", "--colour"], ["chatter"], ["bench", "rtt", "--no-such"]):
        with pytest.raises(AssertionError):
            check(words)
