"""A GGUF model in llama.cpp, as far as measuring a draft needs: rows in, logits out, one thread unless told otherwise.

Takes its own lean path through the C API because the evaluation must see every row's logits and control every batch.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import WeightsError

Logits = NDArray[np.float32]


@cache
def _silence() -> Any:
    """Takes in llama.cpp's messages and drops them. Cached, since llama.cpp keeps its address alone and calls it to the end."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda *_: None)


def library() -> Any:
    """llama.cpp's bindings, its messages turned off."""
    try:
        import llama_cpp
    except ImportError as error:
        raise WeightsError("Measuring a draft needs llama.cpp: pip install 'paceline[edge]'.") from error
    llama_cpp.llama_log_set(_silence(), ctypes.c_void_p(0))
    return llama_cpp


class LlamaModel:
    """One model, one sequence. Raises `WeightsError` when llama.cpp refuses the file."""

    def __init__(self, path: Path | str, context: int = 4096, threads: int = 1, batch: int = 512) -> None:
        ll = self._ll = library()
        self.path, self.threads = Path(path), threads
        ll.llama_backend_init()
        self._model = ll.llama_model_load_from_file(str(path).encode(), ll.llama_model_default_params())
        if not self._model:
            raise WeightsError(f"llama.cpp cannot load {path}.")
        self.vocab = ll.llama_model_get_vocab(self._model)
        self.rows = int(ll.llama_vocab_n_tokens(self.vocab))
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, batch, batch
        params.n_threads = params.n_threads_batch = threads
        self._context = ll.llama_init_from_model(self._model, params)
        if not self._context:
            raise WeightsError(f"llama.cpp cannot run {path} with a context of {context} tokens.")
        self.limit, self._size = context, batch
        self._batch = ll.llama_batch_init(batch, 0, 1)

    def close(self) -> None:
        self._ll.llama_batch_free(self._batch)
        self._ll.llama_free(self._context)
        self._ll.llama_model_free(self._model)

    def forget(self, start: int = 0) -> None:
        """Drop positions from `start` on."""
        self._ll.llama_memory_seq_rm(self._ll.llama_get_memory(self._context), 0, start, -1)

    def decode(self, rows: Sequence[int], position: int, wanted: Sequence[bool]) -> None:
        """Run at most one batch of rows from `position` on."""
        b = self._batch
        b.n_tokens = len(rows)
        for i, (row, want) in enumerate(zip(rows, wanted, strict=True)):
            b.token[i], b.pos[i], b.logits[i] = int(row), position + i, int(want)
            b.n_seq_id[i], b.seq_id[i][0] = 1, 0
        if self._ll.llama_decode(self._context, b):
            raise WeightsError(f"llama.cpp failed to run {self.path.name} at position {position}.")

    def last(self, i: int = -1) -> Logits:
        """A copy of the logits of row i of the last batch, [rows of the head]."""
        pointer = self._ll.llama_get_logits_ith(self._context, i)
        return np.ctypeslib.as_array(pointer, shape=(self.rows,)).copy()

    def top(self, rows: Sequence[int], start: int, k: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The k likeliest rows and their log-probabilities after each of rows[start:]: two arrays [N, k]."""
        self.forget()
        ids, logps = [], []
        for at in range(0, len(rows), self._size):
            piece = rows[at : at + self._size]
            wanted = [at + i >= start for i in range(len(piece))]
            self.decode(piece, at, wanted)
            for i in (i for i, want in enumerate(wanted) if want):
                logp = log_softmax(self.last(i))
                best = np.argpartition(logp, -k)[-k:]
                best = best[np.argsort(-logp[best], kind="stable")]
                ids.append(best)
                logps.append(logp[best])
        return np.array(ids), np.array(logps)

    def greedy(self, prompt: Sequence[int], count: int, stop: set[int]) -> list[int]:
        """The model's own greedy text after the prompt, up to and with its stop token."""
        return self.write(prompt, count, stop, lambda logits: int(logits.argmax()))

    def write(self, prompt: Sequence[int], count: int, stop: set[int], choose: Callable[[Logits], int]) -> list[int]:
        """The model's text after the prompt, each token chosen from its logits [rows]; up to and with its stop token."""
        self.forget()
        for at in range(0, len(prompt), self._size):
            piece = prompt[at : at + self._size]
            self.decode(piece, at, [i == len(piece) - 1 for i in range(len(piece))])
        text: list[int] = []
        while len(text) < count and len(prompt) + len(text) < self.limit:
            token = choose(self.last())
            text.append(token)
            if token in stop:
                break
            self.decode([token], len(prompt) + len(text) - 1, [True])
        return text

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        out = (ctypes.c_int32 * (len(data) + 8))()
        n = self._ll.llama_tokenize(self.vocab, data, len(data), out, len(out), False, True)
        return list(out[:n])

    def stops(self) -> set[int]:
        return {t for t in range(self.rows) if self._ll.llama_vocab_is_eog(self.vocab, t)}


def sampler(temperature: float, seed: int) -> Callable[[Logits], int]:
    """Draws a row from the softmax at a temperature; the likeliest at 0."""
    if temperature == 0:
        return lambda logits: int(logits.argmax())
    dice = np.random.default_rng(seed)

    def draw(logits: Logits) -> int:
        chance = np.exp(log_softmax(logits / np.float32(temperature)))
        return int(dice.choice(len(chance), p=chance / chance.sum()))

    return draw


def log_softmax(x: Logits) -> NDArray[np.float64]:
    wide = x.astype(np.float64) - float(x.max())
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return result


def step_cost(
    models: Sequence[LlamaModel], widths: Sequence[int], past: int = 256, repeats: int = 15
) -> list[dict[int, float]]:
    """Seconds a step of each model at each batch width, after `past` tokens: medians, the models taking turns within one run.

    With one thread it is processor time, which a busy machine disturbs least; with more, time on the wall.
    """
    clock = time.thread_time if all(m.threads == 1 for m in models) else time.perf_counter
    for m in models:
        m.forget()
        m.decode([7] * past, 0, [False] * (past - 1) + [True])
    times: list[dict[int, list[float]]] = [{w: [] for w in widths} for _ in models]
    for _ in range(repeats):
        for m, mine in zip(models, times, strict=True):
            for w in widths:
                start = clock()
                m.decode([9] * w, past, [True] * w)
                m.last()
                mine[w].append(clock() - start)
                m.forget(past)
    return [{w: float(np.median(t)) for w, t in mine.items()} for mine in times]
