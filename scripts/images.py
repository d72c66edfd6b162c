"""python -m paceline.scripts.images cloud edge: run the Dockerfiles' steps in clean Debian roots, where no container engine is.

Needs root on Linux and debootstrap. Every instruction is carried out in order: stages are folders, RUN is a chroot, COPY takes
what git does not ignore of this tree. Then the image is put to use as its entry point says, as its user: it names its
version; the verifier serves, its health check passes, and SIGTERM ends it. What a container engine adds (namespaces, layers,
other architectures) is not checked.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.protocol.errors import PacelineError

TREE = Path(__file__).resolve().parent.parent
FILES = {"cloud": "cloud/Dockerfile", "edge": "edge/Dockerfile"}
MIRROR = "http://deb.debian.org/debian"
PYTHON_IMAGE = re.compile(r"python:3\.11-slim-(\w+)$")  # a Debian whose own Python is that version
PACKAGES = "python3,python3-venv,ca-certificates"
PASSED = (
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_DEFAULT_TIMEOUT",
    "CMAKE_BUILD_PARALLEL_LEVEL",
    "https_proxy",
    "no_proxy",
)
TRUST = "/etc/ssl/certs/ca-certificates.crt"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Stage:
    """One stage: its root folder and what its instructions have set so far."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0"
    entry: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def fill(self, text: str) -> str:
        """With variables put in, as Docker does outside of RUN."""
        known = self.arguments | self.environment
        return re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda m: known.get(m[1] or m[2], ""), text)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Name and rest of each instruction; lines that go on are joined, comments dropped."""
    kept = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(kept)).splitlines():
        name, _, rest = line.strip().partition(" ")
        yield name.upper(), rest.strip()


class Build:
    """Carries out one Dockerfile below `work`."""

    def __init__(self, work: Path, arguments: dict[str, str], mirror: str = MIRROR) -> None:
        self._work, self._given, self._mirror = work, arguments, mirror
        self._stages: list[tuple[str, Stage]] = []

    def run(self, text: str) -> Stage:
        """The last stage. Raises PacelineError at the first step that fails, naming it."""
        for name, rest in instructions(text):
            print(f"  {name} {rest[:110]}", flush=True)
            if name == "FROM":
                self._begin(rest)
            elif not self._stages:
                raise PacelineError(f"{name} stands before FROM")
            else:
                self._do(self._stages[-1][1], name, rest)
        return self._stages[-1][1]

    def _begin(self, rest: str) -> None:
        image, _, name = rest.partition(" AS ")
        found = PYTHON_IMAGE.match(image)
        if found is None:
            raise PacelineError(f"FROM {image}: only Debian's own Python 3.11 can stand for an image here")
        root = self._work / f"stage{len(self._stages)}"
        base = self._base(found[1])
        _checked(["cp", "-a", str(base), str(root)], "copying the base")
        self._stages.append((name, Stage(root)))

    def _base(self, suite: str) -> Path:
        base = self._work.parent / f"base-{suite}"
        if not (base / "done").exists():
            shutil.rmtree(base, ignore_errors=True)
            command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(base), self._mirror]
            _checked(command, "debootstrap")
            (base / "usr/local/bin/python").symlink_to("/usr/bin/python3")
            shutil.copy(TRUST, base / TRUST[1:])  # a company's network may have an authority of its own
            (base / "done").touch()
        return base

    def _do(self, stage: Stage, name: str, rest: str) -> None:
        match name:
            case "ARG":
                key, _, value = rest.partition("=")
                stage.arguments[key] = self._given.get(key, value)
            case "ENV":
                stage.environment |= dict(p.split("=", 1) for p in shlex.split(stage.fill(rest)))
            case "WORKDIR":
                stage.folder = stage.fill(rest)
                (stage.root / stage.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "RUN":
                done = subprocess.run(inside(stage, ["/bin/sh", "-c", rest]), env=_environment(stage), check=False)
                if done.returncode:
                    raise PacelineError(f"RUN {rest[:100]}: status {done.returncode}")
            case "COPY":
                self._copy(stage, shlex.split(stage.fill(rest)))
            case "USER":
                stage.user = rest
            case "ENTRYPOINT" | "CMD":
                setattr(stage, "entry" if name == "ENTRYPOINT" else "command", json.loads(rest))
            case "HEALTHCHECK":
                stage.health = json.loads(rest.partition("CMD ")[2])
            case "VOLUME" | "EXPOSE" | "STOPSIGNAL":
                pass  # told to the engine alone
            case _:
                raise PacelineError(f"{name} is not an instruction that is known here")

    def _copy(self, stage: Stage, words: Sequence[str]) -> None:
        source = TREE
        if words[0].startswith("--from="):
            source, words = dict(self._stages)[words[0].removeprefix("--from=")].root, words[1:]
        *names, to = words
        goal = stage.root / os.path.join(stage.folder, to).lstrip("/")
        for name in names:
            _copy(source, name.lstrip("/"), goal / Path(name).name if len(names) > 1 or to.endswith("/") else goal)


def _copy(source: Path, name: str, goal: Path) -> None:
    """A file or a folder's contents; of this tree what git does not ignore, new files too."""
    found = source / name if name != "." else source
    if not found.exists():
        raise PacelineError(f"COPY {name}: there is no such file")
    goal = goal if not goal.is_dir() or found.is_dir() else goal / found.name
    goal.parent.mkdir(parents=True, exist_ok=True)
    if source != TREE:
        _checked(["cp", "-a", "--", f"{found}/." if found.is_dir() else str(found), str(goal)], "COPY")
        return
    known = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", name]
    listed = subprocess.run(known, cwd=TREE, capture_output=True, check=True).stdout
    for file in filter(None, listed.decode().split("\0")):
        if not (TREE / file).exists():  # deleted, and git does not know yet
            continue
        to = goal / Path(file).relative_to(name) if found.is_dir() else goal
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / file, to)


def inside(stage: Stage, command: Sequence[str], *more: str) -> list[str]:
    """The command line that runs `command` in the stage, as its user, with a /proc and /dev of its own."""
    setup = 'mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && cp /etc/resolv.conf "$1/etc/" && ip link set lo up'
    go = 'exec chroot --userspec="$2" "$1" /bin/sh -c \'cd "$0" && exec "$@"\' "$3" "${@:4}"'
    user = f"{stage.user}:{stage.user}"
    script = f"{setup} && {go}"
    unshared = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *more, "bash", "-c", script, "inside"]
    return [*unshared, str(stage.root), user, stage.folder, *command]


def _environment(stage: Stage) -> dict[str, str]:
    host = {name: os.environ[name] for name in PASSED if name in os.environ}
    return host | {"HOME": "/tmp", "DEBIAN_FRONTEND": "noninteractive"} | stage.arguments | stage.environment


def _checked(command: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as e:
        raise PacelineError(f"{what}: {command[0]} cannot be run ({e.strerror})") from None
    if done.returncode:
        raise PacelineError(f"{what}: {(done.stderr or done.stdout).strip()[-400:]}")


# ---- put to use


def _said(stage: Stage, command: Sequence[str], *more: str) -> "subprocess.CompletedProcess[str]":
    """Run the command as the image's user, and keep what it says."""
    return subprocess.run(
        inside(stage, command, *more), env=_environment(stage), capture_output=True, text=True, check=False
    )


def name_version(stage: Stage) -> str:
    """What `--version` says, run by the entry point's program as the image's user."""
    done = _said(stage, [stage.entry[0], "--version"])
    if done.returncode:
        raise PacelineError(f"{stage.entry[0]} --version: {done.stderr.strip()[-400:]}")
    return done.stdout.strip()


def serve_and_end(stage: Stage) -> None:
    """Start the verifier with a target that needs no model, ask its health check, and end it with SIGTERM."""
    stage.environment["PACELINE_CLOUD_ENGINE"] = "toy"
    script = (
        f"{shlex.join(stage.entry)} & pid=$!; "
        f"for i in $(seq 120); do sleep 1; if {shlex.join(stage.health)}; then kill -TERM $pid; wait $pid; exit $?; fi; done; "
        "exit 99"
    )
    begin = time.monotonic()
    done = _said(stage, ["/bin/sh", "-c", script], "--net")
    if done.returncode:
        raise PacelineError(f"serving ended with status {done.returncode}: {done.stderr.strip()[-600:]}")
    print(f"  served, was healthy and ended in {time.monotonic() - begin:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", nargs="+", choices=sorted(FILES))
    parser.add_argument("--work", type=Path, default=Path("/var/tmp/paceline-images"), help="folder of the roots")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--mirror", default=MIRROR)
    parser.add_argument("--keep", action="store_true", help="leave the roots of the stages")
    given = parser.parse_args()
    if os.geteuid() or shutil.which("debootstrap") is None:
        print("paceline: this needs root and debootstrap (apt-get install debootstrap)", file=sys.stderr)
        return 1
    arguments = dict(a.split("=", 1) for a in given.build_arg)
    for image in given.images:
        work = given.work / image
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            _check(image, Build(work, arguments, given.mirror))
        except PacelineError as e:
            print(f"paceline: {FILES[image]}: {e}", file=sys.stderr)
            return 1
        finally:
            if not given.keep:
                shutil.rmtree(work, ignore_errors=True)
    return 0


def _check(image: str, build: Build) -> None:
    begin = time.monotonic()
    print(FILES[image], flush=True)
    stage = build.run((TREE / FILES[image]).read_text())
    print(f"  built in {time.monotonic() - begin:.0f} s; {name_version(stage)}", flush=True)
    if stage.health:
        serve_and_end(stage)


if __name__ == "__main__":
    sys.exit(main())
