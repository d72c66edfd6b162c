"""What the commands were given as target and draft, as files."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from paceline.protocol.errors import PacelineError
from paceline.quant.folder import CARD, ONNX, VOCABULARY, model_name, verify
from paceline.scripts.catalogue import PAIRS
from paceline.scripts.models import Pair, cache_folder, pair_is_ready, resolve, resolve_pair
from paceline.scripts.progress import progress_bar

if TYPE_CHECKING:
    from paceline.cloud.backup import TopUp
    from paceline.cloud.engine import Engine
    from paceline.cloud.settings import Settings
    from paceline.protocol.ngrams import Ngrams


def files_of(pair: str, target: str | None, draft: str | None) -> Pair:
    """The files of a named pair, or of --target and --draft. Fetches and makes what is not there yet."""
    cache = cache_folder()
    if target is None and draft is None:
        if pair in PAIRS and not pair_is_ready(pair, cache):
            typer.echo("Fetching the model and making its draft; this is done once.", err=True)
        with progress_bar(pair) as report:
            return resolve_pair(pair, cache, report)
    if target is None or draft is None:
        raise PacelineError("--target and --draft go together: a draft serves the target it was made for")
    with progress_bar(target) as report:
        found = resolve(target, cache, report)
    return Pair(found, _draft_file(draft))


def draft_of(pair: str, draft: str | None) -> Path:
    """The draft alone, for a verifier elsewhere: the one given, or that of a named pair."""
    if draft is None:
        return files_of(pair, None, None).draft
    return _draft_file(draft)


def backup_of(target: str, draft: str | None) -> Path:
    """The draft that a verifier of `target` runs beside it: the one given, or that of the pair of this name."""
    if draft is None and target not in PAIRS:
        raise PacelineError(f"no draft is known for {target}: name one with --backup-draft")
    return draft_of(target, draft)


def backups_of(settings: "Settings", engine: "Engine") -> "list[TopUp]":
    """What drafts beside the target of a verifier with these settings. Raises PacelineError."""
    from paceline.cloud.serve import load_backup

    draft, table = partial(backup_of, settings.model, settings.backup_draft), partial(ngrams_of, given=settings.ngrams)
    return load_backup(settings, engine, draft, table)


def ngrams_of(fingerprint: str, draft: Path | None = None, given: Path | None = None) -> "Ngrams | None":
    """What the target of the vocabulary with this fingerprint is known to write: the file or folder that was given, or beside
    the draft, or as it ships; else None.

    Raises PacelineError for a table that is damaged, not there, or of another vocabulary.
    """
    from paceline.protocol.ngrams import Ngrams
    from paceline.quant import shipped

    path, whose = draft.with_name(shipped.NGRAMS) if draft is not None else None, "the draft beside it"
    if given is not None:
        path, whose = given / shipped.NGRAMS if given.is_dir() else given, "the target"
    elif path is None or not path.is_file():
        return shipped.ngrams(fingerprint)
    table = Ngrams.load(path)
    if table.vocabulary != fingerprint:
        raise PacelineError(f"{path} is of another vocabulary than {whose}: make it anew, or take it away.")
    return table


def vocabulary_beside(pair: str, draft: str | None) -> Path:
    """A vocabulary without asking a verifier: the named pair's target's, or the one that came with the draft."""
    if draft is None:
        return vocabulary_of(files_of(pair, None, None).target)
    found = _draft_file(draft)
    beside = found.with_name(VOCABULARY)
    return beside if beside.is_file() else vocabulary_of(found)


def _draft_file(draft: str) -> Path:
    """A draft by name, file, or the folder that `paceline draft` makes, which is checked; so is that of an ONNX file."""
    path = Path(draft).expanduser()
    folder = path.parent if path.name == ONNX else path
    if (folder / CARD).is_file():
        return folder / model_name(folder, verify(folder))
    if path.suffix == ".onnx":
        raise PacelineError(f"{draft} is not in a draft folder: make one with `paceline draft export --format onnx`")
    with progress_bar(draft) as report:
        return resolve(draft, cache_folder(), report)


def vocabulary_of(model: Path) -> Path:
    """The vocabulary alone of a model file or folder, written into the cache once."""
    from paceline.quant.landing import disk_errors
    from paceline.quant.vocab import write_vocabulary
    from paceline.quant.vocab_bundle import write_folder_vocabulary

    source = model / "tokenizer.json" if model.is_dir() else model
    if not source.is_file():
        raise PacelineError(f"{model} has no tokenizer.json: fetch the model's tokenizer files too")
    stat = source.stat()
    path = cache_folder() / "vocabulary" / f"{model.stem}.{stat.st_size:x}.{stat.st_mtime_ns:x}.vocabulary"
    if not path.is_file():
        with disk_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_folder_vocabulary(model, path) if model.is_dir() else write_vocabulary(model, path)
    return path
