"""A draft as a folder: draft.gguf or draft.onnx, the target's vocabulary, and draft.json: whose draft it is and how it was made.

Reading and checking need neither torch nor llama.cpp, so that the device can do both.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paceline.kernels.gguf_file import GgufFile
from paceline.kernels.onnx_file import INPUT_MAP, TARGET, TOKEN_MAP, read_onnx
from paceline.protocol.vocabulary import Vocabulary, fingerprint

from .errors import DraftError
from .hf_folder import folder_tokens
from .landing import landing

DRAFT, ONNX = "draft.gguf", "draft.onnx"  # one of the two
VOCABULARY, TOKENIZER, CARD = "vocab.gguf", "tokenizer.json", "draft.json"
FORMAT = 1


@dataclass
class Card:
    """draft.json. files: SHA-256 by file name; recipe and evaluation are what the tools wrote, for people and for `resume`."""

    name: str
    target: dict[str, Any]  # name, size and fingerprint of the vocabulary
    files: dict[str, str]
    recipe: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    licence: str = ""
    format: int = FORMAT


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_card(folder: Path, card: Card) -> None:
    """Write draft.json in one step, the digests of the files there taken anew."""
    card.files = {n: digest(folder / n) for n in (DRAFT, ONNX, VOCABULARY, TOKENIZER) if (folder / n).exists()}
    with landing(folder / CARD) as part:
        part.write_text(json.dumps(asdict(card), indent=2) + "\n", encoding="utf-8")


def read_card(folder: Path) -> Card:
    """draft.json of a folder. Raises `DraftError` when it is missing or not one."""
    path = folder / CARD
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        card = Card(**{k: raw[k] for k in Card.__dataclass_fields__ if k in raw})
        if card.format != FORMAT or not isinstance(card.files, dict):
            raise ValueError(f"its format is {card.format!r}, this version reads {FORMAT}")
        Vocabulary(**card.target)
    except FileNotFoundError:
        raise DraftError(f"{folder} is no draft folder: it has no {CARD}.") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DraftError(f"{path} is not a usable draft card: {error}.") from error
    return card


def vocabulary_tokens(folder: Path) -> list[str]:
    """The target's tokens as the folder carries them."""
    if (folder / VOCABULARY).exists():
        tokens = GgufFile(folder / VOCABULARY).metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list):
            return tokens
        raise DraftError(f"{folder / VOCABULARY} carries no tokens.")
    if (folder / TOKENIZER).exists():
        return folder_tokens(folder)
    raise DraftError(f"{folder} carries no vocabulary ({VOCABULARY} or {TOKENIZER}).")


def model_name(folder: Path, card: Card) -> str:
    """The file of the folder that holds the model."""
    named = [n for n in (DRAFT, ONNX) if n in card.files]
    if len(named) != 1:
        raise DraftError(f"{folder / CARD} names {len(named)} of {DRAFT} and {ONNX}; a draft is one of them.")
    return named[0]


def check_files(folder: Path, card: Card) -> None:
    model_name(folder, card)
    for name, expected in card.files.items():
        if Path(name).name != name or not (folder / name).is_file():
            raise DraftError(f"{folder} lacks {name}, which its card names.")
        if digest(folder / name) != expected:
            raise DraftError(f"{folder / name} is not the file its card describes: it was damaged or replaced.")


def check_maps(file: GgufFile, vocabulary_size: int) -> None:
    """The rows of a draft name distinct tokens of the target, and every token has a row that stands for it."""
    rows = file.info("token_embd.weight").shape[0]
    maps = file.metadata.get(TOKEN_MAP), file.metadata.get(INPUT_MAP)
    check_rows(file.path.name, rows, *maps, vocabulary_size)


def check_rows(name: str, rows: int, token_map: Any, input_map: Any, vocabulary_size: int) -> None:
    """As `check_maps`, of the draft `name` with so many rows."""
    if token_map is None:
        if not vocabulary_size <= rows:
            raise DraftError(f"{name} has {rows:,} rows and no token map, its target {vocabulary_size:,} tokens.")
        return
    if not isinstance(token_map, np.ndarray) or len(token_map) != rows or len(np.unique(token_map)) != rows:
        raise DraftError(f"{name}: its token map does not name each of its {rows:,} rows once.")
    if token_map.min() < 0 or token_map.max() >= vocabulary_size:
        raise DraftError(f"{name}: its token map names ids outside the target's {vocabulary_size:,}.")
    if input_map is not None:
        if (
            not isinstance(input_map, np.ndarray)
            or len(input_map) < vocabulary_size
            or input_map.min() < 0
            or input_map.max() >= rows
        ):
            raise DraftError(f"{name}: its input map does not lead {vocabulary_size:,} tokens to {rows:,} rows.")
        if (input_map[token_map] != np.arange(rows)).any():
            raise DraftError(f"{name}: its two maps contradict each other.")


def verify(folder: Path, against: Vocabulary | None = None) -> Card:
    """Check a draft folder whole; against: the vocabulary of the target it shall serve. Raises `DraftError` or `WeightsError`."""
    card = read_card(folder)
    check_files(folder, card)
    tokens, stated = vocabulary_tokens(folder), Vocabulary(**card.target)
    if fingerprint(tokens) != stated.fingerprint:
        raise DraftError(f"{folder}: the vocabulary in it is not the one its card states ({stated.name}).")
    if against is not None and against.fingerprint != stated.fingerprint:
        raise DraftError(f"{folder} is a draft for {stated.name}, not for {against.name}: their tokens differ.")
    path = folder / model_name(folder, card)
    if path.name == ONNX:
        found = read_onnx(path)
        check_rows(ONNX, found.layout.rows, _array(found.token_map), _array(found.input_map), stated.size)
        made_for = found.fingerprint
    else:
        draft = GgufFile(path)
        check_maps(draft, stated.size)
        made_for = str(draft.metadata.get(TARGET))
    if made_for != stated.fingerprint:
        raise DraftError(f"{path} was made for another target than its card states ({stated.name}).")
    return card


def _array(numbers: list[int] | None) -> NDArray[np.int64] | None:
    return None if numbers is None else np.array(numbers, np.int64)
