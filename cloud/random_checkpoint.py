"""A model of given shape with random weights, for measuring where no weights are at hand: a checkpoint without files."""

import zlib

import torch
from paceline.cloud.architecture import Config, Rope
from torch import Tensor

LLAMA_8B = Config(
    family="llama",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14_336,
    rows=128_256,
    context=131_072,
    eps=1e-5,
    rope=Rope(theta=500_000.0, kind="llama3", factor=8.0),
    local_rope=None,
    windows=(0,) * 32,
    attention_scale=128**-0.5,
    embedding_scale=1.0,
    qkv_bias=False,
    out_bias=False,
    ffn_bias=False,
    qk_norm=False,
    gemma=False,
    tied=False,
)


class RandomCheckpoint:
    """Normal weights that keep activations at scale. A tensor's name is its seed, drawn on its own device or on the CPU."""

    norm_offset = 0.0

    def __init__(self, name: str, config: Config, draw_on_device: bool = True) -> None:
        self.name, self.config = name, config
        self.spellings = [f"<{i}>" for i in range(config.rows)]
        self._draw_on_device = draw_on_device

    def has(self, tensor: str) -> bool:
        return tensor != "lm_head.weight" or not self.config.tied

    def read(self, tensor: str, out: Tensor) -> None:
        if tensor.endswith("norm.weight"):
            out.fill_(1.0)
            return
        device = out.device if self._draw_on_device else torch.device("cpu")
        generator = torch.Generator(device).manual_seed(zlib.crc32(tensor.encode()))
        scale = out.shape[-1] ** -0.5
        if device == out.device:
            out.normal_(0.0, scale, generator=generator)
        else:
            out.copy_(torch.empty(out.shape, dtype=torch.float32).normal_(0.0, scale, generator=generator))
