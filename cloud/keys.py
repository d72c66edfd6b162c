"""Who may open a connection: bearer keys from a file, one a line, read again when the file changes.

    # name    key
    laptop    4f0c...

Names go into logs and limits, keys never do. A key is compared in constant time against every known one. Knows nothing about
sockets.
"""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.protocol.errors import PacelineError

LEAST_KEY = 16  # characters


class KeyFileError(PacelineError):
    """A key file cannot be read, or a line of it is wrong."""


@dataclass
class Keys:
    """The keys of `path`. A change that cannot be read leaves those known before in force; see `error`."""

    path: Path
    error: str = ""
    _known: Mapping[str, bytes] = field(default_factory=dict)
    _stamp: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self._stamp = self._stat()
        self._known = read_keys(self.path)

    def name_of(self, authorization: str | None) -> str | None:
        """The name whose key an Authorization header carries; None if it carries none that is known."""
        self._refresh()
        scheme, _, key = (authorization or "").partition(" ")
        given = key.strip().encode()
        found = None
        for name, known in self._known.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(given, known):
                found = name
        return found if scheme.lower() == "bearer" else None

    def _refresh(self) -> None:
        try:
            stamp = self._stat()
            if stamp != self._stamp:
                self._known, self._stamp, self.error = read_keys(self.path), stamp, ""
        except KeyFileError as e:
            self.error = str(e)

    def _stat(self) -> tuple[int, int]:
        try:
            stat = self.path.stat()
        except OSError as e:
            raise KeyFileError(f"{self.path}: {e.strerror or e}") from None
        return stat.st_mtime_ns, stat.st_size


def read_keys(path: Path) -> dict[str, bytes]:
    """Names and keys of a file. Raises KeyFileError, which names the line and never shows a key."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise KeyFileError(f"{path}: {getattr(e, 'strerror', None) or 'not a text file'}") from None
    keys: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r"\s*(\S+)\s+(\S+)\s*", line)
        if match is None:
            raise KeyFileError(f"{path}, line {number}: a line is a name and a key")
        name, key = match.groups()
        if len(key) < LEAST_KEY:
            raise KeyFileError(f"{path}, line {number}: the key of {name!r} is shorter than {LEAST_KEY} characters")
        if name in keys:
            raise KeyFileError(f"{path}, line {number}: {name!r} has a key already")
        keys[name] = key.encode()
    if not keys:
        raise KeyFileError(f"{path}: holds no keys, so nobody could connect")
    return keys
