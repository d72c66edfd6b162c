"""Who may open a connection: bearer keys from a file, one a line, read again when the file changes.

    # name    key        what it may do, if not everything
    laptop    4f0c...
    fleet     91be...    connections=100 sessions=8 tokens_a_minute=60000 context=4096

Names go into logs and limits, keys never do. A key is compared in constant time against every known one. Knows nothing about
sockets.
"""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cloud.limits import Allowance
from paceline.protocol.errors import PacelineError

LEAST_KEY = 16  # characters
LIMITS = ("connections", "sessions", "tokens_a_minute", "context")


class KeyFileError(PacelineError):
    """A key file cannot be read, or a line of it is wrong."""


@dataclass
class Keys:
    """The keys of `path`. A change that cannot be read leaves those known before in force; see `error`."""

    path: Path
    error: str = ""
    _known: Mapping[str, tuple[bytes, Allowance]] = field(default_factory=dict)
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
        for name, (known, _) in self._known.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(given, known):
                found = name
        return found if scheme.lower() == "bearer" else None

    def allowance_of(self, name: str) -> Allowance:
        return self._known[name][1] if name in self._known else Allowance()

    def __len__(self) -> int:
        return len(self._known)

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


def read_keys(path: Path) -> dict[str, tuple[bytes, Allowance]]:
    """Names, keys and allowances of a file. Raises KeyFileError, which names the line and never shows a key."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise KeyFileError(f"{path}: {getattr(e, 'strerror', None) or 'not a text file'}") from None
    keys: dict[str, tuple[bytes, Allowance]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r"\s*(\S+)\s+(\S+)((?:\s+\S+=\S+)*)\s*", line)
        if match is None:
            raise KeyFileError(f"{path}, line {number}: a line is a name and a key, then limits like sessions=4")
        name, key, limits = match.groups()
        if len(key) < LEAST_KEY:
            raise KeyFileError(f"{path}, line {number}: the key of {name!r} is shorter than {LEAST_KEY} characters")
        if name in keys:
            raise KeyFileError(f"{path}, line {number}: {name!r} has a key already")
        keys[name] = key.encode(), _allowance(limits, f"{path}, line {number}")
    if not keys:
        raise KeyFileError(f"{path}: holds no keys, so nobody could connect")
    return keys


def _allowance(limits: str, where: str) -> Allowance:
    values: dict[str, int] = {}
    for part in limits.split():
        name, _, value = part.partition("=")
        if name not in LIMITS or name in values or not value.isdecimal() or int(value) < 1:
            raise KeyFileError(f"{where}: {name} is none of {', '.join(LIMITS)}, comes twice, or is no number above 0")
        values[name] = int(value)
    return Allowance(**values)
