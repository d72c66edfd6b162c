"""What the commands were given as target and draft, as files."""

from pathlib import Path

import typer
from paceline.protocol.errors import PacelineError
from paceline.scripts.models import Pair, cache_folder, pair_is_ready, resolve, resolve_pair
from paceline.scripts.progress import progress_bar


def files_of(pair: str, target: str | None, draft: str | None) -> Pair:
    """The files of a named pair, or of --target and --draft. Fetches and makes what is not there yet."""
    cache = cache_folder()
    if target is None and draft is None:
        if not pair_is_ready(pair, cache):
            typer.echo("Fetching the model and making its draft; this is done once.", err=True)
        with progress_bar(pair) as report:
            return resolve_pair(pair, cache, report)
    if target is None or draft is None:
        raise PacelineError("--target and --draft go together: a draft serves the target it was made for")
    with progress_bar(target) as report:
        found = resolve(target, cache, report)
    with progress_bar(draft) as report:
        return Pair(found, resolve(draft, cache, report))


def vocabulary_of(model: Path) -> Path:
    """The vocabulary-only GGUF of a model file, written into the cache once."""
    from paceline.quant.vocab import write_vocabulary

    stat = model.stat()
    path = cache_folder() / "vocabulary" / f"{model.stem}.{stat.st_size:x}.{stat.st_mtime_ns:x}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_vocabulary(model, path)
    return path
