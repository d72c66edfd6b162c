"""The decoder: one function over tensors that a table of numbers (`architecture.Config`) turns into Llama, Qwen or Gemma.

Knows nothing about sessions, trees, files or devices: rows in, logits out. What the rows see is in the attention's plan, where
their keys and values go is in `slots`.
"""

from dataclasses import dataclass

import torch
from paceline.cloud.architecture import Config, Rope
from paceline.cloud.product import Product
from paceline.kernels.suite import Suite
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; norms that a family does not have are None."""

    attention_norm: Tensor  # [D]
    qkv: Product  # [R, D] -> [R, (H + 2 Hkv) head_dim]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Product  # [R, H head_dim] -> [R, D]
    after_attention: Tensor | None  # [D]
    ffn_norm: Tensor
    gate_up: Product  # [R, D] -> [R, 2F]
    down: Product  # [R, F] -> [R, D]
    after_ffn: Tensor | None


@dataclass(frozen=True)
class Weights:
    embedding: Tensor  # [rows, D]
    layers: tuple[Layer, ...]
    norm: Tensor  # [D]
    head: Product  # [N, D] -> [N, V], padding rows left out
    turns: Tensor  # rotary table [context, head_dim / 2, 2]
    local_turns: Tensor  # that of layers with a window


@dataclass(frozen=True)
class Rows:
    """A step's rows, on the device."""

    tokens: Tensor  # [R]
    positions: Tensor  # [R]
    slots: Tensor  # [R] where each row's key and value go
    asked: Tensor  # [N] rows whose logits are wanted


def forward(
    weights: Weights, config: Config, rows: Rows, keys: Tensor, values: Tensor, plan: object, suite: Suite
) -> Tensor:
    """Logits [N, V] in float32 of the rows asked for. `keys`, `values` [layers, Hkv, slots, head_dim] take the rows' own in."""
    x = weights.embedding[rows.tokens]  # [R, D]
    if config.embedding_scale != 1:
        x = x * float(torch.tensor(config.embedding_scale, dtype=x.dtype))  # rounded, as Gemma was trained with
    h = suite.norm(x, weights.layers[0].attention_norm, config.eps)
    for i, layer in enumerate(weights.layers):
        a = _attention(layer, i, weights, config, rows, h, keys[i], values[i], plan, suite)
        if layer.after_attention is not None:
            a = suite.norm(a, layer.after_attention, config.eps)
        x, h = suite.add_norm(x, a, layer.ffn_norm, config.eps)
        f = layer.down(suite.gate(layer.gate_up(h), config.gemma))
        if layer.after_ffn is not None:
            f = suite.norm(f, layer.after_ffn, config.eps)
        if i + 1 < len(weights.layers):
            x, h = suite.add_norm(x, f, weights.layers[i + 1].attention_norm, config.eps)
    x, f = x[rows.asked], f[rows.asked]
    _, h = suite.add_norm(x, f, weights.norm, config.eps)
    return weights.head(h).float()


def _attention(
    layer: Layer,
    index: int,
    weights: Weights,
    config: Config,
    rows: Rows,
    h: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: object,
    suite: Suite,
) -> Tensor:
    """[R, D] -> [R, D]; keys, values [Hkv, slots, head_dim] are this layer's."""
    parts = torch.split(layer.qkv(h), list(config.qkv_sizes), dim=-1)
    q, k, v = (part.unflatten(-1, (-1, config.head_dim)) for part in parts)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = suite.norm(q, layer.q_norm, config.eps), suite.norm(k, layer.k_norm, config.eps)
    window = config.windows[index]
    turns = weights.local_turns if window else weights.turns
    q = suite.rotate_and_store(q, k, v, turns, rows.positions, rows.slots, keys, values)  # [R, H, head_dim]
    mixed = suite.attend(q, keys, values, plan, window, config.attention_scale)
    return layer.out(mixed.flatten(-2))


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Rotary frequencies [head_dim / 2] in radians a position, float32, after scaling.

    "llama3" divides low frequencies by `factor`, keeps high ones, and blends between, by how many turns a frequency makes over
    the original context (Llama 3.1's model card and reference code).
    """
    i = torch.arange(0, head_dim, 2, dtype=torch.float32)
    frequency = 1.0 / rope.theta ** (i / head_dim)
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "factors":
        return frequency / torch.tensor(rope.factors)
    if rope.kind == "llama3":
        turns = rope.original_context * frequency / (2 * torch.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return frequency * (blend + (1 - blend) / rope.factor)
    return frequency
