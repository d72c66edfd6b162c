"""`paceline draft build` as a function: a target in, a draft folder and a report out."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import build as making
from . import distil, export, folder, store, vocab
from .decoder import EMBEDDING, Shape
from .errors import DraftError, RecipeError
from .grids import GRIDS, Q8_0
from .report import rounding_errors
from .requantise import Kind, requantise
from .student import Student
from .target import GgufTarget, Target, open_target, vocabulary
from .text import OwnText
from .trim import Trim, choose, rank_prior, special, trim, whole

CHECKPOINT = "training.pt"
BIG = 1_500_000_000  # parameters from which `auto` rounds plainly, tensor by tensor
HELD = 96  # conversations never trained or calibrated on, where there are many
Step = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    layers: str = "auto"
    vocab: str = "full"
    quant: str = "iq4_nl"
    table: str = "q8_0"
    neurons: int = 0
    rounding: str = "auto"
    conversations: int = 24
    calibration: int = 24
    sweeps: int = 1


def split(text: OwnText) -> tuple[np.ndarray, np.ndarray]:
    """Conversations to learn from and to hold out."""
    return text.split(min(HELD, max(1, len(text) // 6)))


def number(value: str, word: str, most: int, what: str) -> int:
    """An option that is a count or a word for all."""
    if value == word:
        return most
    try:
        count = int(value)
    except ValueError:
        raise RecipeError(f"--{what} is a number or `{word}`, not {value!r}.") from None
    if not 0 < count <= most:
        raise RecipeError(f"--{what} must lie between 1 and {most:,}; it is {count:,}.")
    return count


def chosen_layers(value: str, most: int) -> list[int] | None:
    """Layers named one by one ("0,1,8,29"); None where only a number of them is asked for."""
    if "," not in value:
        return None
    try:
        named = [int(n) for n in value.split(",")]
    except ValueError:
        raise RecipeError(f"--layers is a number, `auto`, or layers by number (0,1,8), not {value!r}.") from None
    if named != sorted(set(named)) or not 0 <= named[0] <= named[-1] < most:
        raise RecipeError(f"--layers must name layers 0 to {most - 1} in ascending order, each once; it says {value}.")
    return named


def build(
    path: Path,
    out: Path,
    options: Options,
    text_file: Path | None = None,
    cache: Path | None = None,
    step: Step = lambda d, t: None,
) -> dict[str, Any]:
    """Make the draft folder `out` for the target at `path`; returns the report. Raises `WeightsError` or `RecipeError`."""
    began = time.monotonic()
    target = open_target(path)
    s, rows = target.shape, target.extents(EMBEDDING)[0]
    named = chosen_layers(options.layers, s.layers)
    layers = len(named) if named else number(options.layers, "auto", s.layers, "layers")
    kept = number(options.vocab, "full", rows, "vocab")
    corrected = options.rounding == "corrected" or (
        options.rounding == "auto" and parameters(target) < BIG and options.quant in ("iq4_nl", "q4_0")
    )
    if (
        options.quant not in (*GRIDS, "q4_k")
        or options.table not in GRIDS
        or options.rounding not in ("auto", "plain", "corrected")
    ):
        raise RecipeError(
            f"Unknown --quant {options.quant!r}, --table {options.table!r} or --rounding {options.rounding!r}; see --help."
        )
    text, train = None, np.zeros(0, np.int64)
    if corrected or layers < s.layers or kept < rows:
        count = options.conversations
        text = store.text(target, path, count, root=cache, rows=count, length=176, progress=step, file=text_file)
        train, _ = split(text)
    ids = whole(rows) if kept == rows or text is None else trimmed(target, text, train, kept)
    chosen = named or list(range(s.layers))
    if layers < s.layers and named is None and text is not None:
        chosen = making.least_needed(target, text.rows(train, calibration_length(text), 8), layers, step)
    grid = GRIDS.get(options.quant, Q8_0)
    recipe = making.Recipe(chosen, ids, grid, GRIDS[options.table], options.neurons, sweeps=options.sweeps)
    out.mkdir(parents=True, exist_ok=True)
    if corrected and text is not None:
        calibration = text.rows(train, calibration_length(text), options.calibration)
        student = making.rebuilt(target, recipe, calibration, step)
        distil.save(out / CHECKPOINT, student, distil.Place())
        write_student(student, target, out / folder.DRAFT)
    else:
        if options.neurons:
            raise RecipeError("Dropping feed-forward neurons needs --rounding corrected.")
        write_streamed(target, recipe, out / folder.DRAFT, options.quant, step)
    write_vocabulary(target, path, out)
    report = {
        "options": asdict(options),
        "layers": chosen,
        "rows": len(ids.to_target),
        "rounding": "corrected" if corrected else "plain",
        "bytes": (out / folder.DRAFT).stat().st_size,
        "seconds": round(time.monotonic() - began, 1),
        "relative_squared_error": rounding_errors(out / folder.DRAFT, target, chosen, ids.to_target),
    }
    folder.write_card(out, card(target, out.name, report))
    return report


def parameters(target: Target) -> int:
    return sum(int(np.prod(target.extents(n), dtype=np.int64)) for n in target.names())


def calibration_length(text: OwnText) -> int:
    """A length that at least half of the conversations have."""
    return int(np.median(text.lens))


def trimmed(target: Target, text: OwnText, train: np.ndarray, rows: int) -> Trim:
    kinds = target.metadata.get("tokenizer.ggml.token_type") if isinstance(target, GgufTarget) else None
    size = target.extents(EMBEDDING)[0]
    must = np.zeros(size, bool)
    marked = special(target.tokens, kinds if isinstance(kinds, np.ndarray) else None)
    must[: len(marked)] = marked[:size]
    if must.sum() > rows:
        raise RecipeError(
            f"{target.name} has {must.sum():,} special tokens, all of which are kept: --vocab must be larger."
        )
    usage = text.usage(train, size)
    return trim(target.tensor(EMBEDDING), choose(usage + rank_prior(size, float(usage.sum())), must, rows))


def card(target: Target, name: str, recipe: dict[str, Any]) -> folder.Card:
    licence = str(target.metadata.get("general.license", "")) if isinstance(target, GgufTarget) else ""
    note = f"Derived from the weights of {target.name}; their licence applies" + (f" ({licence})." if licence else ".")
    return folder.Card(name, vars(vocabulary(target)).copy(), {}, recipe, licence=note)


def maps(ids: Trim) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    rows_are_ids = len(ids.to_target) == len(ids.to_row)
    return (None, None) if rows_are_ids else (ids.to_target.cpu(), ids.to_row.cpu())


def write_student(student: Student, target: Target, path: Path) -> None:
    """A student as the draft file that the device loads."""
    shape = replace(target.shape, layers=student.shape.layers)
    _write(path, target, shape, student.layout(), making.entries(student, target.shape), student.trim)


def write_streamed(target: Target, recipe: making.Recipe, path: Path, quant: str, step: Step) -> None:
    """A plainly rounded draft, through llama.cpp's quantiser where that is asked for."""
    shape = replace(target.shape, layers=len(recipe.layers))
    hidden = [target.extents(f"blk.{i}.ffn_up.weight")[0] for i in recipe.layers]
    layout = export.Layers(hidden, [shape.kv_heads] * len(hidden))
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        first = Path(scratch) / "draft.gguf" if quant == "q4_k" else path
        _write(first, target, shape, layout, making.streamed(target, recipe, step), recipe.trim)
        if quant == "q4_k":
            requantise(first, path, Kind.Q4_K_M)


def _write(
    path: Path, target: Target, shape: Shape, layers: export.Layers, entries: Iterable[export.Entry], ids: Trim
) -> None:
    token_map, input_map = maps(ids)
    mark, rows = vocabulary(target).fingerprint, len(ids.to_target)
    export.write_draft(path, target.architecture, shape, layers, entries, token_map, input_map, rows, mark)


def write_vocabulary(target: Target, source: Path, out: Path) -> None:
    if isinstance(target, GgufTarget):
        vocab.write_vocabulary(source, out / folder.VOCABULARY)
    else:
        shutil.copyfile(source / "tokenizer.json", out / folder.TOKENIZER)


def draft_file(path: Path) -> Path:
    """The GGUF of a draft folder, or the path itself when it is a file. Raises `DraftError` for an ONNX draft."""
    if (path / folder.ONNX).exists() or path.suffix == ".onnx":
        raise DraftError(f"{path} is an ONNX draft; this is done with the GGUF draft that it was exported from.")
    return path / folder.DRAFT if path.is_dir() else path
