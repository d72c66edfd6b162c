"""A file lands whole or not at all.

Knows how a file comes to its place (written beside it, synced, renamed) and what a full or read-only disk looks like.
Knows nothing about what is written.
"""

import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.protocol.errors import PacelineError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST})


class DiskError(PacelineError):
    """The disk is full or may not be written."""


@contextmanager
def landing(target: Path, *, needed: int = 0) -> Iterator[Path]:
    """Yield a path beside `target` to write to; leaving without an error makes it `target`, an error removes it.

    `needed` is how many bytes will be written at most, as far as known. Raises `DiskError`.
    """
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    with disk_errors(target.parent, needed):
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        try:
            yield part
            settle(part, target)
        finally:
            part.unlink(missing_ok=True)


def settle(part: Path, target: Path) -> None:
    """Make the written `part` durable and rename it to `target`, so that a name always means a whole file."""
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(target)
    if os.name == "posix":  # the rename itself lies in the folder; other systems cannot open one
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _sweep(target: Path) -> None:
    """Remove what killed processes left beside `target`; their numbers are in the names."""
    for part in target.parent.glob(f"{glob.escape(target.name)}.*.part"):
        number = part.name.split(".")[-2]
        if os.name == "posix" and number.isdecimal() and not _alive(int(number)):
            part.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def disk_errors(folder: Path, needed: int = 0) -> Iterator[None]:
    """Turn the operating system's errors about a full or closed disk into a `DiskError` that names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise full(folder, needed) from error
        if error.errno in _REFUSED:
            raise DiskError(
                f"Cannot write to {folder}: {error.strerror}. Choose another folder or its permissions."
            ) from error
        raise


def require_space(folder: Path, needed: int) -> None:
    """Raise `DiskError` when `folder`, or where it will be made, has fewer than `needed` bytes free."""
    if shutil.disk_usage(_existing(folder)).free < needed:
        raise full(folder, needed)


def full(folder: Path, needed: int) -> DiskError:
    """The error for a disk that cannot take `needed` more bytes in `folder`."""
    free = shutil.disk_usage(_existing(folder)).free
    wants = f"{needed:,} bytes are needed" if needed else "the file does not fit"
    return DiskError(
        f"The disk is full, or a limit was reached, at {folder}: {wants}, {free:,} are free. "
        "Make room there, or set PACELINE_CACHE to another folder."
    )


def _existing(folder: Path) -> Path:
    return folder if folder.exists() or folder == folder.parent else _existing(folder.parent)
