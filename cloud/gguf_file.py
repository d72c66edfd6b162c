"""A GGUF file as a checkpoint: its header as a configuration, its tensors dequantised one at a time.

Names follow the GGUF specification. For Llama and Mistral the format stores the rows of q and k with the two halves of each head
interleaved; they are put back in the order of Hugging Face, which the decoder runs.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from paceline.cloud.architecture import Config, from_gguf
from paceline.cloud.checkpoint import check_shape
from paceline.protocol.errors import EngineError
from torch import Tensor

PIECE_HEADS = 64  # heads' worth of rows dequantised at a time, so that no float32 copy of a whole matrix is made

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class GgufFile:
    norm_offset = 0.0  # Gemma's 1 + w is what the format stores

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            reader = GGUFReader(path)
            self._fields = {key: field.contents() for key, field in reader.fields.items()}
        except (OSError, ValueError, IndexError, KeyError, OverflowError, UnicodeError) as e:
            raise EngineError(f"{path} is not a whole GGUF file ({e}); fetch it again") from e
        self._tensors: dict[str, Any] = {t.name: t for t in reader.tensors}
        self.name = str(self._fields.get("general.name") or path.stem)
        self.spellings: list[str] = list(self._fields.get("tokenizer.ggml.tokens") or ())
        self.config = self._configure()
        self._parts = _PARTS | (_GEMMA_PARTS if self.config.gemma else {})

    def has(self, tensor: str) -> bool:
        return self._gguf_name(tensor) in self._tensors

    def read(self, tensor: str, out: Tensor) -> None:
        stored = self._stored(self._gguf_name(tensor))
        check_shape(self._path, tensor, tuple(int(n) for n in reversed(stored.shape)), tuple(out.shape))
        interleaved = self.config.family in ("llama", "mistral") and ("q_proj" in tensor or "k_proj" in tensor)
        step = PIECE_HEADS * self.config.head_dim
        for first in range(0, len(out), step):
            piece = self._dequantised(stored, slice(first, first + step))
            piece = _halves(piece, self.config.head_dim) if interleaved else piece
            out[first : first + step].copy_(torch.from_numpy(np.require(piece, requirements=["C", "W"])))

    def _configure(self) -> Config:
        if "token_embd.weight" not in self._tensors or not self.spellings:
            raise EngineError(
                f"{self._path} holds no language model with a vocabulary (no token_embd.weight or tokens)"
            )
        rows = int(self._tensors["token_embd.weight"].shape[1])
        scaled = self._tensors.get("rope_freqs.weight")
        freqs = () if scaled is None else self._dequantised(scaled, slice(None)).tolist()
        return from_gguf(self._fields, rows, tied="output.weight" not in self._tensors, factors=freqs)

    def _gguf_name(self, tensor: str) -> str:
        stem, _, kind = tensor.rpartition(".")
        if stem in _TOP:
            return f"{_TOP[stem]}.{kind}"
        _, _, number, part = stem.split(".", 3)  # model.layers.N.part
        return f"blk.{number}.{self._parts[part]}.{kind}"

    def _stored(self, name: str) -> Any:
        if name not in self._tensors:
            raise EngineError(f"{self._path} has no tensor {name!r}; fetch the file again")
        return self._tensors[name]

    def _dequantised(self, stored: Any, rows: slice) -> Any:
        try:
            return dequantize(stored.data[rows], stored.tensor_type)
        except NotImplementedError as e:
            kind = stored.tensor_type.name
            raise EngineError(f"{self._path}: weights of type {kind} are not supported; try --engine llamacpp") from e


def _halves(value: Any, head_dim: int) -> Any:
    """Rows [H * d, ...] of interleaved pairs -> the first halves, then the second, of each head."""
    pairs = value.reshape(-1, head_dim // 2, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)
