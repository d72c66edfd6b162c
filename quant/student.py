"""A draft in training: latent weights on a block grid, their scales, and one optimiser step through the rounding.

The forward sees rounded weights; the gradient passes straight through to the latent ones, and to the scales after LSQ (arXiv
1902.08153). Scales are trained as the exponent of a factor, so that one learning rate fits every tensor. Adam with second moments
kept in bfloat16 for matrices. Knows nothing of data or loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .decoder import Shape, working
from .export import Layers
from .grids import BLOCK, GRIDS, Grid
from .trim import Trim

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-10
SCALE_RATE = 2.0  # learning rate of scales and norms relative to that of the matrices


@dataclass
class Parameter:
    """value: [R, C] latent, or a vector kept as it is. base, log: scale = base * exp(log), [R, C / 32]; None for vectors."""

    value: Tensor
    first: Tensor
    second: Tensor
    base: Tensor | None = None
    log: Tensor | None = None
    log_first: Tensor | None = None
    log_second: Tensor | None = None

    @classmethod
    def matrix(cls, latent: Tensor, scales: Tensor) -> Parameter:
        base = torch.where(scales == 0, 1e-6, scales.float())
        none = torch.zeros((), dtype=torch.bfloat16, device=latent.device).expand(latent.shape)  # see `ready`
        zero = torch.zeros_like(base)
        return cls(latent.float().clone(), none, none, base, zero, zero.clone(), zero.clone())

    @classmethod
    def vector(cls, value: Tensor) -> Parameter:
        return cls(value.float().clone(), torch.zeros_like(value), torch.zeros_like(value))

    def ready(self) -> None:
        """Give the moments memory of their own: until the first step they are one zero, in memory as in a checkpoint."""
        self.first, self.second = self.first.contiguous(), self.second.contiguous()

    def scales(self) -> Tensor:
        """[R, C / 32], the float16 values that the file will hold."""
        assert self.base is not None
        assert self.log is not None
        return (self.base * self.log.exp()).half().float()

    def rounded(self, grid: Grid) -> Tensor:
        """What the forward uses: grid values in the working type, or the vector in float32."""
        if self.base is None:
            return self.value.clone()
        d = self.scales().unsqueeze(2)
        return (grid.nearest(self.value.reshape(len(d), -1, BLOCK) / d) * d).flatten(1).to(working(d.device))


def adam(value: Tensor, first: Tensor, second: Tensor, gradient: Tensor, rate: float, step: int) -> None:
    m = first.float().mul_(BETA1).add_(gradient, alpha=1 - BETA1)
    v = second.float().mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
    first.copy_(m), second.copy_(v)
    spread = v.sqrt_().div_(math.sqrt(1 - BETA2**step)).add_(EPSILON)
    value.addcdiv_(m, spread, value=-rate / (1 - BETA1**step))


@torch.no_grad()
def step_parameter(p: Parameter, grid: Grid, gradient: Tensor, rate: float, step: int) -> None:
    """One optimiser step of one tensor from the gradient at its rounded value."""
    p.ready()
    if p.base is None or p.log is None or p.log_first is None or p.log_second is None:
        adam(p.value, p.first, p.second, gradient, rate * SCALE_RATE, step)
        return
    d = p.scales()
    x = p.value.reshape(len(d), -1, BLOCK) / d.unsqueeze(2)
    near, g = grid.nearest(x), gradient.reshape(len(d), -1, BLOCK)
    low, high = grid.reach()
    inside = (x > low) & (x < high)
    slope = (g * torch.where(inside, near - x, near)).sum(2) * d
    adam(p.log, p.log_first, p.log_second, slope, rate * SCALE_RATE, step)
    adam(p.value, p.first, p.second, (g * inside).flatten(1), rate, step)


@dataclass
class Student:
    """A draft being made. layers: which of the target's layers it has, in order. frozen: matrices kept as the target has them, by
    name (tables at 8 bits, the others in Q4_K); they are not part of the state, since the target gives them again."""

    architecture: str
    shape: Shape
    grid: Grid
    trim: Trim
    layers: list[int]
    parameters: dict[str, Parameter]
    frozen: dict[str, Tensor]

    def weights(self) -> dict[str, Tensor]:
        """What the forward uses: matrices in the working type, float32 vectors."""
        fixed = {name: t.to(working(t.device)) for name, t in self.frozen.items()}
        return fixed | {name: p.rounded(self.grid) for name, p in self.parameters.items()}

    def layout(self) -> Layers:
        """What its layers have, each."""
        names, d = range(self.shape.layers), self.shape.head_dim
        keys = [self.parameters.get(f"blk.{i}.attn_k.weight") for i in names]
        hidden = [len(self.parameters[f"blk.{i}.ffn_up.weight"].value) for i in names]
        return Layers(hidden, [0 if k is None else len(k.value) // d for k in keys])

    def state(self) -> dict[str, Any]:
        """Everything, as plain tensors and numbers, for `torch.save`."""
        return {
            "architecture": self.architecture,
            "shape": vars(self.shape),
            "grid": self.grid.name,
            "to_target": self.trim.to_target,
            "to_row": self.trim.to_row,
            "layers": self.layers,
            "frozen": sorted(self.frozen),
            "parameters": {name: vars(p) for name, p in self.parameters.items()},
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], frozen: dict[str, Tensor]) -> Student:
        parameters = {name: Parameter(**p) for name, p in state["parameters"].items()}
        trim = Trim(state["to_target"], state["to_row"])
        shape, grid = Shape(**state["shape"]), GRIDS[state["grid"]]
        return cls(state["architecture"], shape, grid, trim, list(state["layers"]), parameters, frozen)

    def to(self, device: torch.device) -> Student:
        for p in self.parameters.values():
            for key, value in vars(p).items():
                if isinstance(value, Tensor):
                    setattr(p, key, value.to(device))
        self.frozen = {name: t.to(device) for name, t in self.frozen.items()}
        self.trim = Trim(self.trim.to_target.to(device), self.trim.to_row.to(device))
        return self
