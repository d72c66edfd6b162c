"""The target alone: llama.cpp's own calls, one token at a time. No line of Paceline's engine, context or session.

What "plain text" means in the tests of real models. Only the choice of a token from its logits is the project's, for
that rule is what makes a text plain; it has slow references of its own.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import llama_cpp as ll
import numpy as np
import numpy.typing as npt
from paceline.protocol.sampling import History, Sampling, choose

_silence = ll.llama_log_callback(lambda *_: None)


class PlainModel:
    """Flash attention with V in float32, as `kernels.llama.Context(exact=True)` has it: the kernel is part of the target."""

    def __init__(self, path: Path, cells: int = 1024) -> None:
        ll.llama_log_set(_silence, ctypes.c_void_p(0))
        ll.llama_backend_init()
        self._model = ll.llama_model_load_from_file(str(path).encode(), ll.llama_model_default_params())
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = cells, 32, 32
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type, params.type_v = 1, 0
        self._ctx = ll.llama_init_from_model(self._model, params)
        vocab = ll.llama_model_get_vocab(self._model)
        self.rows = ll.llama_vocab_n_tokens(vocab)
        self._length = 0

    def close(self) -> None:
        ll.llama_free(self._ctx)
        ll.llama_model_free(self._model)

    def begin(self) -> None:
        ll.llama_memory_clear(ll.llama_get_memory(self._ctx), True)
        self._length = 0

    def row(self, token: int) -> npt.NDArray[np.float32]:
        """Logits [V] after one more token; a copy."""
        one = (ctypes.c_int32 * 1)(token)
        assert ll.llama_decode(self._ctx, ll.llama_batch_get_one(one, 1)) == 0
        self._length += 1
        return np.ctypeslib.as_array(ll.llama_get_logits_ith(self._ctx, -1), shape=(self.rows,)).copy()

    def after(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits [len(tokens), V] after each token of a fresh sequence."""
        self.begin()
        return np.stack([self.row(t) for t in tokens])

    def text(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int, stop_ids: Sequence[int] = ()
    ) -> tuple[list[int], npt.NDArray[np.float32]]:
        """The tokens that the target writes alone, and the logits [n, V] that each was chosen from."""
        self.begin()
        for token in prompt[:-1]:
            self.row(token)
        out: list[int] = []
        rows = []
        while len(out) < max_tokens:
            rows.append(self.row(out[-1] if out else prompt[-1]))
            history = History(prompt, out) if sampling.penalised else None
            out.append(choose(rows[-1], sampling, len(prompt) + len(out), history))
            if out[-1] in stop_ids:
                break
        return out, np.stack(rows)
