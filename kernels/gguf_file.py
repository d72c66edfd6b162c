"""Reading GGUF files that may be truncated or hostile: every count is checked against the bytes left before it is believed.

Knows the container (header, metadata, tensor table; ggml, docs/gguf.md) and dequantises single tensors; knows nothing about
architectures. The file is mapped, not read: a tensor costs memory only while somebody holds it.

    GgufHeader(path)    the metadata, whatever the tensors are
    GgufFile(path)      that and the tensors
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from paceline.protocol.errors import EngineError

MAGIC = b"GGUF"
Value = Any  # a metadata scalar, string, numpy array or list of strings
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY, _BOOL = 8, 9, 7
PIECE = 1 << 22  # elements dequantised at a time
MAX_ENTRIES, MAX_TENSORS, MAX_NAME, MAX_DIMENSIONS = 65_536, 65_536, 65_535, 4


class UnreadKind(EngineError):
    """A tensor is of a type that is not dequantised here."""


@dataclass(frozen=True)
class TensorInfo:
    """shape: rows first (numpy order). offset: from the start of the file. kind: ggml's type number."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


class _Cursor:
    """Bounded reading of a mapped file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.at, self.path = data, 0, path

    def fail(self, what: str) -> EngineError:
        return EngineError(
            f"{self.path.name} is not a usable GGUF file: {what} (at byte {self.at:,}). Get the file again."
        )

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise self.fail(f"it ends after {len(self.data):,} bytes, in the middle of a value")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def string(self, limit: int) -> bytes:
        size = self.number("<Q")
        if size > limit:
            raise self.fail(f"a string claims {size:,} bytes")
        return self.take(size)

    def name(self) -> str:
        try:
            return self.string(MAX_NAME).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("a name is not UTF-8") from None

    def text(self) -> str:
        """A value may be a token that is no UTF-8: it is spelt as `llama` spells it."""
        return self.string(len(self.data)).decode("utf-8", "replace")

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array(self.number("<I"), self.number("<Q"))
        if kind not in _SCALARS:
            raise self.fail(f"metadata type {kind} is unknown")
        item = np.frombuffer(self.take(np.dtype(_SCALARS[kind]).itemsize), _SCALARS[kind])[0].item()
        return bool(item) if kind == _BOOL else item

    def array(self, kind: int, count: int) -> Value:
        left = len(self.data) - self.at
        size = 8 if kind == _STRING else np.dtype(_SCALARS[kind]).itemsize if kind in _SCALARS else 0
        if not size:
            raise self.fail(f"an array of metadata type {kind} is not read here")
        if count * size > left:
            raise self.fail(f"an array claims {count:,} entries, more than the file can hold")
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        return np.frombuffer(self.take(count * size), _SCALARS[kind])

    def tensor(self) -> TensorInfo:
        name, n = self.name(), self.number("<I")
        if not 0 < n <= MAX_DIMENSIONS:
            raise self.fail(f"tensor {name!r} claims {n} dimensions")
        shape = tuple(self.number("<Q") for _ in range(n))[::-1]
        kind, offset = self.number("<I"), self.number("<Q")
        return TensorInfo(name, shape, kind, offset, self.tensor_size(name, shape, kind))

    def tensor_size(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise self.fail(f"tensor {name!r} has the unknown type {kind}") from None
        count = 1
        for extent in shape:
            count *= extent
        if shape[-1] % block or count == 0:
            raise self.fail(f"tensor {name!r} of shape {shape} does not divide into blocks of {block}")
        return int(count // int(block) * int(size))


def _placed(cursor: _Cursor, infos: list[TensorInfo], alignment: Value) -> dict[str, TensorInfo]:
    """The tensor table with offsets from the file's start, each checked to lie inside the file."""
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.fail(f"its alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    placed: dict[str, TensorInfo] = {}
    for t in infos:
        if t.name in placed:
            raise cursor.fail(f"tensor {t.name!r} appears twice")
        if t.offset % alignment or start + t.offset + t.size > len(cursor.data):
            raise cursor.fail(f"tensor {t.name!r} lies beyond its end ({len(cursor.data):,} bytes)")
        placed[t.name] = TensorInfo(t.name, t.shape, t.kind, start + t.offset, t.size)
    return placed


class GgufHeader:
    """What a GGUF file says of itself before its tensors. Raises EngineError when it cannot be trusted."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # mmap refuses an empty file with a ValueError
            raise EngineError(f"{self.path} cannot be read as a GGUF file: {error}.") from error
        self._read(_Cursor(self._data, self.path))

    def _read(self, cursor: _Cursor) -> None:
        if cursor.take(4) != MAGIC:
            raise cursor.fail("it does not begin with GGUF")
        self.version = cursor.number("<I")
        if self.version not in (2, 3):
            raise cursor.fail(f"its version is {self.version}; versions 2 and 3 are read here")
        self.tensor_count, entry_count = cursor.number("<Q"), cursor.number("<Q")
        if self.tensor_count > MAX_TENSORS or entry_count > MAX_ENTRIES:
            raise cursor.fail(f"it claims {self.tensor_count:,} tensors and {entry_count:,} metadata entries")
        self.metadata: dict[str, Value] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        for _ in range(entry_count):
            start, key = cursor.at, cursor.name()
            if key in self.metadata:
                raise cursor.fail(f"the metadata key {key!r} appears twice")
            self.metadata[key] = cursor.value(cursor.number("<I"))
            self._spans[key] = start, cursor.at

    def entry(self, key: str) -> bytes:
        """The bytes of a metadata entry as they stand in the file: key, type and value."""
        start, stop = self._spans[key]
        return self._data[start:stop]

    def integers(self, key: str) -> NDArray[np.int64] | None:
        """An array of integers, or None where the key is not there."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise EngineError(f"{self.path.name}: {key} is not an array of integers.")
        return value.astype(np.int64)


class GgufFile(GgufHeader):
    """A GGUF file's metadata and tensors, by name. Raises EngineError when it cannot be trusted."""

    def _read(self, cursor: _Cursor) -> None:
        super()._read(cursor)
        infos = [cursor.tensor() for _ in range(self.tensor_count)]
        self.tensors = _placed(cursor, infos, self.metadata.get("general.alignment", 32))

    def _release(self, offset: int, size: int) -> None:
        """Let the pages that lie wholly in a span go; a later reading maps them again. So that walking through a file bigger than
        memory does not fill it: mapped pages count as ours until the system takes them."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (offset + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED, start, length)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes as [rows, bytes a row], still mapped."""
        info = self.info(name)
        data = np.frombuffer(self._data, np.uint8, info.size, info.offset)
        return data.reshape(int(np.prod(info.shape[:-1], dtype=np.int64)), -1)

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise EngineError(f"{self.path.name} has no tensor {name!r}.")
        return self.tensors[name]

    def array(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """The tensor dequantised, float32, rows first; a fresh array. start, stop: only those rows of a matrix."""
        info = self.info(name)
        kind = gguf.GGMLQuantizationType(info.kind)
        raw = self.raw(name)
        raw = raw[start:stop] if len(info.shape) == 2 else raw
        plain = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
        out = np.empty((len(raw), info.shape[-1]), np.float32)
        rows = max(1, PIECE // info.shape[-1])  # in pieces: the dequantiser holds several copies of what it is given
        try:
            for at in range(0, len(raw), rows):
                part = raw[at : at + rows]
                out[at : at + rows] = part.view(plain[kind]) if kind in plain else gguf.quants.dequantize(part, kind)
                self._release(info.offset + (at + (start or 0)) * raw.shape[1], part.nbytes)
        except NotImplementedError:
            raise UnreadKind(f"{self.path.name}: tensor {name!r} is {kind.name}, which is not read here.") from None
        return out if len(info.shape) == 2 else out.reshape(info.shape)
