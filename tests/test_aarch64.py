"""The closure for aarch64, with pip as it is, over an index of small packages in a folder."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from paceline.protocol.errors import PacelineError
from paceline.scripts.aarch64 import Package, closure, declared, name_of

Wheel = Callable[..., None]
ARM = "manylinux_2_28_aarch64"


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    """Puts a package into the index: a wheel with nothing in it but what it requires."""

    def write(name: str, tag: str, *requires: str) -> None:
        escaped = name.replace("-", "_")
        about = f"{escaped}-1.0.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        metadata += "".join(f"Requires-Dist: {r}\n" for r in requires)
        kind = "py3-none-any" if tag == "any" else f"cp311-cp311-{tag}"
        with zipfile.ZipFile(tmp_path / f"{escaped}-1.0-{kind}.whl", "w") as archive:
            archive.writestr(f"{about}/METADATA", metadata)
            archive.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {kind}\n")
            archive.writestr(f"{about}/RECORD", "")

    return write


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return ["--isolated", "--no-index", "--find-links", str(tmp_path)]


def test_wheels_and_what_they_need(wheel: Wheel, index: list[str]) -> None:
    wheel("pace-top", "any", "pace-fast>=1", "pace-never ; extra == 'more'")
    wheel("pace_fast", ARM)
    found = closure(["pace-top"], "3.11", index)
    assert set(found) == {Package("pace_fast", "1.0", ARM), Package("pace-top", "1.0", "any")}


def test_a_package_without_a_wheel_there_is_named(wheel: Wheel, index: list[str]) -> None:
    wheel("pace-top", "any", "pace-fast")
    wheel("pace_fast", "manylinux_2_28_x86_64")
    with pytest.raises(PacelineError, match=r"pace-fast( \(from pace-top\))? has no wheel for aarch64"):
        closure(["pace-top"], "3.11", index)


def test_what_only_the_device_needs_is_looked_at(wheel: Wheel, index: list[str]) -> None:
    """pip evaluates a marker on the machine it runs on; this one is about the machine that it is for."""
    wheel("pace-top", "any", "pace-arm ; platform_machine == 'aarch64'")
    with pytest.raises(PacelineError, match="pace-arm"):
        closure(["pace-top"], "3.11", index)
    wheel("pace_arm", ARM, "pace-deep ; platform_machine == 'aarch64'")
    wheel("pace_deep", "any")
    assert {p.name for p in closure(["pace-top"], "3.11", index)} == {"pace-top", "pace_arm", "pace_deep"}


def test_what_is_checked_is_what_the_project_declares() -> None:
    names = {name_of(r) for r in declared("edge")}
    assert {"numpy", "llama-cpp-python", "websockets", "uvicorn"} <= names
    assert "torch" not in names
    with pytest.raises(PacelineError, match="no extra 'pi'"):
        declared("pi")
