"""The target's vocabulary on a device that has no target: fetched from the verifier once, kept by fingerprint."""

from collections.abc import Sequence
from pathlib import Path

from paceline.edge.text import Text
from paceline.edge.websocket import Address, ModelFacts, ask_model, fetch_vocabulary
from paceline.protocol.errors import LinkError, PacelineError


def vocabulary_file(addresses: Sequence[Address], cache: Path) -> Path:
    """The vocabulary of the first verifier that answers, from the cache if it was fetched before. Blocking.

    Raises LinkError if the verifier cannot be reached or gives out something else, PacelineError if the disk is full.
    """
    address, facts = _first_answer(addresses)
    path = cache / "vocabulary" / f"{facts.fingerprint}.vocabulary"
    if not path.is_file():
        _keep(path, fetch_vocabulary(address))
    found = Text(path).vocabulary
    if found.fingerprint != facts.fingerprint:
        path.unlink()
        raise LinkError(f"{address.url}: the vocabulary it gives out is not that of its model {facts.model!r}")
    return path


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
