"""Writing what the device loads: the draft's GGUF, and the target's vocabulary as a GGUF without tensors.

The draft has no tokenizer of its own (`tokenizer.ggml.model = none`): its rows are named by the array `paceline.token_map`
(target id of each row, absent when rows are ids), and `paceline.input_map` says which row stands in for every target id.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .decoder import Shape
from .errors import WeightsError
from .gguf_file import GgufFile
from .grids import GRIDS, Grid, packed
from .target import GgufTarget, Target

TOKEN_MAP, INPUT_MAP = "paceline.token_map", "paceline.input_map"
KINDS = {name: gguf.GGMLQuantizationType[name.upper()] for name in GRIDS}
FILE_TYPES = {"q4_0": 2, "q8_0": 7, "iq4_nl": 25}  # llama.cpp's `llama_ftype`, for its messages only


@dataclass(frozen=True)
class Rounded:
    """A matrix ready for a file: latent values [R, C], scales [R, C / 32], grid."""

    latent: Tensor
    scales: Tensor
    grid: Grid

    def bytes(self) -> NDArray[np.uint8]:
        return packed(self.latent, self.scales, self.grid)


Entry = tuple[str, "Tensor | Rounded"]


def header(writer: gguf.GGUFWriter, shape: Shape, hidden: list[int], rows: int, context: int) -> None:
    """The architecture's numbers; hidden: feed-forward width of each layer."""
    writer.add_block_count(shape.layers)
    writer.add_context_length(context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(hidden[0] if len(set(hidden)) == 1 else hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_vocab_size(rows)
    if shape.window:
        writer.add_sliding_window(shape.window)


def write_draft(
    path: Path,
    architecture: str,
    shape: Shape,
    hidden: list[int],
    entries: Iterable[Entry],
    token_map: Tensor | None,
    input_map: Tensor | None,
    rows: int,
    context: int = 8192,
) -> None:
    """Write draft.gguf at once or not at all. token_map: [rows]; input_map: [target ids]; both None when rows are ids.

    entries are drawn one by one and kept only as packed bytes in a temporary file.
    """
    writer = gguf.GGUFWriter(None, architecture, use_temp_file=True)
    header(writer, shape, hidden, rows, context)
    writer.add_tokenizer_model("none")
    kinds = set()
    for name, entry in entries:
        if isinstance(entry, Rounded):
            writer.add_tensor(name, entry.bytes(), raw_dtype=KINDS[entry.grid.name])
            kinds.add(entry.grid.name)
        else:
            writer.add_tensor(name, entry.float().contiguous().numpy())
    writer.add_file_type(FILE_TYPES[min(kinds, key=lambda k: FILE_TYPES[k])] if kinds else 0)
    if token_map is not None and input_map is not None:
        writer.add_array(TOKEN_MAP, token_map.tolist())
        writer.add_array(INPUT_MAP, input_map.tolist())
    _finish(writer, path)


def write_vocabulary(path: Path, target: Target) -> None:
    """The target's tokenizer as a GGUF without tensors, every tokenizer key of its header copied."""
    if not isinstance(target, GgufTarget):
        raise WeightsError(f"{target.name} is no GGUF file; its tokenizer.json is copied instead.")
    writer = gguf.GGUFWriter(None, target.architecture)
    reader = target.file
    for key, value in reader.metadata.items():
        if key.startswith(("tokenizer.", f"{target.architecture}.")) or key in ("general.name", "general.license"):
            _copy(writer, key, value)
    _finish(writer, path)


def _copy(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: Mapping[type, Any] = {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32}
    if isinstance(value, np.ndarray):
        writer.add_array(key, value.tolist())
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        (writer.add_uint32 if 0 <= value < 1 << 32 else writer.add_int64)(key, value)
    else:
        kinds[type(value)](key, value)


def _finish(writer: gguf.GGUFWriter, path: Path) -> None:
    part = path.with_name(path.name + ".part")
    try:
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_map(file: GgufFile, key: str) -> NDArray[np.int64] | None:
    """A map of a draft, or None when its rows are the target's ids."""
    value = file.metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        raise WeightsError(f"{file.path.name}: {key} is not an array of integers.")
    return value.astype(np.int64)
