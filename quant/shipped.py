"""The drafts that come with the package, and putting one in place beside its target. No torch needed.

A shipped draft is `drafts/<name>/`: draft.json, and either draft.gguf or draft.patch (`patch`), from which the draft's file is
made with the target's. The vocabulary is always made from the target's file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

from paceline.protocol.ngrams import Ngrams

from . import folder, patch
from .errors import DraftError
from .landing import landing
from .vocab import write_vocabulary

PATCH, NGRAMS = "draft.patch", "ngrams.npz"


def names() -> list[str]:
    """The shipped drafts."""
    here = files("paceline.quant") / "drafts"
    return sorted(entry.name for entry in here.iterdir() if (entry / folder.CARD).is_file()) if here.is_dir() else []


def card(name: str) -> folder.Card:
    """What the shipped draft `name` is: its recipe, evaluation and digests."""
    with as_file(files("paceline.quant") / "drafts" / name) as source:
        return folder.read_card(source)


def ngrams(fingerprint: str) -> Ngrams | None:
    """The table of n-grams that ships for targets of the vocabulary with this fingerprint, if there is one."""
    for name in names():
        with as_file(files("paceline.quant") / "drafts" / name) as source:
            if (source / NGRAMS).is_file() and folder.read_card(source).target["fingerprint"] == fingerprint:
                return Ngrams.load(source / NGRAMS)
    return None


def rebuild(name: str, target: Path, draft: Path) -> None:
    """Write the file of the shipped draft `name` alone, for the target's file. Raises `DraftError`."""
    with as_file(files("paceline.quant") / "drafts" / name) as source:
        _write(source, target, draft)


def install(
    name: str, target: Path, out: Path, step: Callable[[int, int], None] = lambda done, total: None
) -> folder.Card:
    """Make the draft folder `out` of the shipped draft `name` for the target's file; one already there and sound is left.

    Raises `DraftError` when there is no such draft, or `target` is not the file it was made for.
    """
    if name not in names():
        raise DraftError(f"No draft {name!r} comes with this package; there are: {', '.join(names()) or 'none'}.")
    with as_file(files("paceline.quant") / "drafts" / name) as source:
        if (out / folder.CARD).exists() and _same(source, out):
            return folder.verify(out)
        out.mkdir(parents=True, exist_ok=True)
        _write(source, target, out / folder.DRAFT, step)
        write_vocabulary(target, out / folder.VOCABULARY)
        shutil.copyfile(source / folder.CARD, out / folder.CARD)
    return folder.verify(out)


def _write(
    source: Path, target: Path, draft: Path, step: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """The draft's file, out of a folder that ships: as it is, or from its patch and the target's file."""
    if (source / PATCH).exists():
        patch.apply(source / PATCH, target, draft, step)
    else:
        with landing(draft, needed=(source / folder.DRAFT).stat().st_size) as part:
            shutil.copyfile(source / folder.DRAFT, part)


def _same(source: Path, out: Path) -> bool:
    """Whether `out` is already what `source` gives: the same card, every file in place."""
    if (source / folder.CARD).read_bytes() != (out / folder.CARD).read_bytes():
        return False
    try:
        folder.verify(out)
    except DraftError:
        return False
    return True
