"""Which of the drafts runs a file. Imports the one that is needed, and no other."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from paceline.protocol.errors import PacelineError
from paceline.protocol.vocabulary import Vocabulary

if TYPE_CHECKING:
    from paceline.edge.drafts.llamacpp import LlamaDraft
    from paceline.edge.drafts.onnx import OnnxDraft

FileDraft: TypeAlias = "LlamaDraft | OnnxDraft"
CELLS = 4096


def open_draft(
    path: Path,
    vocabulary: Vocabulary,
    *,
    threads: int | None = None,
    provider: str | None = None,
    cells: int = CELLS,
    clock: Callable[[], float] = time.perf_counter,
) -> FileDraft:
    """The draft in a GGUF or ONNX file, as its class says. `provider` is for ONNX alone; None: the CPU.

    Raises PacelineError where the draft does not fit, or what would run it is not installed.
    """
    if path.suffix == ".onnx":
        onnx = _onnx_draft(path)
        return onnx(path, vocabulary, cells=cells, threads=threads, provider=provider or "cpu", clock=clock)
    return _llama_draft(path, provider)(path, vocabulary, cells=cells, threads=threads, clock=clock)


def cost_of(path: Path, *, threads: int | None = None, provider: str | None = None) -> list[tuple[int, float]]:
    """(rows, seconds of a step) of the draft in a file, whatever target it was made for. Raises as `open_draft` does."""
    if path.suffix == ".onnx":
        return _onnx_draft(path).cost_of(path, threads=threads, provider=provider or "cpu")
    return _llama_draft(path, provider).cost_of(path, threads=threads)


def _onnx_draft(path: Path) -> "type[OnnxDraft]":
    try:
        from paceline.edge.drafts.onnx import OnnxDraft
    except ImportError as e:
        raise PacelineError(
            f"{path} is an ONNX draft, and ONNX Runtime is not installed ({e}): pip install 'paceline[onnx]',"
            " or onnxruntime-gpu for an NVIDIA GPU"
        ) from e
    return OnnxDraft


def _llama_draft(path: Path, provider: str | None) -> "type[LlamaDraft]":
    if provider is not None:
        raise PacelineError(f"--provider says what runs an ONNX draft, and {path} is not one: leave it out")
    from paceline.edge.drafts.llamacpp import LlamaDraft

    return LlamaDraft
