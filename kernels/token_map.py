"""Rows of a draft with a trimmed vocabulary, and the target's token ids.

A draft that was made for a target says so in its GGUF metadata:

    paceline.target_fingerprint   string     the vocabulary it was made for (`paceline.protocol.vocabulary`)
    paceline.token_map            int array  target id of each output row; absent: row i is id i paceline.input_map
    int array  row that stands for each target id at the input; absent: its own row, or row 0

A draft that says nothing is taken as it is if its own vocabulary is the target's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from paceline.kernels.onnx_file import INPUT_MAP, TARGET, TOKEN_MAP, OnnxFile
from paceline.protocol.errors import EngineError
from paceline.protocol.vocabulary import Vocabulary

if TYPE_CHECKING:
    from paceline.kernels.llama import Model


@dataclass(frozen=True)
class TokenMap:
    """`output` [rows] or None (identity), `input` [target ids] or None (identity)."""

    size: int
    output: npt.NDArray[np.intp] | None
    input: npt.NDArray[np.intp] | None

    @classmethod
    def of(cls, model: "Model", target: Vocabulary) -> "TokenMap":
        """The map of a draft for this target. Raises EngineError, naming both, if the draft was not made for it."""
        made_for = model.metadata(TARGET)
        own = made_for or Vocabulary.of(model.name, model.tokens()).fingerprint
        maps = _arrays(model.path) if made_for else (None, None)
        return cls.checked(model.path, model.name, model.rows, own, *maps, target)

    @classmethod
    def checked(
        cls,
        path: Path,
        name: str,
        count: int,
        fingerprint: str,
        output: npt.NDArray[np.intp] | None,
        rows: npt.NDArray[np.intp] | None,
        target: Vocabulary,
    ) -> "TokenMap":
        """The map of the draft `name` of `count` rows that states its vocabulary's fingerprint and maps. Raises as `of` does."""
        if fingerprint != target.fingerprint:
            text = f"the draft {name!r} ({path.name}) has another vocabulary than the target {target.name!r}"
            raise EngineError(f"{text}: use a draft made for this target")
        if output is None:
            if count < target.size:
                raise EngineError(f"{path}: it has {count} rows for {target.size} tokens; the file is damaged")
            return cls(target.size, None, None)
        if len(output) != count or output.min() < 0 or output.max() >= target.size or len(set(output)) != len(output):
            raise EngineError(f"{path}: its token map does not fit its {count} rows; the file is damaged")
        if rows is None:
            rows = np.zeros(target.size, np.intp)
            rows[output] = np.arange(len(output))
        if len(rows) < target.size or rows.min() < 0 or rows.max() >= count:
            raise EngineError(f"{path}: its input map does not fit the target's vocabulary; the file is damaged")
        return cls(target.size, output, rows)

    @classmethod
    def of_file(cls, file: OnnxFile, target: Vocabulary) -> "TokenMap":
        """As `of`, for a draft in ONNX."""
        output, rows = (None if m is None else np.array(m, np.intp) for m in (file.token_map, file.input_map))
        return cls.checked(file.path, file.name, file.layout.rows, file.fingerprint, output, rows, target)

    def row(self, token: int) -> int:
        return token if self.input is None else int(self.input[token])

    def to_target(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Logits [rows] of the draft as logits [target ids]; ids it has no row for get -inf."""
        if self.output is None:
            return logits[: self.size]
        out = np.full(self.size, -np.inf, np.float32)
        out[self.output] = logits
        return out


def _arrays(path: Path) -> tuple[npt.NDArray[np.intp] | None, npt.NDArray[np.intp] | None]:
    from paceline.kernels.gguf_file import (
        GgufHeader,  # only a draft with maps of its own waits for the library behind it
    )

    header = GgufHeader(path)
    return header.integers(TOKEN_MAP), header.integers(INPUT_MAP)
