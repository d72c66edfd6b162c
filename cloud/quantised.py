"""Targets in four or eight bits: what a weight matrix becomes when it is loaded, by name of the scheme.

    nf4   normal-float 4, by bitsandbytes (Dettmers et al., arXiv 2305.14314)
    int8  rows and columns scaled to 8 bits, products in integers, by bitsandbytes (arXiv 2208.07339, without its outliers)
    w4    four bits in groups of 64, by our own kernel: for steps of few rows

The embedding and the matrix that gives logits stay as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from paceline.cloud.loader import MakeProduct, dense
from paceline.cloud.product import Product
from paceline.kernels import product4
from paceline.kernels.product4 import Packed
from paceline.protocol.errors import EngineError
from torch import Tensor

SCHEMES = ("nf4", "int8", "w4")
NF4_BLOCK = 64  # weights a scale


def quantiser(scheme: str, device: torch.device, exact: bool) -> MakeProduct:
    """What turns a weight and its bias into a product. Raises EngineError if the scheme is unknown or not installed."""
    if scheme == "w4":
        return _w4(device, exact)
    if scheme not in SCHEMES:
        raise EngineError(f"unknown quantisation {scheme!r}; give {', '.join(SCHEMES)}")
    if find_spec("bitsandbytes") is None:
        raise EngineError(f"--quant {scheme} needs bitsandbytes; install paceline[cloud-quant], or take --quant w4")
    if scheme == "nf4":
        return _nf4(exact)
    return _int8


def _w4(device: torch.device, exact: bool) -> MakeProduct:
    multiply: Callable[[Tensor, Packed], Tensor] = product4.product4
    if device.type == "cuda" and find_spec("triton") is not None:
        multiply = import_module("paceline.kernels.product4_triton").product4
    whole = dense(exact)

    def make(weight: Tensor, bias: Tensor | None) -> Product:
        if weight.shape[1] % product4.GROUP:
            return whole(weight, bias)  # a width that groups do not divide: rare, and small
        packed = product4.pack(weight)
        if exact:
            return Widened(lambda: product4.unpack(packed), bias, whole)
        return Multiplied(packed, bias, multiply)

    return make


def _nf4(exact: bool) -> MakeProduct:
    functional: Any = import_module("bitsandbytes.functional")
    whole = dense(exact)

    def make(weight: Tensor, bias: Tensor | None) -> Product:
        bits, state = functional.quantize_4bit(weight, blocksize=NF4_BLOCK, quant_type="nf4")
        if exact:
            return Widened(lambda: functional.dequantize_4bit(bits, state), bias, whole)
        return NormalFloat(bits, state, bias)

    return make


def _int8(weight: Tensor, bias: Tensor | None) -> Product:
    functional: Any = import_module("bitsandbytes.functional")
    bits, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
    return Int8(bits, scales, bias)


@dataclass(frozen=True)
class Multiplied:
    """A product with a packed weight."""

    packed: Packed
    bias: Tensor | None
    multiply: Callable[[Tensor, Packed], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        out = self.multiply(x, self.packed)
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True)
class NormalFloat:
    """A product with an nf4 weight, as bitsandbytes does it best for the number of rows."""

    bits: Tensor
    state: Any  # bitsandbytes.functional.QuantState
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = import_module("bitsandbytes").matmul_4bit(x, self.bits.t(), quant_state=self.state)
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True)
class Int8:
    """A product in integers: each row of x is scaled to 8 bits by itself, so a row's bits never depend on its batch."""

    bits: Tensor  # [N, K] int8
    scales: Tensor  # [N] largest magnitude of each row
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        functional: Any = import_module("bitsandbytes.functional")
        rows, own, _ = functional.int8_vectorwise_quant(x.to(torch.float16))
        total = functional.int8_linear_matmul(rows, self.bits)  # [R, N] int32, exact
        out: Tensor = (total.float() * (own[:, None] * self.scales[None, :] / 127.0**2)).to(x.dtype)
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True)
class Widened:
    """Exact mode: the weight is widened for each product, which then goes in fixed tiles. Small, but slow."""

    widen: Callable[[], Tensor]
    bias: Tensor | None
    whole: MakeProduct

    def __call__(self, x: Tensor) -> Tensor:
        return self.whole(self.widen().to(x.dtype), self.bias)(x)
