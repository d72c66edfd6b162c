"""From a checkpoint to a decoder's weights: the right type and device at once, related matrices laid side by side.

Knows which tensors a layer has and how they are joined; `checkpoint` knows where they are, `product` and `quantised` what a
weight becomes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from paceline.cloud.checkpoint import Checkpoint
from paceline.cloud.model import Layer, Weights, inverse_frequencies
from paceline.cloud.product import Dense, Heights, Product, Tiled
from paceline.kernels import rotary
from paceline.protocol.errors import EngineError
from paceline.protocol.vocabulary import real_size
from torch import Tensor

Progress = Callable[[int, int], None]  # layers done, layers in all
MakeProduct = Callable[[Tensor, Tensor | None], Product]


@dataclass(frozen=True)
class Target:
    """Where weights go, and what a matrix becomes."""

    device: torch.device
    dtype: torch.dtype
    make: MakeProduct  # for the layers' matrices
    make_head: MakeProduct  # for the matrix that gives logits: never quantised


def dense(exact: bool) -> MakeProduct:
    """Products with weights as they are; with `exact`, in fixed tiles of rows."""
    if not exact:
        return Dense
    heights = Heights()
    return lambda weight, bias: Tiled(weight, bias, heights.of(weight))


def load(
    checkpoint: Checkpoint, target: Target, context: int, progress: Progress = lambda done, total: None
) -> Weights:
    """All weights, with rotary tables for `context` positions.

    Raises EngineError for what is missing or misshapen, and where memory does not suffice.
    """
    try:
        return _load(checkpoint, target, context, progress)
    except (torch.OutOfMemoryError, MemoryError) as e:
        raise EngineError(
            f"{checkpoint.name} does not fit into memory here; quantise it (--quant) or take a smaller one"
        ) from e


def _load(checkpoint: Checkpoint, target: Target, context: int, progress: Progress) -> Weights:
    c = checkpoint.config
    layers: list[Layer] = []
    for i in range(c.layers):
        layers.append(_layer(checkpoint, target, i))
        progress(i + 1, c.layers)
    embedding = _tensor(checkpoint, target, "model.embed_tokens.weight", (c.rows, c.hidden))
    tied = c.tied or not checkpoint.has("lm_head.weight")
    head = embedding if tied else _tensor(checkpoint, target, "lm_head.weight", (c.rows, c.hidden))
    turns = _turns(inverse_frequencies(c.rope, c.head_dim), context, target)
    local = turns if c.local_rope is None else _turns(inverse_frequencies(c.local_rope, c.head_dim), context, target)
    return Weights(
        embedding=embedding,
        layers=tuple(layers),
        norm=_norm(checkpoint, target, "model.norm", c.hidden),
        head=target.make_head(head[: min(real_size(checkpoint.spellings), c.rows)], None),
        turns=turns,
        local_turns=local,
    )


def _layer(checkpoint: Checkpoint, target: Target, index: int) -> Layer:
    c, at = checkpoint.config, f"model.layers.{index}"
    q, k, v = c.qkv_sizes

    def product(names: Sequence[str], heights: Sequence[int], width: int, bias: bool) -> Product:
        return _product(checkpoint, target, [f"{at}.{n}" for n in names], heights, width, bias)

    def norm(name: str, size: int, present: bool = True) -> Tensor | None:
        return _norm(checkpoint, target, f"{at}.{name}", size) if present else None

    first, second = norm("input_layernorm", c.hidden), norm("post_attention_layernorm", c.hidden)
    assert first is not None
    ffn_norm = norm("pre_feedforward_layernorm", c.hidden) if c.gemma else second
    assert ffn_norm is not None
    heads = [f"self_attn.{n}_proj" for n in "qkv"]
    return Layer(
        attention_norm=first,
        qkv=product(heads, (q, k, v), c.hidden, c.qkv_bias),
        q_norm=norm("self_attn.q_norm", c.head_dim, c.qk_norm),
        k_norm=norm("self_attn.k_norm", c.head_dim, c.qk_norm),
        out=product(["self_attn.o_proj"], (c.hidden,), q, c.out_bias),
        after_attention=second if c.gemma else None,
        ffn_norm=ffn_norm,
        gate_up=product(["mlp.gate_proj", "mlp.up_proj"], (c.ffn, c.ffn), c.hidden, c.ffn_bias),
        down=product(["mlp.down_proj"], (c.hidden,), c.ffn, c.ffn_bias),
        after_ffn=norm("post_feedforward_layernorm", c.hidden, c.gemma),
    )


def _product(
    checkpoint: Checkpoint, target: Target, names: Sequence[str], heights: Sequence[int], width: int, bias: bool
) -> Product:
    """One product for matrices that read the same rows, stacked: [sum of heights, width]."""
    weight = torch.empty(sum(heights), width, dtype=target.dtype, device=target.device)
    offsets = torch.empty(sum(heights), dtype=target.dtype, device=target.device) if bias else None
    for i, name in enumerate(names):
        rows = slice(sum(heights[:i]), sum(heights[: i + 1]))
        checkpoint.read(f"{name}.weight", weight[rows])
        if offsets is not None:
            checkpoint.read(f"{name}.bias", offsets[rows])
    return target.make(weight, offsets)


def _tensor(checkpoint: Checkpoint, target: Target, name: str, shape: tuple[int, ...]) -> Tensor:
    out = torch.empty(shape, dtype=target.dtype, device=target.device)
    checkpoint.read(name, out)
    return out


def _norm(checkpoint: Checkpoint, target: Target, name: str, size: int) -> Tensor:
    """A norm's weight in float32: Gemma's is 1 + what is stored."""
    out = torch.empty(size, dtype=torch.float32, device=target.device)
    checkpoint.read(f"{name}.weight", out)
    return out + checkpoint.norm_offset


def _turns(frequencies: Tensor, context: int, target: Target) -> Tensor:
    return rotary.table(frequencies, context).to(target.device)
