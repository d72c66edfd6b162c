"""A decoder of the Llama, Qwen and Gemma 3 families in plain torch, over a mapping of tensors with GGUF names.

Knows shapes, attention and rotation; knows nothing about files, tokenizers, rounding or losses. Families differ in the numbers of
`Shape` and in which optional tensors exist (biases, norms of queries and keys, norms after a branch).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
LINEARS = ATTENTION + FEED_FORWARD
EMBEDDING, HEAD, LAST_NORM = "token_embd.weight", "output.weight", "output_norm.weight"


@dataclass(frozen=True)
class Shape:
    """What a decoder's tensors cannot say themselves.

    interleaved: rotation pairs are neighbours (GGUF `llama`). window: reach of the local layers in tokens, 0 for none; every
    `pattern`-th layer is global, the others rotate by `local_rope_base`. gelu: the feed-forward gate is GELU, not SiLU.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_base: float
    eps: float
    interleaved: bool = True
    gelu: bool = False
    embedding_scale: float = 1.0
    window: int = 0
    pattern: int = 1
    local_rope_base: float = 10_000.0

    def local(self, i: int) -> bool:
        return self.window > 0 and (i + 1) % self.pattern != 0


Rotation = tuple[Tensor, Tensor]


def working(device: torch.device | None = None) -> torch.dtype:
    """The type whose products a device computes fastest: bfloat16, or float32 on a CPU that has no instructions for it."""
    if device is not None and device.type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm in float32, returned in x's type. x: [..., D], weight: [D]."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rotation(shape: Shape, length: int, local: bool = False, device: torch.device | None = None) -> Rotation:
    """cos and sin of the rotary angles, each [S, head_dim / 2], float32."""
    base = shape.local_rope_base if local else shape.rope_base
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64, device=device) / shape.head_dim
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * base ** -half[None]
    return angles.cos().float(), angles.sin().float()


def rotations(shape: Shape, length: int, device: torch.device | None = None) -> list[Rotation]:
    """The rotation of each layer, the tables shared."""
    tables = [rotation(shape, length, local, device) for local in (False, True)]
    return [tables[shape.local(i)] for i in range(shape.layers)]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x: [B, S, H, head_dim]; cos, sin: [S, head_dim / 2]."""
    cos, sin = cos[None, :, None].to(x.dtype), sin[None, :, None].to(x.dtype)
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def queries_keys_values(
    shape: Shape, w: Mapping[str, Tensor], i: int, h: Tensor, turn: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed stream h [B, S, D] to rotated queries [B, H, S, head_dim] and keys, values [B, G, S, head_dim]."""
    p = f"blk.{i}."
    q, k, v = (linear(w, f"{p}attn_{n}", h).view(*h.shape[:2], -1, shape.head_dim) for n in "qkv")
    if f"{p}attn_q_norm.weight" in w:
        q, k = (norm(t, w[f"{p}attn_{n}_norm.weight"], shape.eps) for t, n in ((q, "q"), (k, "k")))
    q, k = (rotate(t, *turn, shape.interleaved).transpose(1, 2) for t in (q, k))
    return q, k, v.transpose(1, 2)


def attend(shape: Shape, q: Tensor, k: Tensor, v: Tensor, local: bool = False) -> Tensor:
    """Causal attention over whole sequences: queries [B, H, S, head_dim] to [B, S, H * head_dim]."""
    groups, s = shape.heads // shape.kv_heads, q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if local and s > shape.window:
        at = torch.arange(s, device=q.device)
        seen = (at[:, None] >= at[None]) & (at[:, None] - at[None] < shape.window)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


def after(w: Mapping[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    """The norm that some families put after a branch."""
    return norm(x, w[name], eps) if name in w else x


def attention(shape: Shape, w: Mapping[str, Tensor], i: int, x: Tensor, turn: Rotation) -> Tensor:
    """The attention branch of layer i, without its residual. x: [B, S, D]."""
    p = f"blk.{i}."
    q, k, v = queries_keys_values(shape, w, i, norm(x, w[p + "attn_norm.weight"], shape.eps), turn)
    out = linear(w, p + "attn_output", attend(shape, q, k, v, shape.local(i)))
    return after(w, p + "post_attention_norm.weight", out, shape.eps)


def gated(shape: Shape, gate: Tensor, up: Tensor) -> Tensor:
    return (F.gelu(gate, approximate="tanh") if shape.gelu else F.silu(gate)) * up


def feed_forward(shape: Shape, w: Mapping[str, Tensor], i: int, x: Tensor) -> Tensor:
    """The gated feed-forward branch of layer i, without its residual. x: [..., D]."""
    p = f"blk.{i}."
    h = norm(x, w[p + "ffn_norm.weight"], shape.eps)
    out = linear(w, p + "ffn_down", gated(shape, linear(w, p + "ffn_gate", h), linear(w, p + "ffn_up", h)))
    return after(w, p + "post_ffw_norm.weight", out, shape.eps)


def attending(shape: Shape, w: Container[str]) -> list[int]:
    """The layers that have attention: a draft may leave it out of some."""
    return [i for i in range(shape.layers) if f"blk.{i}.attn_q.weight" in w]


def hidden(shape: Shape, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Embedded tokens x [B, S, D] to the final, normed hidden state [B, S, D]."""
    turns, attentive = rotations(shape, x.shape[1], x.device), attending(shape, w)
    for i, turn in enumerate(turns):
        if i in attentive:
            x = x + attention(shape, w, i, x, turn)
        x = x + feed_forward(shape, w, i, x)
    return norm(x, w[LAST_NORM], shape.eps)


def embed(shape: Shape, table: Tensor, rows: Tensor) -> Tensor:
    """Rows [B, S] of the table [V, D] as the first stream [B, S, D]."""
    x = F.embedding(rows, table)
    return x if shape.embedding_scale == 1.0 else x * shape.embedding_scale


def head(w: Mapping[str, Tensor]) -> Tensor:
    """The output table [V, D]; the embedding where the family ties them."""
    return w[HEAD] if HEAD in w else w[EMBEDDING]
