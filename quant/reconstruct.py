"""Layer-wise rounding that corrects itself: each linear map is chosen so that the rounded model's stream follows the target's.

Second-order rounding after GPTQ (arXiv 2210.17323): columns are rounded one by one and each one's error is spread over those
still to come through the inverse Hessian of the map's inputs. Two extensions, both closed forms: the inputs are those of the
already rounded model (so earlier errors are seen), and before rounding a map is refitted by least squares so that its output
also makes up for the difference that the stream has gathered so far. Dropped layers and neurons are such a difference too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .decoder import Rotation, Shape, after, attend, gated, linear, norm, queries_keys_values, rotation
from .grids import BLOCK, Grid, scales
from .prune import keep_neurons

PIECE = 16  # sequences attended at a time


@dataclass(frozen=True)
class Plan:
    """How a layer is rebuilt. strength: share of the gathered difference that each map makes up for, 0 to 1; neurons: the
    feed-forward width to keep, 0 for all; exact: maps left as they are, by their GGUF stem ("ffn_down")."""

    grid: Grid
    strength: float = 0.7
    neurons: int = 0
    damp: float = 0.01
    exact: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Latent:
    """A map just before its rounding [R, C] and its scales [R, C / 32]."""

    value: Tensor
    scales: Tensor


def second_order(w: Tensor, hessian: Tensor, grid: Grid, damp: float = 0.01) -> tuple[Tensor, Latent]:
    """Round w [R, C] onto the grid under the Hessian [C, C] of its inputs.

    Returns the rounded map and its latent: rounding the latent plainly with the scales gives the first.
    """
    h = hessian.double()
    h = h + damp * h.diagonal().mean().clamp(min=1e-12) * torch.eye(len(h), dtype=h.dtype, device=h.device)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True).float()
    w = w.float().clone()
    out, latent = torch.empty_like(w), torch.empty_like(w)
    d = w.new_empty(w.shape[0], w.shape[1] // BLOCK)
    for b, start in enumerate(range(0, w.shape[1], BLOCK)):
        stop = start + BLOCK
        block, u = w[:, start:stop].clone(), upper[start:stop, start:stop]
        d[:, b] = scales(block, grid, 1 / u.diagonal().pow(2))[:, 0]
        safe = torch.where(d[:, b] == 0, 1, d[:, b])
        errors = torch.empty_like(block)
        for j in range(BLOCK):
            column = latent[:, start + j] = block[:, j].clone()
            out[:, start + j] = grid.nearest(column / safe) * d[:, b]
            errors[:, j] = (column - out[:, start + j]) / u[j, j]
            block[:, j:] -= errors[:, j, None] * u[None, j, j:]
        w[:, stop:] -= errors @ upper[start:stop, stop:]
    return out, Latent(latent, d)


def refit(w: Tensor, inputs: Tensor, miss: Tensor, damp: float = 0.01) -> Tensor:
    """w [R, C] changed so that its output on inputs [N, C] also gives miss [N, R], as far as least squares with a ridge can."""
    gram = inputs.T @ inputs
    gram = gram + damp * gram.diagonal().mean().clamp(min=1e-12) * torch.eye(len(gram), device=gram.device)
    fitted: Tensor = w + torch.linalg.solve(gram, inputs.T @ miss).T
    return fitted


def pieces(total: int) -> Iterator[slice]:
    for start in range(0, total, PIECE):
        yield slice(start, min(start + PIECE, total))


def mixed(shape: Shape, w: Mapping[str, Tensor], i: int, h: Tensor, turn: Rotation) -> Tensor:
    """Attention of layer i before its output map, over [B, S, D], in pieces."""
    parts = (queries_keys_values(shape, w, i, h[c], turn) for c in pieces(len(h)))
    return torch.cat([attend(shape, *qkv, shape.local(i)) for qkv in parts])


class Rebuilder:
    """Walks through the target's layers with two streams [B, S, D]: the target's own, and that of the draft so far."""

    def __init__(self, shape: Shape, plan: Plan, stream: Tensor, rounded_stream: Tensor) -> None:
        self.shape, self.plan = shape, plan
        self.r, self.rq = stream, rounded_stream
        self.latents: dict[str, Latent] = {}

    def drift(self) -> float:
        """Squared difference of the two streams relative to the target's."""
        return float((self.r - self.rq).pow(2).sum() / self.r.pow(2).sum())

    def round(self, name: str, w: Tensor, inputs: Tensor, miss: Tensor | None) -> Tensor:
        """Refit to make up for `miss`, round, remember the latent; returns the rounded map."""
        flat = inputs.flatten(0, -2)
        if miss is not None and self.plan.strength:
            w = refit(w, flat, self.plan.strength * miss.flatten(0, -2), self.plan.damp)
        out, self.latents[name] = second_order(w, flat.T @ flat / len(flat), self.plan.grid, self.plan.damp)
        return out

    @torch.no_grad()
    def layer(self, i: int, w: Mapping[str, Tensor], to: int | None) -> dict[str, Tensor]:
        """Pass the target's layer i; rebuild it as the draft's layer `to`, or drop it when `to` is None.

        w: the layer's tensors. Returns the draft's vectors of that layer (norms, biases) under their new names.
        """
        s, p = self.shape, f"blk.{i}."
        turn = rotation(s, self.r.shape[1], s.local(i))
        kept = dict(w)
        h = norm(self.r, w[p + "attn_norm.weight"], s.eps)
        a = mixed(s, w, i, h, turn)
        if to is not None:
            hq = norm(self.rq, w[p + "attn_norm.weight"], s.eps)
            for name in (f"{p}attn_q.weight", f"{p}attn_k.weight", f"{p}attn_v.weight"):
                kept[name] = self.round(name.replace(p, f"blk.{to}.", 1), w[name], hq, (h - hq) @ w[name].T)
            aq = mixed(s, kept, i, hq, turn)
            self.branch(i, to, "attn_output", "post_attention_norm", w, kept, a, aq)
        self.r = self.r + after(w, p + "post_attention_norm.weight", linear(w, p + "attn_output", a), s.eps)
        if to is not None:
            self.rq = self.rq + after(
                kept, p + "post_attention_norm.weight", linear(kept, p + "attn_output", aq), s.eps
            )
        self.feed_forward(i, w, kept, to)
        if to is None:
            return {}
        return {n.replace(p, f"blk.{to}.", 1): t for n, t in kept.items() if t.dim() == 1}

    def branch(
        self,
        i: int,
        to: int,
        name: str,
        post: str,
        w: Mapping[str, Tensor],
        kept: dict[str, Tensor],
        x: Tensor,
        xq: Tensor,
    ) -> None:
        """Round the map that ends a branch; without a norm after it, it also makes up for the stream's difference."""
        p = f"blk.{i}."
        weight = kept[f"{p}{name}.weight"]
        if name in self.plan.exact:
            return
        miss = x @ w[f"{p}{name}.weight"].T - xq @ weight.T
        if f"{p}{post}.weight" not in w:
            miss = miss + (self.r - self.rq)
        kept[f"{p}{name}.weight"] = self.round(f"blk.{to}.{name}.weight", weight, xq, miss)

    def feed_forward(self, i: int, w: Mapping[str, Tensor], kept: dict[str, Tensor], to: int | None) -> None:
        s, p = self.shape, f"blk.{i}."
        h = norm(self.r, w[p + "ffn_norm.weight"], s.eps)
        f = gated(s, linear(w, p + "ffn_gate", h), linear(w, p + "ffn_up", h))
        if to is not None:
            hq = norm(self.rq, w[p + "ffn_norm.weight"], s.eps)
            if 0 < self.plan.neurons < f.shape[-1]:
                neurons = keep_neurons(w[p + "ffn_down.weight"], f.flatten(0, -2), self.plan.neurons, self.plan.damp)
                for n in ("ffn_gate", "ffn_up"):
                    kept[f"{p}{n}.weight"] = w[f"{p}{n}.weight"][neurons]
                kept[p + "ffn_down.weight"] = w[p + "ffn_down.weight"][:, neurons]
            for n in ("ffn_gate", "ffn_up"):
                weight = kept[f"{p}{n}.weight"]
                kept[f"{p}{n}.weight"] = self.round(f"blk.{to}.{n}.weight", weight, hq, (h - hq) @ weight.T)
            fq = gated(s, linear(kept, p + "ffn_gate", hq), linear(kept, p + "ffn_up", hq))
            self.branch(i, to, "ffn_down", "post_ffw_norm", w, kept, f, fq)
        self.r = self.r + after(w, p + "post_ffw_norm.weight", linear(w, p + "ffn_down", f), s.eps)
        if to is not None:
            self.rq = self.rq + after(kept, p + "post_ffw_norm.weight", linear(kept, p + "ffn_down", fq), s.eps)
