"""The target's vocabulary on a device that has no target: fetched from the verifier once, kept by fingerprint."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from paceline.edge.text import Text
from paceline.edge.websocket import Address, ModelFacts, ask_model, fetch_vocabulary
from paceline.protocol.errors import LinkError, PacelineError


def vocabulary_file(addresses: Sequence[Address], cache: Path, *, remembered: bool = False) -> Path:
    """The vocabulary of the first verifier that answers, from the cache if it was fetched before. Blocking.

    `remembered`: while no verifier can be reached, the vocabulary that the first one had the last time will do; the link
    checks it when it comes up. Raises LinkError if none can be reached or one gives out something else, PacelineError if
    the disk is full.
    """
    try:
        address, facts = _first_answer(addresses)
    except LinkError:
        last = _last(_note(addresses[0], cache)) if remembered and addresses else None
        if last is None:
            raise
        return last
    path = cache / "vocabulary" / f"{facts.fingerprint}.vocabulary"
    if not path.is_file():
        _keep(path, fetch_vocabulary(address))
    text = Text(path)
    found = text.vocabulary
    text.close()
    if found.fingerprint != facts.fingerprint:
        path.unlink()
        raise LinkError(f"{address.url}: the vocabulary it gives out is not that of its model {facts.model!r}")
    if _last(note := _note(addresses[0], cache)) != path:
        _keep(note, path.name.encode())
    return path


def _note(address: Address, cache: Path) -> Path:
    """The file that says which vocabulary the verifier at an address had the last time."""
    return cache / "vocabulary" / f"{hashlib.sha256(address.url.encode()).hexdigest()[:16]}.last"


def _last(note: Path) -> Path | None:
    """The vocabulary that `note` names, if both are there."""
    try:
        path = note.with_name(Path(note.read_text()).name)
    except (OSError, ValueError):
        return None
    return path if path.is_file() else None


def _first_answer(addresses: Sequence[Address]) -> tuple[Address, ModelFacts]:
    failure = LinkError("no address of a verifier was given")
    for address in addresses:
        try:
            return address, ask_model(address)
        except LinkError as e:
            failure = e
    raise failure


def _keep(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(path)
    except OSError as e:
        part.unlink(missing_ok=True)
        raise PacelineError(f"cannot keep the vocabulary in {path.parent}: {e.strerror or e}") from None
