"""A file from the network, resumable and checked.

Knows ranges, hashes and part files; knows nothing about packages or models. An interrupted download leaves
`<name>.part`, which the next one goes on from; only a file whose SHA-256 is right gets its final name.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from paceline.protocol.errors import PacelineError
from paceline.quant.landing import disk_errors, settle

if TYPE_CHECKING:
    import requests  # 7 MB, which an agent whose models are there never needs

#: Called with (bytes there, bytes in all), both of one file.
Report = Callable[[int, int], None]

_CHUNK = 1 << 20
_TIMEOUT = (20.0, 60.0)  # seconds to connect, seconds of silence
_TRIES = 4  # in a row without a byte of progress


class DownloadError(PacelineError):
    """A file cannot be fetched, or is not the one that was asked for."""


class RefusedError(DownloadError):
    """The server, its certificate or a proxy said no; another client may have what is asked for."""


def silent(done: int, total: int) -> None:
    """The `Report` for nobody."""


def download(
    url: str, target: Path, *, sha256: str, session: "requests.Session", size: int, report: Report = silent
) -> None:
    """Fetch `url` to `target` (`size` bytes); go on where an earlier try was cut.

    Raises `DownloadError` when the server cannot be reached, refuses, or serves another file, and `DiskError`.
    """
    part = target.with_name(target.name + ".part")
    with disk_errors(target.parent, needed=size - held(part)):
        target.parent.mkdir(parents=True, exist_ok=True)
        resumed = held(part) > 0
        _fill(url, part, session, size, report)
        try:
            check(part, sha256)
        except DownloadError:
            part.unlink()
            if not resumed:
                raise
            _fill(url, part, session, size, report)  # the old part was of another file: once more from the start
            check(part, sha256)
        settle(part, target)


def held(part: Path) -> int:
    """Bytes of a part file that are there already."""
    return part.stat().st_size if part.exists() else 0


def check(path: Path, sha256: str) -> None:
    """Raise `DownloadError` when the SHA-256 of `path` is not `sha256`."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise DownloadError(
            f"{path.name.removesuffix('.part')} is not the expected file (SHA-256 {found}, expected {sha256}). "
            "Try again; if it stays so, the mirror that pip uses serves another file."
        )


def _fill(url: str, part: Path, session: "requests.Session", size: int, report: Report) -> None:
    """Bring `part` to `size` bytes, over as many connections as it takes while they bring anything."""
    import requests

    idle = 0
    while (before := held(part)) != size:
        if before > size:
            part.unlink()
        try:
            _append(url, part, session, size, report)
        except (requests.exceptions.SSLError, requests.exceptions.ProxyError) as error:
            raise RefusedError(f"No trusted way to {_host(url)}: {_cause(error)}.") from error
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            idle = 0 if held(part) > before else idle + 1
            if idle == _TRIES:
                raise DownloadError(f"Cannot reach {_host(url)}: {_cause(error)}. Run it again to go on.") from error
        else:
            idle = 0 if held(part) > before else idle + 1
            if idle == _TRIES:
                raise DownloadError(
                    f"{_host(url)} keeps ending early, after {before:,} of {size:,} bytes. Run it again."
                )


def _append(url: str, part: Path, session: "requests.Session", size: int, report: Report) -> None:
    """One connection: ask for the rest, and take what comes, never more than `size` bytes in all."""
    import requests

    done = held(part)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    with session.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as reply:
        if reply.status_code >= 500:
            raise requests.ConnectionError(f"status {reply.status_code}")
        if reply.status_code not in (200, 206):
            raise RefusedError(
                f"{_host(url)} refused {part.name.removesuffix('.part')}: {reply.status_code} {reply.reason}."
            )
        if reply.status_code == 200 or not reply.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            if reply.status_code == 206:
                raise RefusedError(f"{_host(url)} answered another range than asked for.")
            done = 0  # the server knows no ranges: from the start
        with part.open("ab" if done else "wb") as file:
            for chunk in reply.iter_content(_CHUNK):
                file.write(chunk[: size + 1 - done])  # one byte too many is enough to know that it is another file
                done += len(chunk)
                report(min(done, size), size)
                if done > size:
                    raise DownloadError(f"{_host(url)} serves another file than expected: over {size:,} bytes.")


def _host(url: str) -> str:
    return urlsplit(url).hostname or url


def _cause(error: Exception) -> str:
    inner = getattr(error.args[0] if error.args else error, "reason", error)
    return str(inner).rsplit(": ", 1)[-1]
