"""The whole closure of an installation for aarch64, resolved by pip: what is a wheel there, and what is built from source.

Knows pyproject.toml and pip's dry run; installs nothing. Only the packages of `BUILT` may be built on the device: they need
nothing there but a compiler and cmake.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from paceline.protocol.errors import PacelineError
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
BUILT = ("llama-cpp-python",)  # by cmake, for the very CPU it will run on
LIBC = (17, 24, 26, 27, 28, 31, 34, 35)  # minor versions of glibc 2 that wheels name, up to JetPack 6's and Debian 12's
PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in LIBC), "linux_aarch64")
_NAME = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


@dataclass(frozen=True)
class Package:
    """`tag`: of the wheel that would be installed; empty where it is built from source."""

    name: str
    version: str
    tag: str


def declared(extra: str, project: Path = ROOT / "pyproject.toml") -> list[str]:
    """What `paceline[extra]` requires by itself. Raises PacelineError if there is no such extra."""
    about = tomllib.loads(project.read_text())["project"]
    extras: Mapping[str, list[str]] = about["optional-dependencies"]
    if extra not in extras:
        raise PacelineError(f"there is no extra {extra!r}; there are {', '.join(extras)}")
    return [*about["dependencies"], *extras[extra]]


def closure(requirements: Sequence[str], python: str, index: Sequence[str] = ()) -> list[Package]:
    """Every package of an installation on aarch64 Linux. `index`: arguments for pip. Raises PacelineError naming what lacks."""
    built = [r for r in requirements if name_of(r) in BUILT]
    sources = [item for requirement in built for item in _source(requirement, index)]
    wanted = [r for r in requirements if r not in built]
    wanted += [r for item in sources for r in item["metadata"].get("requires_dist", ()) if "extra ==" not in r]
    wheels = list[dict[str, Any]]()
    while lacking := wanted if not wheels else _lacking([*sources, *wheels], python):
        wanted = list(dict.fromkeys([*wanted, *lacking]))
        wheels = _dry_run(["--only-binary", ":all:", *target(python), *index], wanted)
    found = [Package(i["metadata"]["name"], i["metadata"]["version"], "") for i in sources]
    found += [Package(i["metadata"]["name"], i["metadata"]["version"], tag_of(i)) for i in wheels]
    return sorted(found, key=lambda p: p.name.lower())


def name_of(requirement: str) -> str:
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[1]).lower()


def tag_of(item: Mapping[str, Any]) -> str:
    """The platform part of a wheel's name, from an item of pip's report."""
    return str(item["download_info"]["url"]).rsplit("/", 1)[-1].removesuffix(".whl").rsplit("-", 1)[-1]


def _lacking(items: Sequence[Mapping[str, Any]], python: str) -> list[str]:
    """What the device needs besides: pip decides `; platform_machine == ...` by the machine it runs on."""
    device = {
        **{"python_version": python, "python_full_version": f"{python}.0", "implementation_name": "cpython"},
        **{"platform_machine": "aarch64", "platform_system": "Linux", "sys_platform": "linux", "os_name": "posix"},
        **{"platform_python_implementation": "CPython", "extra": ""},
    }
    there = {name_of(item["metadata"]["name"]) for item in items}
    needed = [Requirement(r) for item in items for r in item["metadata"].get("requires_dist", ())]
    needed = [r for r in needed if r.marker is not None and r.marker.evaluate(device)]
    return [f"{r.name}{r.specifier}" for r in needed if name_of(r.name) not in there]


def _source(requirement: str, index: Sequence[str]) -> list[dict[str, Any]]:
    return _dry_run(["--no-deps", "--no-binary", name_of(requirement), *index], [requirement])


def target(python: str) -> list[str]:
    tags = [part for platform in PLATFORMS for part in ("--platform", platform)]
    return ["--python-version", python, "--implementation", "cp", *tags]


def _dry_run(arguments: Sequence[str], requirements: Sequence[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:  # pip wants a target for another platform, and leaves it empty
        command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "install", "--quiet"]
        command += ["--dry-run", "--ignore-installed", "--report", "-", "--target", folder, *arguments, *requirements]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise PacelineError(_said(done.stderr))
    items: list[dict[str, Any]] = json.loads(done.stdout)["install"]
    return items


def _said(errors: str) -> str:
    """pip's verdict: the package that has no wheel, or else its own words."""
    if missing := re.search(r"No matching distribution found for (.+)", errors):
        return f"{missing[1].strip()} has no wheel for aarch64 and is not among what may be built there"
    lines = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line.startswith("ERROR:")]
    return f"pip cannot resolve it: {lines[-1] if lines else errors.strip()[-300:] or 'no reason given'}"


def main(
    extra: Annotated[str, typer.Option(help="Which installation: edge, cloud-llamacpp, ...")] = "edge",
    python: Annotated[str, typer.Option(help="Python of the device.")] = "3.11",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Resolve `paceline[extra]` for aarch64 Linux; exit status 1 if a package exists there neither as wheel nor as source."""
    try:
        found = closure(declared(extra), python)
    except PacelineError as e:
        typer.echo(f"paceline: {e}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"extra": extra, "python": python, "packages": [asdict(p) for p in found]}))
        return
    for p in found:
        typer.echo(f"{p.name:24}{p.version:14}{'wheel ' + p.tag if p.tag else 'built from source'}")
    built = [p.name for p in found if not p.tag]
    pure = sum(p.tag == "any" for p in found)
    typer.echo(f"{len(found)} packages for Python {python}: {pure} pure, {len(found) - pure - len(built)} aarch64 wheels, "
               f"built there: {', '.join(built) or 'none'}")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
