"""A Hugging Face folder's JSON and its safetensors headers, checked before anything is believed. No torch needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from .errors import WeightsError

MAX_HEADER = 100_000_000  # bytes of a safetensors header, the format's own limit
MAX_IDS = 4_000_000
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path} cannot be read as JSON: {error}.") from error


def folder_tokens(path: Path) -> list[str]:
    """The tokens of tokenizer.json in the order of ids; ids nobody names are padding, "[PAD7]" as GGUF converters write them."""
    tokenizer = read_json(path / "tokenizer.json")
    try:
        ids = dict(tokenizer["model"]["vocab"]) | {t["content"]: t["id"] for t in tokenizer.get("added_tokens", [])}
        size = max(ids.values()) + 1
        if size > MAX_IDS or min(ids.values()) < 0:
            raise ValueError(f"it claims ids up to {size:,}")
        tokens = [f"[PAD{i}]" for i in range(size)]
        for token, i in ids.items():
            tokens[i] = token
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise WeightsError(f"{path / 'tokenizer.json'} has no usable vocabulary ({error}).") from error
    return tokens


def safetensors_table(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a safetensors file, each checked to lie inside it, before any tensor is allocated."""

    def fail(what: str) -> WeightsError:
        return WeightsError(f"{path.name} is not a usable safetensors file: {what}. Get the file again.")

    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise fail(f"its header claims {length:,} of {size:,} bytes")
        try:
            table: dict[str, Any] = json.loads(file.read(length))
            table.pop("__metadata__", None)
            entries = {
                n: (e["dtype"], tuple(map(int, e["shape"])), tuple(map(int, e["data_offsets"])))
                for n, e in table.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise fail(f"its header does not parse ({type(error).__name__})") from error
    for name, (kind, shape, span) in entries.items():
        if len(span) != 2 or not 0 <= span[0] <= span[1] <= size - 8 - length or any(n < 0 for n in shape):
            raise fail(f"tensor {name!r} lies beyond its end")
        if kind in WIDTHS and int(np.prod(shape, dtype=object)) * WIDTHS[kind] != span[1] - span[0]:
            raise fail(f"tensor {name!r} of shape {shape} does not fill its bytes")
    return {name: shape for name, (_, shape, _) in entries.items()}
