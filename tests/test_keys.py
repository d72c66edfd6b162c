"""Bearer keys: who is let in, and what a wrong file says."""

import os
from pathlib import Path

import pytest
from paceline.cloud.keys import KeyFileError, Keys, read_keys

LAPTOP, PI = "a" * 20, "b" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"# who   key\nlaptop {LAPTOP}\n\n  pi\t{PI}\n")
    return file


def test_a_known_key_has_a_name_and_nothing_else_has(path: Path) -> None:
    keys = Keys(path)
    assert keys.name_of(f"Bearer {LAPTOP}") == "laptop"
    assert keys.name_of(f"bearer  {PI}") == "pi"
    for wrong in (
        None,
        "",
        "Bearer",
        f"Basic {LAPTOP}",
        f"Bearer {LAPTOP}x",
        f"Bearer {LAPTOP[:-1]}",
        "Bearer \u00e9" * 3,
    ):
        assert keys.name_of(wrong) is None


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(path: Path) -> None:
    keys = Keys(path)
    path.write_text(f"pi {PI}\n")
    os.utime(path, ns=(1, 1))
    assert keys.name_of(f"Bearer {LAPTOP}") is None
    assert keys.name_of(f"Bearer {PI}") == "pi"
    path.write_text("pi\n")
    assert keys.name_of(f"Bearer {PI}") == "pi"
    assert "line 1" in keys.error
    path.unlink()
    assert keys.name_of(f"Bearer {PI}") == "pi"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("laptop\n", "line 1: a line is a name and a key"),
        ("laptop short\n", "line 1: the key of 'laptop' is shorter"),
        (f"a {LAPTOP}\na {PI}\n", "line 2: 'a' has a key already"),
        ("# nothing\n", "holds no keys"),
    ],
)
def test_a_wrong_file_names_the_line_and_shows_no_key(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(KeyFileError, match=says) as caught:
        read_keys(file)
    assert LAPTOP not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="none"):
        Keys(tmp_path / "none")
