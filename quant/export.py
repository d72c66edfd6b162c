"""Writing the draft's GGUF for the device.

It has no tokenizer of its own (`tokenizer.ggml.model = none`) but the fingerprint of the target's vocabulary. Its rows are named
by the array `paceline.token_map` (target id of each row, absent when rows are ids), and `paceline.input_map` says which
row stands in for every target id. Knows nothing about how the tensors came about.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from paceline.kernels.onnx_file import INPUT_MAP as INPUT_MAP
from paceline.kernels.onnx_file import TARGET
from paceline.kernels.onnx_file import TOKEN_MAP as TOKEN_MAP
from torch import Tensor

from .decoder import Shape
from .errors import RecipeError
from .families import MIXED
from .grids import GRIDS, Grid, packed
from .landing import landing

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


@dataclass(frozen=True)
class Packed:
    """A matrix whose bytes are ready: [R, bytes a row], of a kind that gguf names."""

    data: NDArray[np.uint8]
    kind: str


Entry = tuple[str, "Tensor | Rounded | Packed"]


@dataclass(frozen=True)
class Layers:
    """What may differ from layer to layer. hidden: feed-forward widths; kv_heads: heads of keys and values, 0 where a layer has
    no attention."""

    hidden: list[int]
    kv_heads: list[int]


def architecture(family: str, shape: Shape, layers: Layers) -> str:
    """The architecture by whose name llama.cpp loads such a draft. Raises `RecipeError` where it knows none."""
    if all(n == shape.kv_heads for n in layers.kv_heads):
        return family
    if family != "llama":
        raise RecipeError(
            f"llama.cpp runs layers that differ in their heads for drafts of Llama targets, not of the family {family!r}:"
            " keep every head."
        )
    return MIXED


def header(writer: gguf.GGUFWriter, shape: Shape, layers: Layers, rows: int, context: int) -> None:
    """The architecture's numbers."""
    per_key = shape.heads // shape.kv_heads
    writer.add_block_count(shape.layers)
    writer.add_context_length(context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(_one_or_all(layers.hidden))
    writer.add_head_count(_one_or_all([per_key * n for n in layers.kv_heads]))
    writer.add_head_count_kv(_one_or_all(layers.kv_heads))
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_vocab_size(rows)
    if shape.window:
        writer.add_sliding_window(shape.window)


def _one_or_all(values: list[int]) -> int | list[int]:
    return values[0] if len(set(values)) == 1 else values


def write_draft(
    path: Path,
    family: str,
    shape: Shape,
    layers: Layers,
    entries: Iterable[Entry],
    token_map: Tensor | None,
    input_map: Tensor | None,
    rows: int,
    fingerprint: str,
    context: int = 8192,
) -> None:
    """Write draft.gguf whole or not at all. fingerprint: of the target's vocabulary. token_map: [rows];
    input_map: [target ids]; both None when rows are ids.

    entries are drawn one by one and kept only as packed bytes in a temporary file.
    """
    writer = gguf.GGUFWriter(None, architecture(family, shape, layers), use_temp_file=True)
    header(writer, shape, layers, rows, context)
    writer.add_tokenizer_model("none")
    writer.add_string(TARGET, fingerprint)
    kinds = set()
    for name, entry in entries:
        if isinstance(entry, Rounded):
            writer.add_tensor(name, entry.bytes(), raw_dtype=KINDS[entry.grid.name])
            kinds.add(entry.grid.name)
        elif isinstance(entry, Packed):
            writer.add_tensor(name, entry.data, raw_dtype=gguf.GGMLQuantizationType[entry.kind])
        else:
            writer.add_tensor(name, entry.float().contiguous().numpy())
        del entry  # or it would live on while the next one is made
    writer.add_file_type(FILE_TYPES[min(kinds, key=lambda k: FILE_TYPES[k])] if kinds else 0)
    if token_map is not None and input_map is not None:
        writer.add_array(TOKEN_MAP, token_map.tolist())
        writer.add_array(INPUT_MAP, input_map.tolist())
    with landing(path) as part:
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
