"""PROTOCOL.md names every message, field, limit and code there is, and its examples are the golden frames."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from paceline.protocol import messages
from paceline.protocol.errors import FATAL, HARMLESS, RETRYABLE, Code
from paceline.protocol.messages import FROM_CLOUD, FROM_EDGE
from paceline.protocol.sampling import Sampling

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "protocol" / "PROTOCOL.md").read_text()
LIMITS = [name for name in dir(messages) if name.startswith("MAX_")] + ["NODE_WINDOW"]


def section(number: int) -> str:
    return DOCUMENT.split(f"\n## {number}. ")[1].split("\n## ")[0]


@pytest.mark.parametrize("kind", [*FROM_EDGE, *FROM_CLOUD])
def test_every_message_and_field_is_specified(kind: str) -> None:
    part = section(2 if kind in FROM_EDGE else 3)
    entry = part.split(f"**`{kind}`**")
    assert len(entry) == 2, f"{kind} has one entry"
    text = re.split(r"\*\*`", entry[1])[0]
    for field in msgspec.structs.fields((FROM_EDGE | FROM_CLOUD)[kind]):
        assert f"`{field.name}`" in text, f"{kind}.{field.name}"


def test_no_field_is_specified_that_does_not_exist() -> None:
    known = {f.name for kind in (FROM_EDGE | FROM_CLOUD).values() for f in msgspec.structs.fields(kind)}
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", section(2) + section(3), re.MULTILINE)
    assert rows
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} <= known


def test_every_sampling_field_and_its_default_is_specified() -> None:
    for field in msgspec.structs.fields(Sampling):
        (row,) = (
            line for line in section(6).splitlines() if line.startswith("|") and f"`{field.name}`" in line.split("|")[1]
        )
        default = row.split("|")[3].strip()
        assert default.startswith(str(field.default).rstrip("0").rstrip(".") or "0") or field.default in (False, ())


@pytest.mark.parametrize("name", LIMITS)
def test_every_limit_is_specified_with_its_number(name: str) -> None:
    (row,) = (line for line in DOCUMENT.splitlines() if line.startswith(f"| `{name}`"))
    assert f"{getattr(messages, name):,}" in row


@pytest.mark.parametrize("code", list(Code))
def test_every_code_is_specified(code: Code) -> None:
    (row,) = (line for line in section(7).splitlines() if line.startswith(f"| `{code}` |"))
    _, _, _, ends, retry, _ = row.split("|")
    assert (retry.strip() == "yes") == (code in RETRYABLE)
    assert ("connection" in ends) == (code in FATAL)
    if code in HARMLESS:
        assert ends.strip() == "nothing"


def test_no_code_is_specified_that_does_not_exist() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", section(7), re.MULTILINE)) == {str(c) for c in Code}


def test_the_examples_are_golden_frames() -> None:
    golden = {v["hex"] for v in json.loads((ROOT / "tests" / "vectors" / "frames.json").read_text())["good"]}
    examples = re.findall(r"(?:^[0-9a-f]{20,}\n)+", section(4), re.MULTILINE)
    assert len(examples) == 2
    assert {e.replace("\n", "") for e in examples} <= golden


def test_every_code_is_raised_somewhere_or_belongs_to_the_server() -> None:
    source = "".join(p.read_text() for p in (ROOT / "protocol").glob("*.py") if p.name != "errors.py")
    servers = {
        "VERSION",
        "VOCABULARY",
        "UNKNOWN_SESSION",
        "DUPLICATE_SESSION",
        "SESSION_LIMIT",
        "RATE_LIMIT",
        "IDLE",
        "OVERLOADED",
        "ENGINE",
        "INTERNAL",
    }
    for code in Code:
        assert f"Code.{code.name}" in source or code.name in servers, code
