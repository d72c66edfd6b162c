"""llama.cpp as this project sees it: a model with its vocabulary, and a context that decodes rows of tokens.

Wraps the low-level ctypes interface of llama-cpp-python; the calls release the GIL. Knows nothing about drafts,
targets or trees: a row is (token, position, the sequence ids its KV cell belongs to, whether its logits are wanted).
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as ll
import numpy as np
import numpy.typing as npt
from paceline.protocol.errors import EngineError

F32, F16 = 0, 1  # ggml types of cache entries
MAX_SEQUENCES = 256  # llama.cpp's own limit for one context

_say_nothing = ll.llama_log_callback(lambda *_: None)


def quiet() -> None:
    """Keep llama.cpp's own log off the terminal; PACELINE_LLAMA_LOG=1 leaves it on."""
    if not os.environ.get("PACELINE_LLAMA_LOG"):
        ll.llama_log_set(_say_nothing, ctypes.c_void_p(0))


class Model:
    """A GGUF file. With `vocabulary_only`, no weights are read: enough to tokenise on a device that has no target."""

    def __init__(self, path: str | Path, *, vocabulary_only: bool = False, gpu_layers: int = 0) -> None:
        self.path = Path(path)
        check_gguf(self.path)
        quiet()
        ll.llama_backend_init()
        params = ll.llama_model_default_params()
        params.vocab_only, params.n_gpu_layers = vocabulary_only, gpu_layers
        self._model: Any = ll.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise EngineError(
                f"{path}: llama.cpp cannot load this file; it is damaged or of an architecture it does not know"
            )
        self._vocab: Any = ll.llama_model_get_vocab(self._model)
        self.name = self.metadata("general.name") or self.path.stem
        self.adds_bos = bool(ll.llama_vocab_get_add_bos(self._vocab))
        self.bos: int = ll.llama_vocab_bos(self._vocab)
        self.chat_template = self.metadata("tokenizer.chat_template")
        self.rows: int = ll.llama_vocab_n_tokens(self._vocab)
        self.context: int = ll.llama_model_n_ctx_train(self._model)

    def give_back(self) -> None:
        """Give back the pages of the file that were only read to lay weights out anew; what is used comes back by itself."""
        for begin, size in _mappings(self.path):
            _advise(begin, size)

    def close(self) -> None:
        if self._model:
            ll.llama_model_free(self._model)
            self._model = None

    @property
    def handle(self) -> Any:
        assert self._model, "the model is closed"
        return self._model

    def metadata(self, key: str) -> str | None:
        """A metadata value as text, or None."""
        size = ll.llama_model_meta_val_str(self.handle, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        ll.llama_model_meta_val_str(self.handle, key.encode(), buffer, size + 1)
        return buffer.value.decode("utf-8", "replace")

    def tokens(self) -> list[str]:
        """Spelling of every token, in the order of ids, as the file has it."""
        return [(ll.llama_vocab_get_text(self._vocab, i) or b"").decode("utf-8", "replace") for i in range(self.rows)]

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Token ids of `text`. With `special`, spellings of control tokens in it become those tokens."""
        data = text.encode("utf-8", "surrogatepass")
        room = len(data) + 8
        ids = (ctypes.c_int32 * room)()
        n = ll.llama_tokenize(self._vocab, data, len(data), ids, room, add_bos, special)
        if n < 0:
            raise EngineError(f"this vocabulary cannot tokenise the text ({len(data)} bytes)")
        return list(ids[:n])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes that `token` stands for; a character may be spread over several tokens."""
        buffer = ctypes.create_string_buffer(256)
        n = ll.llama_token_to_piece(self._vocab, token, buffer, 256, 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = ll.llama_token_to_piece(self._vocab, token, buffer, -n, 0, special)
        return buffer.raw[:n]

    def end_tokens(self) -> list[int]:
        """Ids that end a generation (end of text, end of turn)."""
        return [i for i in range(self.rows) if ll.llama_vocab_is_eog(self._vocab, i)]

    def control_tokens(self) -> list[int]:
        """Ids whose spelling in a text becomes the token only with `special`."""
        control = ll.LLAMA_TOKEN_ATTR_CONTROL | ll.LLAMA_TOKEN_ATTR_UNKNOWN
        return [i for i in range(self.rows) if ll.llama_vocab_get_attr(self._vocab, i) & control]


class Context:
    """One unified KV cache of `cells` cells, shared by up to `sequences` sequence ids.

    With `exact`, a row's bits do not depend on which rows are in the batch with it, as long as the cells of its
    sequence lie in the order of positions. It keeps V in float32, for which llama.cpp's CPU code has one attention
    loop, cell by cell; with K and V of one type it has three (cell by cell, tiled from 64 rows on, split over threads
    for one row from 512 cells on) that round differently.
    """

    def __init__(
        self, model: Model, cells: int, sequences: int = 1, *, threads: int = 1, batch: int = 512, exact: bool = False
    ) -> None:
        assert 1 <= sequences <= MAX_SEQUENCES
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = cells, batch, batch
        params.n_seq_max, params.kv_unified = sequences, True
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1
        params.type_k, params.type_v = F16, F32 if exact else F16
        self.model, self.cells, self.batch, self.sequences = model, cells, batch, sequences
        self._ctx: Any = ll.llama_init_from_model(model.handle, params)
        if not self._ctx:
            raise EngineError(f"{model.path.name}: no memory for a context of {cells} tokens; ask for a smaller one")
        self._memory: Any = ll.llama_get_memory(self._ctx)
        self._token = np.zeros(batch, np.int32)
        self._pos = np.zeros(batch, np.int32)
        self._n_seq = np.zeros(batch, np.int32)
        self._wanted = np.zeros(batch, np.int8)
        self._seq_ids = np.zeros((batch, sequences), np.int32)
        row = self._seq_ids.strides[0]
        self._seq_rows = self._seq_ids.ctypes.data + row * np.arange(batch, dtype=np.uintp)
        self._batch = ll.llama_batch(
            0,
            self._token.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            None,
            self._pos.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            self._n_seq.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            self._seq_rows.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def close(self) -> None:
        if self._ctx:
            ll.llama_free(self._ctx)
            self._ctx = None

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        wanted: Sequence[bool],
    ) -> npt.NDArray[np.float32]:
        """Run up to `batch` rows. Returns logits [wanted rows, V], valid until the next call.

        Raises EngineError if the cache has no room (nothing was run) or the computation failed.
        """
        n = len(tokens)
        assert 0 < n <= self.batch
        self._token[:n], self._pos[:n], self._wanted[:n] = tokens, positions, wanted
        for i, ids in enumerate(sequences):
            self._n_seq[i] = len(ids)
            self._seq_ids[i, : len(ids)] = ids
        self._batch.n_tokens = n
        code = ll.llama_decode(self._ctx, self._batch)
        if code == 1:
            raise EngineError(f"the context of {self.cells} tokens is full")
        if code:
            raise EngineError(f"llama.cpp could not run the batch (code {code})")
        return self._logits(int(np.count_nonzero(self._wanted[:n])))

    def _logits(self, rows: int) -> npt.NDArray[np.float32]:
        if not rows:
            return np.empty((0, self.model.rows), np.float32)
        address = ll.llama_get_logits(self._ctx)
        logits: npt.NDArray[np.float32] = np.ctypeslib.as_array(address, shape=(rows, self.model.rows))
        return logits

    def share(self, source: int, target: int, begin: int, end: int) -> None:
        """The cells of `source` at positions [begin, end) belong to `target` as well. Nothing is copied."""
        ll.llama_memory_seq_cp(self._memory, source, target, begin, end)

    def drop(self, sequence: int, begin: int = -1, end: int = -1) -> None:
        """`sequence` gives up its cells at positions [begin, end); a cell that belongs to none is free."""
        ll.llama_memory_seq_rm(self._memory, sequence, begin, end)

    def clear(self) -> None:
        ll.llama_memory_clear(self._memory, False)

    def saved(self, sequence: int) -> bytes:
        """The cells of `sequence`, for `restore` of another context of this model."""
        size = ll.llama_state_seq_get_size(self._ctx, sequence)
        buffer = (ctypes.c_uint8 * size)()
        return bytes(buffer[: ll.llama_state_seq_get_data(self._ctx, buffer, size, sequence)])

    def restore(self, sequence: int, state: bytes) -> bool:
        """Put saved cells at the same positions of `sequence`. False if there is no room, and then nothing is there."""
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if ll.llama_state_seq_set_data(self._ctx, buffer, len(state), sequence):
            return True
        self.drop(sequence)
        return False


def check_gguf(path: Path) -> None:
    """Raise EngineError unless `path` looks like a GGUF file: llama.cpp's own message would be lost in its log."""
    try:
        with path.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise EngineError(f"{path}: {e.strerror or e}") from None
    if magic != b"GGUF":
        raise EngineError(f"{path}: not a GGUF file")


def _mappings(path: Path) -> list[tuple[int, int]]:
    """(address, bytes) of the places in memory where Linux has mapped this file; elsewhere none."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    name, found = str(path.resolve()), list[tuple[int, int]]()
    for line in lines:
        if line.endswith(name) and line.split(maxsplit=5)[-1] == name:
            begin, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
            found.append((begin, end - begin))
    return found


def _advise(begin: int, size: int) -> None:
    """madvise(2), MADV_DONTNEED: harmless for pages of a file that nobody has written to, and advice, so it may fail."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise(begin, size, mmap.MADV_DONTNEED)
