"""The set of kernels a model runs on, chosen once at start: torch references, or Triton on CUDA.

The model calls these by name and never asks which set it has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from paceline.kernels import attention, choice, gate, norm, rotary
from paceline.kernels.layout import Layout
from torch import Tensor


@dataclass(frozen=True)
class Suite:
    """Kernels by name. `plan` turns a layout into what `attend` reads, once a step; `attend` runs once a layer."""

    name: str
    plan: Callable[[Layout, frozenset[int], torch.device], Any]
    attend: Callable[[Tensor, Tensor, Tensor, Any, int, float], Tensor]
    norm: Callable[[Tensor, Tensor, float], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotate_and_store: Callable[..., Tensor]
    gate: Callable[[Tensor, bool], Tensor]
    walk: Callable[[Tensor, choice.Forest, choice.Choices], choice.Paths]


def reference(exact: bool) -> Suite:
    """Torch on any device. With `exact`, every operation gives a row the same bits in any batch."""
    return Suite(
        name="torch",
        plan=attention.line_up if exact else attention.see,
        attend=attention.attend_exact if exact else attention.attend,
        norm=norm.rms_norm,
        add_norm=norm.add_rms_norm,
        rotate_and_store=rotary.rotate_and_store,
        gate=gate.gate_exact if exact else gate.gate,
        walk=choice.walk,
    )


def triton(exact: bool, group: int) -> Suite:
    """Triton kernels for models with `group` query heads a key head.

    They sum over fixed tiles in either mode; `exact` also takes each row's keys in the order of positions.
    """
    from paceline.kernels import attention_triton, choice_triton, gate_triton, norm_triton, rotary_triton

    return Suite(
        name="triton",
        plan=partial(attention_triton.upload, exact=exact, group=group),
        attend=attention_triton.attend,
        norm=norm_triton.rms_norm,
        add_norm=norm_triton.add_rms_norm,
        rotate_and_store=rotary_triton.rotate_and_store,
        gate=gate_triton.gate,
        walk=choice_triton.walk,
    )


def pick(device: torch.device, exact: bool, group: int) -> Suite:
    """Triton where there is a CUDA device and Triton is installed; the references elsewhere."""
    if device.type == "cuda" and find_spec("triton") is not None:
        return triton(exact, group)
    return reference(exact)
