"""A Llama in a GGUF file as a folder in the Hugging Face layout, for engines that read nothing else.

Weights are dequantised to float32, so the folder holds exactly the numbers of the file.
"""

import json
from pathlib import Path
from typing import Any

from paceline.protocol.errors import EngineError
from paceline.quant.landing import disk_errors, landing

_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
_CONTROL = 3  # the token type of GGUF


def write_folder(model: Path, folder: Path) -> Path:
    """The folder, with its tokenizer. What is there is kept if it was written whole.

    Raises EngineError for a model of another family, and DiskError.
    """
    from paceline.cloud.gguf_checkpoint import GgufCheckpoint

    if (folder / "model.safetensors").is_file():
        return folder
    source = GgufCheckpoint(model)
    if source.config.family != "llama" or source.config.rope.kind != "default":
        raise EngineError(f"{model}: only plain Llama models can be written as a folder")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        fields = source.metadata
        (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(fields), ensure_ascii=False))
        (folder / "tokenizer_config.json").write_text(json.dumps(_settings(fields)))
        (folder / "config.json").write_text(json.dumps(_config(source.config)))
        with landing(folder / "model.safetensors") as part:  # last: it says that the rest is there
            _write_tensors(source, part)
    return folder


def _write_tensors(source: Any, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for name, shape in _shapes(source.config).items():
        tensors[name] = torch.empty(shape)
        source.read(name, tensors[name])
    save_file(tensors, path)


def _shapes(c: Any) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.rows, c.hidden)}
    shapes["model.norm.weight"] = (c.hidden,)
    if not c.tied:
        shapes["lm_head.weight"] = (c.rows, c.hidden)
    heads = (*c.qkv_sizes, c.hidden)
    for layer in range(c.layers):
        at = f"model.layers.{layer}"
        for part, rows in zip(_PARTS, heads, strict=True):
            shapes[f"{at}.self_attn.{part}.weight"] = (rows, c.qkv_sizes[0] if part == "o_proj" else c.hidden)
        for part in ("gate_proj", "up_proj"):
            shapes[f"{at}.mlp.{part}.weight"] = (c.ffn, c.hidden)
        shapes[f"{at}.mlp.down_proj.weight"] = (c.hidden, c.ffn)
        for part in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{part}.weight"] = (c.hidden,)
    return shapes


def _config(c: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": c.hidden,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.rows,
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.eps,
        "rope_theta": c.rope.theta,
        "tie_word_embeddings": c.tied,
        "torch_dtype": "float32",
    }


def _settings(fields: dict[str, Any]) -> dict[str, Any]:
    end = fields["tokenizer.ggml.tokens"][fields["tokenizer.ggml.eos_token_id"]]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "chat_template": fields.get("tokenizer.chat_template"),
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE vocabulary."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    added = [
        {"id": i, "content": token, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
        | {"single_word": False}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _CONTROL
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits, single = {"type": "Digits", "individual_digits": True}, fields.get("tokenizer.ggml.pre") == "smollm"
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, level]} if single else level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
