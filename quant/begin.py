"""A draft's file read back as a draft in training, where no checkpoint is at hand: one that came with the package, say.

What is lost against a checkpoint is where a weight lay between two codes, and the optimiser's moments; the first steps make up
for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from paceline.kernels.gguf_file import GgufFile
from paceline.kernels.onnx_file import INPUT_MAP, TOKEN_MAP
from torch import Tensor

from . import nbits
from .build import frozen_tensor, halves
from .decoder import EMBEDDING
from .errors import RecipeError
from .families import draft_shape
from .grids import GRIDS
from .patch import unpacked
from .student import Parameter, Student
from .target import Target
from .trim import Trim, whole

KEPT = ("Q8_0", "Q4_K")  # kinds of matrices that training leaves as the target has them


def student_of(file: GgufFile, target: Target, layers: Sequence[int]) -> Student:
    """The draft in `file` as it stands. layers: which of the target's it has. Raises `RecipeError` where it cannot be trained."""
    shape = draft_shape(file.metadata, file.path.name)
    if len(layers) != shape.layers:
        raise RecipeError(f"{file.path.name} has {shape.layers} layers; its card names {len(layers)} of the target's.")
    kinds = {n: nbits.kind_of(file, n) for n, info in file.tensors.items() if len(info.shape) == 2}
    trained = {n: kind for n, kind in kinds.items() if kind not in KEPT}
    found = sorted(set(trained.values()))
    if len(found) != 1 or found[0].lower() not in GRIDS:
        raise RecipeError(
            f"{file.path.name} holds its matrices in {', '.join(sorted(set(kinds.values())))}; training goes on from Q4_0 or"
            f" IQ4_NL alone: make the draft anew with `paceline draft build --rounding corrected`."
        )
    trim = _trim(file)
    turned = (".attn_q.", ".attn_k.") if shape.interleaved else ()
    parameters: dict[str, Parameter] = {}
    frozen: dict[str, Tensor] = {}
    for name in file.tensors:
        if name in trained:
            value = torch.from_numpy(file.array(name))
            d = torch.from_numpy(unpacked(file.raw(name))[0].astype(np.float32)).view(len(value), -1)  # [R, C / 32]
            if any(part in name for part in turned):
                value, d = halves(value, shape.head_dim), halves(d, shape.head_dim)
            parameters[name] = Parameter.matrix(value, d)
        elif name in kinds:
            frozen[name] = frozen_tensor(target, name, trim.to_target, layers)
            if frozen[name].shape != file.info(name).shape:
                raise RecipeError(f"{file.path.name}: {name} is not of its target's shape and cannot be trained on.")
        else:
            parameters[name] = Parameter.vector(torch.from_numpy(file.array(name)))
    kept = replace(target.shape, layers=shape.layers, interleaved=False)
    return Student(target.architecture, kept, GRIDS[found[0].lower()], trim, list(layers), parameters, frozen)


def _trim(file: GgufFile) -> Trim:
    to_target, to_row = file.integers(TOKEN_MAP), file.integers(INPUT_MAP)
    if to_target is None or to_row is None:
        return whole(file.info(EMBEDDING).shape[0])
    return Trim(torch.from_numpy(to_target), torch.from_numpy(to_row))
