"""Random small decoders of each family as folders in the Hugging Face layout, written without transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 4, "rope_theta": 10000.0},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "smollm2": {
        "model_type": "llama",
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "head_dim": 8,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 24, "rope_theta": 10000.0},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000000.0, "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1000000.0, "head_dim": 32},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, **CONFIGS[name], **changes}


def write_folder(folder: Path, name: str, seed: int = 0, vocabulary: int = 150, **changes: Any) -> Path:
    """A random model of a family; its vocabulary is smaller than its embedding, as padded ones are."""
    config = config_of(name, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {f"t{i}": i for i in range(vocabulary)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": tokens}}))
    save_file(random_tensors(config, seed), folder / "model.safetensors")
    return folder


def random_tensors(c: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Tensors by their Hugging Face names, scaled so that logits spread."""
    generator = torch.Generator().manual_seed(seed)
    d, f, h, hkv, hd = (
        c[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    gemma = c["model_type"].startswith("gemma")
    out: dict[str, Tensor] = {}

    def matrix(name: str, n: int, k: int) -> None:
        out[f"{name}.weight"] = torch.randn(n, k, generator=generator) * 1.5 / k**0.5

    def norm(name: str, n: int) -> None:
        out[f"{name}.weight"] = torch.randn(n, generator=generator) * 0.2 + (0.0 if gemma else 1.0)

    matrix("model.embed_tokens", c["vocab_size"], d)
    out["model.embed_tokens.weight"] *= 8 / d**0.5 if gemma else 8
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        for part, heads in (("q", h), ("k", hkv), ("v", hkv)):
            matrix(f"{at}.self_attn.{part}_proj", heads * hd, d)
            if c["model_type"] == "qwen2":
                out[f"{at}.self_attn.{part}_proj.bias"] = torch.randn(heads * hd, generator=generator) * 0.3
        matrix(f"{at}.self_attn.o_proj", d, h * hd)
        matrix(f"{at}.mlp.gate_proj", f, d)
        matrix(f"{at}.mlp.up_proj", f, d)
        matrix(f"{at}.mlp.down_proj", d, f)
        norm(f"{at}.input_layernorm", d)
        norm(f"{at}.post_attention_layernorm", d)
        if gemma:
            norm(f"{at}.pre_feedforward_layernorm", d)
            norm(f"{at}.post_feedforward_layernorm", d)
        if gemma or c["model_type"] == "qwen3":
            norm(f"{at}.self_attn.q_norm", hd)
            norm(f"{at}.self_attn.k_norm", hd)
    norm("model.norm", d)
    if not c["tie_word_embeddings"]:
        matrix("lm_head", c["vocab_size"], d)
        out["lm_head.weight"] *= 2
    return out
