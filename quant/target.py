"""A target's weights, one tensor at a time, from a GGUF file or a Hugging Face folder, under GGUF names.

Tensors are read when asked for and not kept, so that a target larger than memory can be walked through. Rotation order differs
between the two sources (`Shape.interleaved`); `llama_order` turns one into the other for the export.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import gguf
import torch
from paceline.kernels.gguf_file import GgufFile
from paceline.kernels.gguf_names import gguf_name
from paceline.protocol.vocabulary import Vocabulary
from torch import Tensor

from .decoder import EMBEDDING, HEAD, LAST_NORM, LINEARS, Shape, working
from .errors import WeightsError
from .families import gguf_shape, hf_architecture, hf_shape
from .hf_folder import folder_tokens, read_json, safetensors_table


class Target(Protocol):
    """What the factory needs of a target. `tokens`: its vocabulary in the order of ids; `kind`: ggml's name of a type."""

    name: str
    shape: Shape
    architecture: str
    tokens: list[str]

    def names(self) -> Iterator[str]: ...
    def extents(self, name: str) -> tuple[int, ...]: ...
    def kind(self, name: str) -> str: ...
    def tensor(self, name: str) -> Tensor: ...


class GgufTarget:
    """A target in one GGUF file."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self.metadata = self.file.metadata
        self.shape = gguf_shape(self.metadata, path.name)
        self.architecture = str(self.metadata["general.architecture"])
        self.name = path.stem
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list):
            raise WeightsError(f"{path.name} carries no vocabulary; take a GGUF file that has its tokenizer.")
        self.tokens: list[str] = tokens
        check_tensors(self)

    def names(self) -> Iterator[str]:
        return iter(self.file.tensors)

    def extents(self, name: str) -> tuple[int, ...]:
        return self.file.info(name).shape

    def kind(self, name: str) -> str:
        return str(gguf.GGMLQuantizationType(self.file.info(name).kind).name)

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.file.array(name))


class FolderTarget:
    """A target in a Hugging Face folder: config.json, tokenizer.json, *.safetensors."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        config = read_json(path / "config.json")
        self.shape = hf_shape(config, path.name)
        self.architecture = hf_architecture(config)
        self.tokens = folder_tokens(path)
        self._where: dict[str, tuple[Path, str, tuple[int, ...]]] = {}
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{path} holds no *.safetensors file.")
        for file in files:
            for hf, extents in safetensors_table(file).items():
                if name := gguf_name(hf, gemma=self.architecture == "gemma3"):
                    self._where[name] = (file, hf, extents)
        check_tensors(self)

    def names(self) -> Iterator[str]:
        return iter(self._where)

    def extents(self, name: str) -> tuple[int, ...]:
        if name not in self._where:
            raise WeightsError(f"{self.name} has no tensor {name!r}.")
        return self._where[name][2]

    def kind(self, name: str) -> str:
        return "F16"

    def tensor(self, name: str) -> Tensor:
        from safetensors import safe_open

        self.extents(name)
        file, hf, _ = self._where[name]
        with safe_open(file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(hf).float()
        gemma_norm = self.architecture == "gemma3" and tensor.dim() == 1
        return tensor + 1 if gemma_norm else tensor  # Gemma stores norms around zero, GGUF around one


def expected(shape: Shape, vocabulary: int, hidden: Mapping[int, int]) -> dict[str, tuple[int, ...]]:
    """The tensors every family has, with their shapes; hidden: feed-forward width of each layer."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    d = shape.width
    table: dict[str, tuple[int, ...]] = {EMBEDDING: (vocabulary, d), LAST_NORM: (d,)}
    for i, f in hidden.items():
        extents = ((q, d), (kv, d), (kv, d), (d, q), (f, d), (f, d), (d, f))
        sizes: dict[str, tuple[int, ...]] = dict(zip(LINEARS, extents, strict=True))
        sizes |= {"attn_norm": (d,), "ffn_norm": (d,)}
        table |= {f"blk.{i}.{n}.weight": s for n, s in sizes.items()}
    return table


def check_tensors(target: Target) -> None:
    """Raise `WeightsError` unless every tensor that the shape promises is there in that shape."""
    s = target.shape
    if s.heads % s.kv_heads or s.head_dim % 2 or s.head_dim > 1024:
        raise WeightsError(
            f"{target.name} states {s.heads} heads, {s.kv_heads} key heads of {s.head_dim}: that cannot be."
        )
    hidden = {i: target.extents(f"blk.{i}.ffn_up.weight")[0] for i in range(s.layers)}
    rows = target.extents(EMBEDDING)[0]
    for name, extents in expected(s, rows, hidden).items():
        if target.extents(name) != extents:
            raise WeightsError(
                f"{target.name}: tensor {name!r} is {target.extents(name)}, its header promises {extents}."
            )
    if rows < vocabulary(target).size or (HEAD in set(target.names()) and target.extents(HEAD)[0] != rows):
        raise WeightsError(f"{target.name} has {rows:,} rows for {vocabulary(target).size:,} tokens.")


def vocabulary(target: Target) -> Vocabulary:
    return Vocabulary.of(target.name, target.tokens)


def open_target(path: Path | str) -> Target:
    """The target at a path: a .gguf file or a Hugging Face folder. Raises `WeightsError`."""
    path = Path(path)
    if path.is_dir():
        return FolderTarget(path)
    if not path.is_file():
        raise WeightsError(f"There is no model at {path}.")
    return GgufTarget(path)


def in_memory(target: Target, device: torch.device | None = None) -> dict[str, Tensor]:
    """Every weight in memory, matrices and biases in the working type of the device, norms as they are."""
    kind = working(device)
    return {
        n: (t.to(kind) if t.dim() > 1 or n.endswith(".bias") else t).to(device)
        for n in target.names()
        for t in (target.tensor(n),)
    }


def neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of a query or key map from rotation in halves (Hugging Face) to neighbours (GGUF `llama`)."""
    return weight.reshape(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
