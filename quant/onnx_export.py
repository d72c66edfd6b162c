"""`paceline draft export --format onnx` as a function: a GGUF draft in, a draft folder for ONNX Runtime out.

Knows which tensors make a layer and what the file says about itself; the graph's parts are in `onnx_graph`, the blocks in
`nbits`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paceline.kernels.gguf_file import GgufFile
from paceline.kernels.onnx_file import INPUT_MAP, LARGEST, LAYOUT, TARGET, TOKEN_MAP
from paceline.protocol.vocabulary import Vocabulary

from . import folder, nbits
from .decoder import EMBEDDING, HEAD, LAST_NORM, Shape
from .errors import DraftError, RecipeError
from .families import draft_shape
from .landing import landing
from .nbits import Blocks
from .vocab import write_vocabulary

FORMATS = ("onnx",)
BITS = {"exact": 0, "4": 4, "8": 8}
LONGEST = 8192  # positions in the tables of rotations, at most
Step = Callable[[int, int], None]


@dataclass(frozen=True)
class Source:
    """A draft that is to be exported, and what is known of its target. vocabulary: a file that carries the target's tokens."""

    file: GgufFile
    target: Vocabulary
    vocabulary: Path
    card: folder.Card | None = None


@dataclass
class Rounding:
    """What became of the matrices. kinds: how many of each GGUF kind went into how many bits; errors: of those not exact."""

    bits: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def read(self, file: GgufFile, name: str, bits: int | None = None) -> Blocks:
        bits = self.bits if bits is None else bits
        blocks, kind = nbits.blocks_of(file, name, bits), nbits.kind_of(file, name)
        self.kinds[f"{kind} in {blocks.bits}"] = self.kinds.get(f"{kind} in {blocks.bits}", 0) + 1
        if not nbits.holds(kind, bits) and (wrong := nbits.error(file.array(name), blocks)):
            self.errors[name] = wrong
        return blocks

    def report(self) -> dict[str, Any]:
        wrong = list(self.errors.values()) or [0.0]
        error = {"mean": round(float(np.mean(wrong)), 8), "worst": round(max(wrong), 8)}
        return {"matrices": self.kinds, "rounded": len(self.errors), "relative_squared_error": error}


def export(
    draft: Path, out: Path, bits: int = 0, target: Path | None = None, step: Step = lambda done, total: None
) -> dict[str, Any]:
    """Make the draft folder `out` of the draft at `draft`, a folder or GGUF file; the report.

    bits: of the layers' matrices, 4, 8, or 0 for as few as hold each exactly (8 where none do). target: a GGUF with the target's
    tokens, where the draft is a file that has none. Raises `WeightsError`, `DraftError`, `RecipeError` and `DiskError`.
    """
    source = open_source(draft, target)
    if out.resolve() == draft.resolve():
        raise RecipeError(f"{out} is the draft itself: choose another folder with -o.")
    rounding = Rounding(bits)
    data = model_bytes(source, rounding, step)
    report: dict[str, Any] = {
        "from": draft.name,
        "bits": bits or "exact",
        "opset": _graphs().OPSET,
        "com.microsoft": _graphs().CONTRIB,
    }
    report |= {"bytes": len(data)} | rounding.report()
    out.mkdir(parents=True, exist_ok=True)
    with landing(out / folder.ONNX, needed=len(data)) as part:
        part.write_bytes(data)
    if source.vocabulary.name == folder.TOKENIZER:
        with landing(out / folder.TOKENIZER) as part:
            shutil.copyfile(source.vocabulary, part)
    else:
        write_vocabulary(source.vocabulary, out / folder.VOCABULARY)
    card = source.card or folder.Card(out.name, vars(source.target).copy(), {})
    card = folder.Card(card.name, card.target, {}, card.recipe | {"export": report}, licence=card.licence)
    folder.write_card(out, card)
    folder.verify(out)
    return report


def open_source(draft: Path, target: Path | None) -> Source:
    """The draft at `draft` with its target's vocabulary, which a folder carries and a file may lack."""
    if draft.is_dir():
        card = folder.verify(draft)
        if folder.DRAFT not in card.files:
            raise DraftError(f"{draft} holds no {folder.DRAFT}: an ONNX draft is exported from a GGUF one.")
        name = folder.VOCABULARY if (draft / folder.VOCABULARY).exists() else folder.TOKENIZER
        return Source(GgufFile(draft / folder.DRAFT), Vocabulary(**card.target), draft / name, card)
    file = GgufFile(draft)
    holder = GgufFile(target) if target is not None else file
    tokens = holder.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise DraftError(f"{holder.path.name} carries no tokens: name the target's GGUF file with --target.")
    vocabulary = Vocabulary.of(str(holder.metadata.get("general.name", holder.path.stem)), tokens)
    if file.metadata.get(TARGET, vocabulary.fingerprint) != vocabulary.fingerprint:
        raise DraftError(
            f"{draft} was made for another target than {vocabulary.name}: name the right one with --target."
        )
    folder.check_maps(file, vocabulary.size)
    return Source(file, vocabulary, holder.path)


def model_bytes(source: Source, rounding: Rounding, step: Step = lambda done, total: None, **how: Any) -> bytes:
    """The draft as the bytes of an ONNX file. how: of `onnx_graph.Graph`. Raises `RecipeError` where it cannot be one."""
    file = source.file
    shape = draft_shape(file.metadata, file.path.name)
    if "rope_freqs.weight" in file.tensors:
        raise RecipeError(f"{file.path.name} scales its rotary positions by factors, which is not understood here yet.")
    kv_heads = [_rows(file, f"blk.{i}.attn_k.weight") // shape.head_dim for i in range(shape.layers)]
    graph = _graphs().Graph(shape, kv_heads, **how)
    length = min(LONGEST, int(file.metadata.get(f"{file.metadata['general.architecture']}.context_length", LONGEST)))
    graph.rotations(length)
    rows = _decoder(graph, shape, file, rounding, step)
    model = graph.model(rows, _metadata(source, shape, kv_heads, rows, length))
    if (size := model.ByteSize()) > LARGEST:
        raise RecipeError(f"As ONNX this draft has {size:,} bytes; one file holds {LARGEST:,}. Take a smaller draft.")
    return bytes(model.SerializeToString())


def _rows(file: GgufFile, name: str) -> int:
    """Rows of a matrix, 0 where there is none."""
    return file.info(name).shape[0] if name in file.tensors else 0


def _graphs() -> ModuleType:
    """The module that needs the onnx package."""
    try:
        from . import onnx_graph
    except ImportError as error:
        raise RecipeError("Exporting to ONNX needs the onnx package: pip install 'paceline[onnx-export]'.") from error
    return onnx_graph


def _decoder(graph: Any, shape: Shape, file: GgufFile, rounding: Rounding, step: Step) -> int:
    """Add every layer and the head; the head's rows."""
    table = rounding.read(file, EMBEDDING, 8)
    x = graph.embedded("ids", "token_embd", table)
    first = _first_norm(graph, 0)
    h = graph.norm(x, first, file.array(f"{first}.weight"))
    for i in range(shape.layers):
        x, h = _layer(graph, file, rounding, i, x, h)
        step(i + 1, shape.layers + 1)
    # Only wanted rows meet the head, the largest matrix of a small draft.
    h = graph.put("Gather", graph.put("Squeeze", h, graph.constant(0)), "wanted")
    name, head = _head(file, rounding, table)
    graph.put("Identity", graph.linear(h, name, head), outputs=["logits"])
    step(shape.layers + 1, shape.layers + 1)
    return len(head.scales)


def _head(file: GgufFile, rounding: Rounding, table: Blocks) -> tuple[str, Blocks]:
    """The head's matrix: its own, or the table's where the family ties them. A table keeps 8 bits, unless 4 hold it exactly."""
    tensor = HEAD if HEAD in file.tensors else EMBEDDING
    if nbits.holds(nbits.kind_of(file, tensor), 4):
        return "output", rounding.read(file, tensor, 4)
    return ("token_embd", table) if tensor == EMBEDDING else ("output", rounding.read(file, tensor, 8))


def _layer(graph: Any, file: GgufFile, rounding: Rounding, i: int, x: str, h: str) -> tuple[str, str]:
    """Layer i on the stream x and its norm h: the next stream, and that normed for the next layer."""
    at, last = f"blk.{i}.", i + 1 == graph.shape.layers
    if graph.kv_heads[i]:
        branch = _after(graph, file, f"{at}post_attention_norm", _attention(graph, file, rounding, i, h))
        h, x = graph.add_norm(x, branch, f"{at}ffn_norm", file.array(f"{at}ffn_norm.weight"))
    hidden = file.info(f"{at}ffn_up.weight").shape[0]
    gate, up = graph.split(_product(graph, file, rounding, h, i, "ffn_gate", "ffn_up"), hidden, hidden)
    branch = _product(graph, file, rounding, graph.gated(gate, up), i, "ffn_down")
    branch = _after(graph, file, f"{at}post_ffw_norm", branch)
    name = LAST_NORM.removesuffix(".weight") if last else _first_norm(graph, i + 1)
    h, x = graph.add_norm(x, branch, name, file.array(f"{name}.weight"))
    return x, h


def _first_norm(graph: Any, i: int) -> str:
    """The norm that layer i begins with."""
    return f"blk.{i}.attn_norm" if graph.kv_heads[i] else f"blk.{i}.ffn_norm"


def _attention(graph: Any, file: GgufFile, rounding: Rounding, i: int, h: str) -> str:
    """The attention branch of layer i on the normed stream h."""
    shape, at = graph.shape, f"blk.{i}."
    keys = graph.kv_heads[i]
    queries = shape.heads // shape.kv_heads * keys
    sizes = [n * shape.head_dim for n in (queries, keys, keys)]
    q, k, v = graph.split(_product(graph, file, rounding, h, i, "attn_q", "attn_k", "attn_v"), *sizes)
    if f"{at}attn_q_norm.weight" in file.tensors:
        q, k = (_head_norm(graph, file, i, part, value, n) for part, value, n in (("q", q, queries), ("k", k, keys)))
    q, k = (graph.rotate(t, n, shape.local(i)) for t, n in ((q, queries), (k, keys)))
    return _product(graph, file, rounding, graph.attend(i, q, k, v), i, "attn_output")


def _product(graph: Any, file: GgufFile, rounding: Rounding, x: str, i: int, *parts: str) -> str:
    """x times the matrices `parts` of layer i, beside each other in one product."""
    names = [f"blk.{i}.{part}" for part in parts]
    w = nbits.joined([rounding.read(file, f"{name}.weight") for name in names])
    biases = [file.array(f"{name}.bias") for name in names if f"{name}.bias" in file.tensors]
    if biases and len(biases) != len(names):
        raise RecipeError(f"{file.path.name}: of {', '.join(names)} some have a bias and some have none.")
    return str(graph.linear(x, f"blk.{i}." + "_".join(parts), w, np.concatenate(biases) if biases else None))


def _head_norm(graph: Any, file: GgufFile, i: int, part: str, x: str, heads: int) -> str:
    """Queries or keys normed head by head, where the family does that."""
    name, d = f"blk.{i}.attn_{part}_norm", graph.shape.head_dim
    split = graph.put("Reshape", x, graph.constant(1, -1, heads, d))
    normed = graph.norm(split, name, file.array(f"{name}.weight"))
    return str(graph.put("Reshape", normed, graph.constant(1, -1, heads * d)))


def _after(graph: Any, file: GgufFile, name: str, x: str) -> str:
    return str(graph.norm(x, name, file.array(f"{name}.weight"))) if f"{name}.weight" in file.tensors else x


def _metadata(source: Source, shape: Shape, kv_heads: list[int], rows: int, length: int) -> dict[str, str]:
    layout: dict[str, Any] = {
        "layers": shape.layers, "heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "rows": rows, "context": length, "window": shape.window,
    }  # fmt: skip
    if set(kv_heads) != {shape.kv_heads}:
        layout["kv_heads_by_layer"] = kv_heads
    name = source.card.name if source.card else source.file.path.stem
    out = {LAYOUT: json.dumps(layout), TARGET: source.target.fingerprint, "name": name}
    for key in (TOKEN_MAP, INPUT_MAP):
        found: NDArray[np.integer] | None = source.file.metadata.get(key)
        if found is not None:
            out[key] = json.dumps(found.tolist(), separators=(",", ":"))
    return out
