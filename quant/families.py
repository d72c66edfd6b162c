"""Which architectures are understood: how a GGUF header or a Hugging Face config becomes a `Shape`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .decoder import Shape
from .errors import WeightsError

#: GGUF architectures with llama.cpp's rotation order: neighbours (True) or halves (False).
INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False, "gemma3": False}
MIXED = "deci"  # Llama whose layers differ in heads and widths, as llama.cpp calls it
_HF = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}


def _number(source: Mapping[str, Any], key: str, name: str, high: float = 1e9) -> float:
    value = source.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= high:
        raise WeightsError(f"{name} does not state a usable {key!r} (it says {value!r}).")
    return value


def gguf_shape(metadata: Mapping[str, Any], name: str) -> Shape:
    """The shape that a GGUF header states. Raises `WeightsError` for families not understood or absurd numbers."""
    family = metadata.get("general.architecture")
    if family not in INTERLEAVED:
        raise WeightsError(f"{name} is of the architecture {family!r}; drafts are made from {', '.join(INTERLEAVED)}.")
    if f"{family}.rope.scaling.type" in metadata and metadata[f"{family}.rope.scaling.type"] not in ("none",):
        raise WeightsError(f"{name} scales its rotary positions, which is not understood here yet.")

    def get(key: str, high: float = 1e9) -> float:
        return _number(metadata, f"{family}.{key}", name, high)

    def given(key: str, default: float, high: float = 1e9) -> float:
        return get(key, high) if f"{family}.{key}" in metadata else default

    width, heads = int(get("embedding_length", 1 << 17)), int(get("attention.head_count", 4096))
    gemma = family == "gemma3"
    return Shape(
        layers=int(get("block_count", 1024)),
        width=width,
        heads=heads,
        kv_heads=int(given("attention.head_count_kv", heads, 4096)),
        head_dim=int(given("attention.key_length", width // heads, 4096)),
        rope_base=given("rope.freq_base", 10_000.0),
        eps=get("attention.layer_norm_rms_epsilon", 1.0),
        interleaved=INTERLEAVED[family],
        gelu=gemma,
        embedding_scale=width**0.5 if gemma else 1.0,
        window=int(get("attention.sliding_window")) if gemma else 0,
        pattern=6 if gemma else 1,
    )


def draft_shape(metadata: Mapping[str, Any], name: str) -> Shape:
    """As `gguf_shape`, of a draft, whose layers may have fewer heads each than the shape states, or none."""
    if metadata.get("general.architecture") != MIXED:
        return gguf_shape(metadata, name)
    plain = {key.replace(f"{MIXED}.", "llama.", 1): value for key, value in metadata.items()}
    for key in ("llama.attention.head_count", "llama.attention.head_count_kv"):
        if isinstance(plain.get(key), np.ndarray):
            plain[key] = int(max(plain[key], default=0))
    return gguf_shape(plain | {"general.architecture": "llama"}, name)


def hf_shape(config: Mapping[str, Any], name: str) -> Shape:
    """The shape that a Hugging Face config.json states; its tensors keep their order, so rotation pairs are halves."""
    kind = config.get("model_type")
    if kind not in _HF:
        raise WeightsError(f"{name} is of the model type {kind!r}; drafts are made from {', '.join(_HF)}.")
    if (config.get("rope_scaling") or {}).get("rope_type", "default") != "default":
        raise WeightsError(f"{name} scales its rotary positions, which is not understood here yet.")
    width, heads = (
        int(_number(config, "hidden_size", name, 1 << 17)),
        int(_number(config, "num_attention_heads", name, 4096)),
    )
    gemma = kind == "gemma3_text"

    def given(key: str, default: float, high: float = 1e9) -> float:
        return default if config.get(key) is None else _number(config, key, name, high)

    return Shape(
        layers=int(_number(config, "num_hidden_layers", name, 1024)),
        width=width,
        heads=heads,
        kv_heads=int(given("num_key_value_heads", heads, 4096)),
        head_dim=int(given("head_dim", width // heads, 4096)),
        rope_base=given("rope_theta", 10_000.0),
        eps=_number(config, "rms_norm_eps", name, 1.0),
        interleaved=False,
        gelu=gemma,
        embedding_scale=width**0.5 if gemma else 1.0,
        window=int(config.get("sliding_window") or 0) if gemma else 0,
        pattern=6 if gemma else 1,
    )


def hf_architecture(config: Mapping[str, Any]) -> str:
    return _HF[config["model_type"]]
