"""A model on disk: its configuration, the spelling of its tokens, and its tensors by their Hugging Face names.

Two kinds, behind the same three things: a folder with config.json, tokenizer.json and safetensors files, and one GGUF file.
A tensor is converted straight into the memory it will live in, one at a time, so loading needs no second copy of the model.
Every fault of the files is an EngineError that names the file.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from paceline.cloud.architecture import Config, from_hugging_face
from paceline.protocol.errors import EngineError
from torch import Tensor


class Checkpoint(Protocol):
    name: str
    config: Config
    spellings: list[str]  # of every token id, padding included
    norm_offset: float  # what to add to the weights of norms as stored

    def has(self, tensor: str) -> bool: ...

    def read(self, tensor: str, out: Tensor) -> None:
        """Copy the tensor of that name into `out`, converting. Raises EngineError if it is missing or of another shape."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """The model at `path`: a .gguf file, or a folder in the Hugging Face layout."""
    if not path.exists():
        raise EngineError(f"there is no model at {path}; give a GGUF file or a folder with config.json")
    if path.is_file():
        from paceline.cloud.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    return Folder(path)


class Folder:
    def __init__(self, path: Path) -> None:
        self.name = path.resolve().name
        self.config = from_hugging_face(_read_json(path / "config.json"))
        self.norm_offset = 1.0 if self.config.gemma else 0.0
        self._files = _tensor_files(path)
        self.spellings = _spellings(_read_json(path / "tokenizer.json"), path)
        embedding = next((n for n in self._files if n.endswith("embed_tokens.weight")), "model.embed_tokens.weight")
        self._prefix = embedding.removesuffix("model.embed_tokens.weight")  # "language_model." in multimodal ones
        self._open: dict[Path, Any] = {}

    def has(self, tensor: str) -> bool:
        return self._full(tensor) in self._files

    def read(self, tensor: str, out: Tensor) -> None:
        name = self._full(tensor)
        if name not in self._files:
            raise EngineError(f"the model in {self.name} has no tensor {name!r}; fetch the model again")
        file = self._files[name]
        value = self._handle(file).get_tensor(name)
        check_shape(file, name, tuple(value.shape), tuple(out.shape))
        out.copy_(value)

    def _full(self, tensor: str) -> str:
        return self._prefix + tensor

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = open_safetensors(file)
        return self._open[file]


def check_shape(file: Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        text = f"{file.name}: tensor {name!r} has shape {list(found)}, the configuration asks for {list(wanted)}"
        raise EngineError(f"{text}; the files do not belong together")


def open_safetensors(file: Path) -> Any:
    """The opened file; EngineError where it is missing, truncated or something else."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as e:
        raise EngineError(f"{file} is missing; fetch the model again") from e
    except (SafetensorError, OSError) as e:
        raise EngineError(f"{file} is truncated or damaged ({e}); fetch it again") from e


def _tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index of a sharded model or from the only file."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise EngineError(f"{index} holds no weight_map; fetch the model again")
        return {str(name): path / str(file) for name, file in weight_map.items()}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{path} holds no .safetensors files; fetch the weights, or give a GGUF file")
    return {name: file for file in files for name in open_safetensors(file).keys()}  # noqa: SIM118 (not a dict)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise EngineError(f"{file} is missing; fetch the model again") from e
    except (OSError, ValueError) as e:
        raise EngineError(f"{file} is truncated or damaged ({e}); fetch it again") from e
    if not isinstance(value, dict):
        raise EngineError(f"{file} does not hold a JSON object; fetch it again")
    return value


def _spellings(tokenizer: dict[str, Any], path: Path) -> list[str]:
    """Token spellings by id from a tokenizer.json; ids that nothing is said about are empty."""
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict):
        known = {int(i): str(t) for t, i in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram: [spelling, score] in the order of ids
        known = {i: str(pair[0]) for i, pair in enumerate(vocabulary)}
    else:
        raise EngineError(f"{path / 'tokenizer.json'} holds no vocabulary; fetch it again")
    known |= {int(t["id"]): str(t["content"]) for t in tokenizer.get("added_tokens") or ()}
    return [known.get(i, "") for i in range(max(known) + 1)]


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The type to compute in: "auto" is bfloat16 on CUDA and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if name not in known:
        raise EngineError(f"unknown dtype {name!r}; give auto, {', '.join(known)}")
    return known[name]
