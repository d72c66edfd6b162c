"""The binding to ONNX Runtime: a draft's session on a chosen provider, and its cache of keys and values.

The caches are buffers of the provider's device, bound as input and as output at once, so that a step writes its rows in place and
nothing else of them moves. Knows cells and rows; knows nothing about trees or generations.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from paceline.kernels.onnx_file import read_onnx
from paceline.protocol.errors import EngineError

Ints = npt.NDArray[np.int64]
HIDDEN = np.float32(-1e30)  # what the bias says of a cell that is not the row's

#: By name: ONNX Runtime's own, what runs what it cannot, and the package that has it.
PROVIDERS: dict[str, tuple[list[str], str]] = {
    "cpu": (["CPUExecutionProvider"], "onnxruntime"),
    "cuda": (["CUDAExecutionProvider", "CPUExecutionProvider"], "onnxruntime-gpu"),
    "tensorrt": (
        ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"],
        "onnxruntime-gpu (and TensorRT's libraries)",
    ),
}


class OnnxModel:
    """A checked ONNX draft on a provider of `PROVIDERS`. Raises EngineError: no such provider here, or no sound file."""

    def __init__(self, path: str | Path, *, provider: str = "cpu", threads: int = 1) -> None:
        self.path, self.provider = Path(path), provider
        wanted = _installed(provider)
        self.file = read_onnx(self.path)
        self.layout = self.file.layout
        self.device = "cpu" if provider == "cpu" else "cuda"
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 4  # its errors come as exceptions
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # the device has other things to do
        try:
            self.session = ort.InferenceSession(str(self.path), options, providers=wanted)
        except Exception as e:  # ONNX Runtime's exceptions have no common class of their own
            raise EngineError(f"{self.path}: ONNX Runtime cannot load it: {_first_line(e)}") from None
        if self.session.get_providers()[0] != wanted[0]:
            raise EngineError(
                f"ONNX Runtime could not start its {provider} provider here and fell back to the CPU: check the"
                f" driver and libraries it needs, or choose --provider cpu"
            )


class Cache:
    """Keys and values of every layer for `cells` cells, all zero at first, and the steps that write them."""

    def __init__(self, model: OnnxModel, cells: int) -> None:
        self.model, self.cells = model, 0
        self._binding = model.session.io_binding()
        self._buffers: dict[str, Any] = {}
        self._logits: npt.NDArray[np.float32] = np.empty((0, model.layout.rows), np.float32)
        self.rearrange(np.zeros(0, np.intp), cells)

    def rearrange(self, kept: npt.NDArray[np.intp], cells: int) -> None:
        """Go on with `cells` cells, the first of them what the cells `kept` [N] hold now."""
        layout = self.model.layout
        for name, heads in layout.caches.items():
            fresh = np.zeros((heads, cells, layout.head_dim), np.float32)
            if len(kept):
                fresh[:, : len(kept)] = self._buffers[name].numpy()[:, kept]
            buffer = ort.OrtValue.ortvalue_from_numpy(fresh, self.model.device, 0)
            self._binding.bind_ortvalue_input(name, buffer)
            self._binding.bind_ortvalue_output(f"new_{name}", buffer)
            self._buffers[name] = buffer
        self.cells = cells

    def step(
        self, tokens: Sequence[int], positions: Sequence[int], cells: Sequence[int],
        seen: Sequence[npt.NDArray[np.intp]], wanted: Sequence[bool],
    ) -> npt.NDArray[np.float32]:  # fmt: skip
        """Run rows, each into its cell of `cells`; row i attends to the cells `seen[i]`, its own among them.

        Returns logits [wanted rows, V], valid until the next call. Raises EngineError if the computation failed.
        """
        layout, n = self.model.layout, len(tokens)
        at = np.array(positions, np.int64)
        places = np.empty((layout.kv_heads, n, 2), np.int64)
        places[..., 0], places[..., 1] = np.arange(layout.kv_heads)[:, None], cells
        rows = np.flatnonzero(np.array(wanted))
        self._bind("ids", np.array(tokens, np.int64)[None])
        self._bind("positions", at[None])
        self._bind("places", places)
        self._bind("wanted", rows if len(rows) else np.zeros(1, np.int64))
        self._masks(at, seen)
        if len(self._logits) < max(len(rows), 1):
            self._logits = np.empty((max(len(rows), 8), layout.rows), np.float32)
        logits = self._logits[: max(len(rows), 1)]
        self._binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(logits))
        try:
            self.model.session.run_with_iobinding(self._binding)
        except Exception as e:
            raise EngineError(f"{self.model.path}: ONNX Runtime could not run the batch: {_first_line(e)}") from None
        return logits[: len(rows)]

    def _masks(self, at: Ints, seen: Sequence[npt.NDArray[np.intp]]) -> None:
        layout, n = self.model.layout, len(at)
        bias = np.full((n, self.cells), HIDDEN, np.float32)
        for row, cells in zip(bias, seen, strict=True):
            row[cells] = 0
        self._bind("bias", self._for_heads(bias))
        if layout.window:
            # `seen` is in the order of positions, the row's own cell last.
            near = np.full_like(bias, HIDDEN)
            for row, cells in zip(near, seen, strict=True):
                row[cells[-layout.window :]] = 0
            self._bind("near", self._for_heads(near))

    def _for_heads(self, bias: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """[S, T] once for each query head that shares a head of keys: [S * H / G, T]."""
        return np.repeat(bias, self.model.layout.heads // self.model.layout.kv_heads, 0)

    def _bind(self, name: str, value: npt.NDArray[Any]) -> None:
        self._binding.bind_cpu_input(name, value)


def _installed(provider: str) -> list[str]:
    if provider not in PROVIDERS:
        raise EngineError(f"there is no provider {provider!r}; there are {', '.join(PROVIDERS)}")
    wanted, package = PROVIDERS[provider]
    there = ort.get_available_providers()
    if wanted[0] not in there:
        known = [name for name, (needed, _) in PROVIDERS.items() if needed[0] in there]
        raise EngineError(
            f"the ONNX Runtime installed here has no {provider} provider (it has {', '.join(known)}):"
            f" install {package}, or choose --provider {known[-1]}"
        )
    return [name for name in wanted if name in there]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
