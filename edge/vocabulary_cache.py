"""The target's vocabulary on a device that has no target: fetched from the verifier once, kept by fingerprint."""

import hashlib
from pathlib import Path

from paceline.edge.text import Text
from paceline.edge.websocket import ask_model, fetch_vocabulary
from paceline.protocol.errors import LinkError, PacelineError


def vocabulary_file(url: str, cache: Path, *, remembered: bool = False) -> Path:
    """The vocabulary of the verifier at `url`, from the cache if it was fetched before. Blocking.

    `remembered`: while the verifier cannot be reached, the vocabulary it had the last time will do; the link checks it
    when it comes up. Raises LinkError if the verifier cannot be reached or gives out something else, PacelineError if
    the disk is full.
    """
    note = cache / "vocabulary" / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.last"
    try:
        facts = ask_model(url)
    except LinkError:
        last = _last(note) if remembered else None
        if last is None:
            raise
        return last
    path = cache / "vocabulary" / f"{facts.fingerprint}.vocabulary"
    if not path.is_file():
        _keep(path, fetch_vocabulary(url))
    found = Text(path).vocabulary
    if found.fingerprint != facts.fingerprint:
        path.unlink()
        raise LinkError(f"{url}: the vocabulary it gives out is not that of its model {facts.model!r}")
    if _last(note) != path:
        _keep(note, path.name.encode())
    return path


def _last(note: Path) -> Path | None:
    """The vocabulary that `note` names, if both are there."""
    try:
        path = note.with_name(Path(note.read_text()).name)
    except (OSError, ValueError):
        return None
    return path if path.is_file() else None


def _keep(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(path)
    except OSError as e:
        part.unlink(missing_ok=True)
        raise PacelineError(f"cannot keep the vocabulary in {path.parent}: {e.strerror or e}") from None
