"""Which verifier a command was told to use, and what the device needs to work with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.protocol.errors import LinkError, PacelineError

if TYPE_CHECKING:
    from paceline.edge.runtime import Settings
    from paceline.edge.websocket import Address


@dataclass(frozen=True)
class Place:
    """Where a verifier is, and the files of the device's side. `draft` None: nothing is drafted."""

    addresses: "tuple[Address, ...]"
    vocabulary: Path
    draft: Path | None


def settings_of(
    place: Place, threads: int | None, round_trip: float, attempts: int | None, provider: str | None
) -> "Settings":
    """What an agent on this machine needs there; see `Settings`."""
    from functools import partial

    from paceline.edge.runtime import Settings
    from paceline.scripts.models import cache_folder
    from paceline.scripts.pairs import ngrams_of

    return Settings(
        place.addresses,
        place.vocabulary,
        place.draft,
        cache_folder(),
        threads,
        round_trip,
        attempts,
        provider=provider,
        ngrams=partial(ngrams_of, draft=place.draft),
    )


@dataclass(frozen=True)
class Choice:
    """What was given on the command line; see `options` for the fields."""

    urls: Sequence[str]
    key: str | None
    insecure: bool
    authority: Path | None
    certificate: Path | None
    local: bool
    pair: str
    target: str | None
    draft: str | None
    threads: int | None
    verify_floor: float
    drafts: bool = True
    remembered: bool = False  # go on with the vocabulary of the last time while the verifier is away
    alone: bool = False  # or with the draft's own, as the draft may have to answer alone


@contextmanager
def verifier(choice: Choice) -> Iterator[Place]:
    """The verifier that was named, or one started on this machine for as long as the block runs. Raises PacelineError."""
    from paceline.edge.websocket import Address
    from paceline.quant.landing import disk_errors
    from paceline.scripts.local import local_verifier
    from paceline.scripts.models import cache_folder
    from paceline.scripts.pairs import files_of, vocabulary_of

    if bool(choice.urls) == choice.local:
        raise PacelineError("say where the verifier is: --url ws://host:port, or --local to start one here")
    with disk_errors(cache_folder()):
        cache_folder().mkdir(parents=True, exist_ok=True)
    if choice.urls:
        yield _elsewhere(choice)
        return
    files = files_of(choice.pair, choice.target, choice.draft)
    arguments = ["--model", str(files.target), "--verify-floor", str(choice.verify_floor)]
    arguments += ["--threads", str(choice.threads)] if choice.threads else []
    with local_verifier(arguments) as url:
        yield Place((Address(url),), vocabulary_of(files.target), files.draft)


def _elsewhere(choice: Choice) -> Place:
    from paceline.edge.vocabulary_cache import vocabulary_file
    from paceline.edge.websocket import Address
    from paceline.scripts.models import cache_folder
    from paceline.scripts.pairs import draft_of, vocabulary_beside

    secrets = (choice.key, choice.insecure, choice.authority, choice.certificate)
    addresses = tuple(Address(url, *secrets) for url in choice.urls)
    draft = draft_of(choice.pair, choice.draft) if choice.drafts else None
    try:
        vocabulary = vocabulary_file(addresses, cache_folder(), remembered=choice.remembered or choice.alone)
    except LinkError:
        if draft is None or not choice.alone:
            raise
        vocabulary = vocabulary_beside(choice.pair, choice.draft)
    return Place(addresses, vocabulary, draft)
