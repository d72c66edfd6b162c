"""From a target to an untrained draft: which layers, which rows, rounded how.

Two ways. `streamed` rounds tensor by tensor and never holds more than one, for targets of any size. `rebuilt` walks through the
layers with calibration text and corrects as it rounds (`reconstruct`); it yields a `Student` that can be trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from . import affine
from .decoder import EMBEDDING, HEAD, LAST_NORM, Shape, embed, head, hidden
from .errors import RecipeError
from .export import Entry, Packed, Rounded
from .grids import BLOCK, Q8_0, Grid, scales
from .reconstruct import Plan, Rebuilder
from .rounding import Inputs, moment, second_order
from .student import Parameter, Student
from .target import Target, in_memory, neighbours
from .trim import Trim

Progress = Callable[[int, int], None]
PIECE = 1 << 22  # elements rounded at a time


def _silent(done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Recipe:
    """layers: which of the target's, in order; trim: rows kept; table: grid of the embedding and head tables, Q8_0 keeps them as
    the target has them and does not train them; exact: hold in Q4_K, untrained, what the target has on a 4-bit grid with offsets
    and in rows that divide by 256; sweeps: of coordinate descent behind the rounding of a map."""

    layers: Sequence[int]
    trim: Trim
    grid: Grid
    table: Grid = Q8_0
    neurons: int = 0
    strength: float = 0.7
    exact: bool = True
    sweeps: int = 1


def check(target: Target, recipe: Recipe) -> None:
    """Raise `RecipeError` where the target cannot give such a draft."""
    s = target.shape
    if not recipe.layers or max(recipe.layers) >= s.layers:
        raise RecipeError(f"{target.name} has {s.layers} layers; the recipe asks for {list(recipe.layers)}.")
    if s.pattern > 1 and list(recipe.layers) != list(range(s.layers)):
        raise RecipeError(f"{target.name} mixes local and global layers in a fixed order: keep all {s.layers} layers.")
    for name in target.names():
        extents = target.extents(name)
        if len(extents) == 2 and extents[1] % BLOCK:
            raise RecipeError(f"{target.name}: rows of {name} have {extents[1]} values, not a multiple of {BLOCK}.")


def kept_rows(table: Tensor, ids: Tensor) -> Tensor:
    return table if len(ids) == len(table) else table[ids]


def layer_names(target: Target, i: int) -> list[str]:
    return [n for n in target.names() if n.startswith(f"blk.{i}.")]


def tables(target: Target) -> list[str]:
    return [n for n in (EMBEDDING, HEAD) if n in set(target.names())]


def rounded(w: Tensor, grid: Grid) -> Rounded:
    """Plain rounding of w [R, C] with searched scales, a piece of rows at a time."""
    rows = max(1, PIECE // w.shape[1])
    found = torch.cat([scales(w[at : at + rows], grid) for at in range(0, len(w), rows)])
    return Rounded(w, found, grid)


def streamed(target: Target, recipe: Recipe, progress: Progress = _silent) -> Iterator[Entry]:
    """The draft's tensors, plainly rounded, one at a time."""
    check(target, recipe)
    every = recipe.trim.to_target
    interleave = target.architecture == "llama" and not target.shape.interleaved
    for name in tables(target):
        yield (
            name,
            rounded(kept_rows(target.tensor(name), every), recipe.table),
        )  # no name for it: the largest tensors there are
    yield LAST_NORM, target.tensor(LAST_NORM)
    for to, i in enumerate(recipe.layers):
        for name in layer_names(target, i):
            w, new = target.tensor(name), name.replace(f"blk.{i}.", f"blk.{to}.", 1)
            if interleave and (".attn_q." in name or ".attn_k." in name):
                w = neighbours(w, target.shape.head_dim)
            yield new, rounded(w, recipe.grid) if w.dim() == 2 else w
            del w
        progress(to + 1, len(recipe.layers))


def halves(w: Tensor, head_dim: int) -> Tensor:
    """Rows of a query or key map from rotation of neighbours to rotation of halves, which trains faster."""
    return w.reshape(-1, head_dim // 2, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)


@torch.no_grad()
def rebuilt(target: Target, recipe: Recipe, calibration: Tensor, progress: Progress = _silent) -> Student:
    """A draft rounded with correction along calibration text [N, S] (target ids), ready for training."""
    check(target, recipe)
    s, trim = target.shape, recipe.trim
    parameters, frozen = _tables(target, recipe, calibration)
    first = frozen.get(EMBEDDING)
    table = parameters[EMBEDDING].rounded(recipe.table).float() if first is None else first
    held = exact_maps(target, recipe)
    stream, own = embed(s, target.tensor(EMBEDDING), calibration), embed(s, table, trim.to_row[calibration])
    walk = Rebuilder(
        s, Plan(recipe.grid, recipe.strength, recipe.neurons, sweeps=recipe.sweeps, exact=held), stream, own
    )
    vectors = {LAST_NORM: target.tensor(LAST_NORM)}
    place = {i: to for to, i in enumerate(recipe.layers)}
    for i in range(s.layers):
        vectors |= walk.layer(i, {n: target.tensor(n) for n in layer_names(target, i)}, place.get(i))
        progress(i + 1, s.layers)
    for name, latent in walk.latents.items():
        value, d = latent.value, latent.scales
        if s.interleaved and (".attn_q." in name or ".attn_k." in name):
            value, d = halves(value, s.head_dim), halves(d, s.head_dim)
        parameters[name] = Parameter.matrix(value, d)
    for stem in held:
        frozen |= {
            f"blk.{i}.{stem}.weight": target.tensor(f"blk.{o}.{stem}.weight") for i, o in enumerate(recipe.layers)
        }
    parameters |= {n: Parameter.vector(v) for n, v in vectors.items()}
    shape = replace(s, layers=len(recipe.layers), interleaved=False)
    return Student(target.architecture, shape, recipe.grid, trim, list(recipe.layers), parameters, frozen)


def exact_maps(target: Target, recipe: Recipe) -> frozenset[str]:
    """Stems of the maps that Q4_K holds as the target has them. Only a branch's last map is ever left out of the correction, and
    only in a draft that keeps every layer: the others have more to learn than rounding."""
    name = f"blk.{recipe.layers[0]}.ffn_down.weight"
    fits = target.extents(name)[1] % affine.SUPER == 0 and target.kind(name) in ("Q4_1", "Q4_K")
    every = len(recipe.layers) == target.shape.layers and not recipe.neurons
    return frozenset({"ffn_down"}) if recipe.exact and fits and every else frozenset()


def frozen_tensor(target: Target, name: str, ids: Tensor, layers: Sequence[int]) -> Tensor:
    """A matrix that a draft keeps as its target has it; name: in the draft, ids: of the rows kept, layers: of the target's."""
    if not name.startswith("blk."):
        return target.tensor(name)[ids]
    _, number, rest = name.split(".", 2)
    return target.tensor(f"blk.{layers[int(number)]}.{rest}")


def _tables(target: Target, recipe: Recipe, calibration: Tensor) -> tuple[dict[str, Parameter], dict[str, Tensor]]:
    """The tables as trained parameters, or as frozen matrices when they keep 8 bits."""
    kept = {n: frozen_tensor(target, n, recipe.trim.to_target, recipe.layers) for n in tables(target)}
    if recipe.table is Q8_0:
        return {}, kept
    if recipe.table is not recipe.grid:
        raise RecipeError(f"A trained table uses the layers' grid: {recipe.grid.name}, not {recipe.table.name}.")
    seen = last_hidden(target, calibration)
    inputs = Inputs(moment(seen, seen), 0.05)
    out = {}
    for name, table in kept.items():
        latent = second_order(table, inputs, recipe.table)[1]
        out[name] = Parameter.matrix(latent.value, latent.scales)
    return out, {}


@torch.no_grad()
def last_hidden(target: Target, tokens: Tensor, piece: int = 8) -> Tensor:
    """The target's final hidden state on tokens [N, S], float32 [N, S, D]; the whole target is in memory meanwhile."""
    w = in_memory(target)
    parts = [hidden(target.shape, w, embed(target.shape, w[EMBEDDING], t)).float() for t in torch.split(tokens, piece)]
    return torch.cat(parts)


@torch.no_grad()
def least_needed(target: Target, tokens: Tensor, keep: int, progress: Progress = _silent) -> list[int]:
    """The `keep` layers to keep, in order: those whose single absence costs the most agreement on the target's own text.

    tokens: [N, S]. Agreement is with the whole target's own choices.
    """
    w = in_memory(target)
    s = target.shape

    def choices(without: int | None) -> Tensor:
        left = [i for i in range(s.layers) if i != without]
        view = renumbered(w, left)
        x = hidden(replace(s, layers=len(left)), view, embed(s, w[EMBEDDING], tokens))
        return F.linear(x, head(w)).argmax(-1)

    own = choices(None)
    agreement = []
    for i in range(s.layers):
        agreement.append(float((choices(i) == own).float().mean()))
        progress(i + 1, s.layers)
    order = sorted(range(s.layers), key=lambda i: agreement[i])
    return sorted(order[:keep])


def renumbered(w: dict[str, Tensor], layers: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of some layers under consecutive numbers, the rest as it is; nothing is copied."""
    place = {f"blk.{i}.": f"blk.{to}." for to, i in enumerate(layers)}
    out = {}
    for name, t in w.items():
        prefix = ".".join(name.split(".", 2)[:2]) + "."
        if not name.startswith("blk."):
            out[name] = t
        elif prefix in place:
            out[place[prefix] + name[len(prefix) :]] = t
    return out


def entries(student: Student, shape: Shape) -> Iterator[Entry]:
    """A student's tensors for `write_draft`, rows back in the order of the architecture's GGUF files. shape: the target's."""
    turn = student.architecture == "llama" and not student.shape.interleaved
    for name, w in student.frozen.items():
        yield name, Packed(affine.q4_k(w.cpu().numpy()), "Q4_K") if name.startswith("blk.") else rounded(w.cpu(), Q8_0)
    for name, p in student.parameters.items():
        if p.base is None:
            yield name, p.value.cpu()
            continue
        value, d = p.value.cpu(), p.scales().cpu()
        if turn and (".attn_q." in name or ".attn_k." in name):
            value, d = neighbours(value, shape.head_dim), neighbours(d, shape.head_dim)
        yield name, Rounded(value, d, student.grid)
