"""Layer-wise rounding that corrects itself: each linear map is chosen so that the rounded model's stream follows the target's.

The rounding itself is `rounding`. What is added here, both closed forms: the inputs are those of the already rounded model (so
earlier errors are seen), and before rounding a map is refitted by least squares so that its output also makes up for the
difference that the stream has gathered so far. Dropped layers and neurons are such a difference too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .decoder import Rotation, Shape, after, attend, gated, linear, norm, queries_keys_values, rotation
from .grids import Grid
from .prune import keep_neurons
from .rounding import Inputs, Latent, moment, refit, second_order

PIECE = 16  # sequences attended at a time


@dataclass(frozen=True)
class Plan:
    """How a layer is rebuilt. strength: share of the gathered difference that each map makes up for, 0 to 1; neurons: the
    feed-forward width to keep, 0 for all; sweeps: of coordinate descent; exact: maps left as they are, by their GGUF stem."""

    grid: Grid
    strength: float = 0.7
    neurons: int = 0
    damp: float = 0.01
    sweeps: int = 1
    exact: frozenset[str] = frozenset()


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

    def round(self, names: Sequence[str], maps: Sequence[Tensor], inputs: Inputs, miss: Tensor) -> list[Tensor]:
        """Refit maps that read the same inputs so that they make up for what their outputs miss, and round them, all at once.

        names: in the draft, under which the latents are remembered; miss: [C, rows of all maps], moment of the inputs with it.
        """
        rows = [len(w) for w in maps]
        w = torch.cat(list(maps))
        if self.plan.strength:
            w = refit(w, inputs, self.plan.strength * miss)
        out, latent = second_order(w, inputs, self.plan.grid, self.plan.sweeps)
        parts = zip(names, latent.value.split(rows), latent.scales.split(rows), strict=True)
        self.latents |= {name: Latent(value, d) for name, value, d in parts}
        return list(out.split(rows))

    def round_readers(
        self, p: str, to: int, stems: Sequence[str], kept: dict[str, Tensor], h: Tensor, hq: Tensor
    ) -> None:
        """Round the maps that read one normed stream: h as the target has it, hq as the draft has it, both [B, S, D]."""
        inputs, lag = Inputs(moment(hq, hq), self.plan.damp), moment(hq, h - hq)
        old = [f"{p}{n}.weight" for n in stems]
        maps = [kept[name] for name in old]
        new = self.round([f"blk.{to}.{n}.weight" for n in stems], maps, inputs, lag @ torch.cat(maps).T)
        kept |= dict(zip(old, new, strict=True))

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
            self.round_readers(p, to, ("attn_q", "attn_k", "attn_v"), kept, h, hq)
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
        inputs = Inputs(moment(xq, xq), self.plan.damp)
        [kept[f"{p}{name}.weight"]] = self.round([f"blk.{to}.{name}.weight"], [weight], inputs, moment(xq, miss))

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
            self.round_readers(p, to, ("ffn_gate", "ffn_up"), kept, h, hq)
            fq = gated(s, linear(kept, p + "ffn_gate", hq), linear(kept, p + "ffn_up", hq))
            self.branch(i, to, "ffn_down", "post_ffw_norm", w, kept, f, fq)
        self.r = self.r + after(w, p + "post_ffw_norm.weight", linear(w, p + "ffn_down", f), s.eps)
        if to is not None:
            self.rq = self.rq + after(kept, p + "post_ffw_norm.weight", linear(kept, p + "ffn_down", fq), s.eps)
