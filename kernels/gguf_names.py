"""GGUF's names of a decoder's tensors, by those of Hugging Face."""

import re

_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA = _LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, *, gemma: bool) -> str | None:
    """GGUF's name of a Hugging Face tensor; None for one that a decoder does not use. gemma: of the Gemma 3 family."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    part = (_GEMMA if gemma else _LAYER).get(found[2]) if found else None
    return f"blk.{found[1]}.{part}.{kind}" if found and part else None
