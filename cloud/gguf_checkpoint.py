"""A GGUF file as a checkpoint: its header as a configuration, its tensors dequantised one at a time.

Names follow the GGUF specification. For Llama and Mistral the format stores the rows of q and k with the two halves of each head
interleaved; they are put back in the order of Hugging Face, which the decoder runs.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from paceline.cloud.architecture import Config, from_gguf
from paceline.cloud.checkpoint import check_shape
from paceline.kernels.gguf_file import GgufFile, UnreadKind
from paceline.kernels.gguf_names import gguf_name
from paceline.protocol.errors import EngineError
from torch import Tensor

PIECE_HEADS = 64  # heads' worth of rows dequantised at a time, so that no float32 copy of a whole matrix is made


class GgufCheckpoint:
    norm_offset = 0.0  # Gemma's 1 + w is what the format stores

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, GgufFile(path)
        self.metadata = self._file.metadata
        self.name = str(self.metadata.get("general.name") or path.stem)
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        self.spellings: list[str] = tokens if isinstance(tokens, list) else []
        self.config = self._configure()

    def has(self, tensor: str) -> bool:
        return self._gguf_name(tensor) in self._file.tensors

    def read(self, tensor: str, out: Tensor) -> None:
        name = self._gguf_name(tensor)
        check_shape(self._path, tensor, self._file.info(name).shape, tuple(out.shape))
        interleaved = self.config.family in ("llama", "mistral") and ("q_proj" in tensor or "k_proj" in tensor)
        step = PIECE_HEADS * self.config.head_dim if out.dim() == 2 else len(out)
        for first in range(0, len(out), step):
            piece = self._array(name, first, first + step)
            piece = _halves(piece, self.config.head_dim) if interleaved else piece
            out[first : first + step].copy_(torch.from_numpy(np.require(piece, requirements=["C", "W"])))

    def _configure(self) -> Config:
        tensors = self._file.tensors
        if "token_embd.weight" not in tensors or not self.spellings:
            raise EngineError(
                f"{self._path} holds no language model with a vocabulary (no token_embd.weight or tokens)"
            )
        rows = tensors["token_embd.weight"].shape[0]
        freqs = self._array("rope_freqs.weight").tolist() if "rope_freqs.weight" in tensors else ()
        return from_gguf(self.metadata, rows, tied="output.weight" not in tensors, factors=freqs)

    def _gguf_name(self, tensor: str) -> str:
        name = gguf_name(tensor, gemma=self.config.gemma)
        if name is None:
            raise KeyError(tensor)
        return name

    def _array(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        try:
            return self._file.array(name, start, stop)
        except UnreadKind as e:
            raise EngineError(f"{e} Try --engine llamacpp.") from None


def _halves(value: Any, head_dim: int) -> Any:
    """Rows [H * d, ...] of interleaved pairs -> the first halves, then the second, of each head."""
    pairs = value.reshape(-1, head_dim // 2, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)
