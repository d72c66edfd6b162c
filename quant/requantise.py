"""A GGUF model, quantised anew by llama.cpp's own quantiser.

Knows which kinds a draft is made in and how to run the quantiser safely; knows nothing about how good the result is.
The quantiser aborts its process on some damaged files, so it runs in a child: `python -m paceline.quant.requantise`.
"""

import ctypes
import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path

from paceline.kernels.gguf_file import GgufHeader
from paceline.protocol.errors import PacelineError
from paceline.quant.landing import full, landing, require_space
from paceline.quant.vocab import CorruptModelError


class Kind(StrEnum):
    """What the layers' matrices become. Embeddings and output become Q8_0 in each: a draft's ranking of the vocabulary
    suffers most from them, and they cost the least time a token."""

    IQ4_NL = "IQ4_NL"
    Q4_0 = "Q4_0"
    Q8_0 = "Q8_0"
    Q4_K_M = "Q4_K_M"  # llama.cpp widens what does not divide by 256


class RequantiseError(PacelineError):
    """The quantiser refused a model."""


def requantise(src: Path, dst: Path, kind: Kind, *, threads: int = 0) -> None:
    """Write the model at `src` to `dst` with its matrices in `kind`; whole or not at all. `threads` 0: all cores.

    Weights that are quantised already are unpacked first, so the result is a little worse than one made from the
    original. Raises EngineError, `CorruptModelError`, `RequantiseError` and `DiskError`; `dst` is then untouched.
    """
    if GgufHeader(src).tensor_count == 0:
        raise CorruptModelError(f"{src} holds a vocabulary only, no weights: choose the whole model.")
    # Q8_0, the widest kind here, is never larger than the file it is made from by more than this factor (from 4 bits).
    require_space(dst.parent, needed := src.stat().st_size * (2 if kind is Kind.Q8_0 else 1))
    with landing(dst, needed=needed) as part:
        command = [sys.executable, "-m", __name__, str(src), str(part), kind.value, str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise _reason(src, part, done)


def _reason(src: Path, part: Path, done: subprocess.CompletedProcess[str]) -> PacelineError:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if "failed" in line or "rror" in line), lines[-1] if lines else "")
    if "No module named" in said:
        return RequantiseError(f"Making a draft needs llama.cpp: install paceline[edge]. ({said})")
    if "write" in said or "basic_ios" in said or "iostream" in said:
        return full(part.parent, src.stat().st_size)
    fate = f"was ended by signal {-done.returncode}" if done.returncode < 0 else "refused it"
    return RequantiseError(
        f"Cannot requantise {src}: the quantiser {fate} ({said or 'no reason given'}). Fetch it again."
    )


def _quantise(src: str, dst: str, kind: Kind, threads: int) -> int:
    """The child's work. Returns llama.cpp's result: 0 on success."""
    import llama_cpp

    ftypes = {
        Kind.IQ4_NL: llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_NL,
        Kind.Q4_0: llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
        Kind.Q8_0: llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
        Kind.Q4_K_M: llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    }
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = ftypes[kind]
    params.nthread = threads
    params.allow_requantize = True
    params.output_tensor_type = params.token_embedding_type = llama_cpp.GGML_TYPE_Q8_0
    return int(llama_cpp.llama_model_quantize(os.fsencode(src), os.fsencode(dst), ctypes.byref(params)))


if __name__ == "__main__":
    sys.exit(_quantise(sys.argv[1], sys.argv[2], Kind(sys.argv[3]), int(sys.argv[4])))
