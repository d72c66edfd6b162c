"""A draft as the difference to its target's file: a fifth of the draft's size, for shipping where the target can be had anyway.

A corrected and trained draft still has the code that plain rounding on its own scales would give for four weights of five; what
is stored is its GGUF header, its scales, and the differences of codes, compressed. Applying gives the draft file back byte
for byte, which its digest proves. NumPy only: the device applies patches.

Layout: magic, u32 length of a JSON table, the table, then blobs as the table lists them, each compressed with LZMA.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from paceline.kernels.gguf_file import GgufFile, TensorInfo

from .affine import q4_k
from .errors import DraftError
from .landing import landing

MAGIC = b"PACELINE-PATCH-1\n"
BLOCK, BLOCK_BYTES = 32, 18
#: Codes of the 4-bit kinds by ggml type number: Q4_0 and IQ4_NL.
CODES = {2: tuple(range(-8, 8)), 20: (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)}
Q4_K = 12  # ggml's type number
MAX_TABLE, MAX_FILE = 1 << 24, 1 << 36
Bytes = NDArray[np.uint8]
Step = Callable[[int, int], None]


def _silent(done: int, total: int) -> None: ...


def nearest_places(w: NDArray[np.float32], scales: NDArray[np.float16], codes: tuple[int, ...]) -> Bytes:
    """Place in the code table of the code nearest to each weight, [blocks, 32]. w: [blocks, 32], scales: [blocks]."""
    d = scales.astype(np.float32)[:, None]
    table = np.array(codes, np.float32)
    middles = (table[1:] + table[:-1]) / 2
    return np.searchsorted(middles, w / np.where(d == 0, np.float32(1), d)).astype(np.uint8)


def unpacked(raw: Bytes) -> tuple[NDArray[np.float16], Bytes]:
    """Scales [blocks] and places [blocks, 32] of a tensor of 4-bit blocks."""
    blocks = raw.reshape(-1, BLOCK_BYTES)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16)[:, 0]
    return scales, np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)


def repacked(scales: NDArray[np.float16], places: Bytes) -> Bytes:
    """The inverse of `unpacked`: the tensor's bytes, flat."""
    body = places[:, :16] | (places[:, 16:] << 4)
    return np.concatenate([np.ascontiguousarray(scales).view(np.uint8).reshape(-1, 2), body], axis=1).reshape(-1)


def _pack(data: NDArray[np.generic]) -> bytes:
    return lzma.compress(data.tobytes(), preset=6)


def _unpack(data: bytes, size: int) -> Bytes:
    """Exactly `size` bytes, or an error; a stream that would expand further is not followed."""
    stream = lzma.LZMADecompressor(memlimit=1 << 27)
    out = stream.decompress(data, max_length=size + 1)
    if len(out) != size or not stream.eof or stream.unused_data:
        raise ValueError(f"a blob holds {len(out):,} bytes instead of {size:,}")
    return np.frombuffer(out, np.uint8)


def _encoded(draft: GgufFile, target: GgufFile, info: TensorInfo, source: str) -> tuple[str, list[bytes]]:
    """How a tensor is stored and its blobs: as the target's own bytes, made from them anew, as differences of codes, or whole."""
    raw = draft.raw(info.name).reshape(-1)
    if source in target.tensors:
        theirs = target.info(source)
        if (
            theirs.kind == info.kind
            and theirs.shape == info.shape
            and np.array_equal(raw, target.raw(source).reshape(-1))
        ):
            return "copy", []
        if (
            info.kind == Q4_K
            and theirs.shape == info.shape
            and np.array_equal(raw, q4_k(target.array(source)).reshape(-1))
        ):
            return "q4_k", []
        if info.kind in CODES and theirs.shape == info.shape:
            scales, places = unpacked(raw)
            base = nearest_places(target.array(source).reshape(-1, BLOCK), scales, CODES[info.kind])
            delta = (places - base) & 15
            low = scales.view(np.uint8).reshape(-1, 2)
            return "codes", [_pack(low[:, 0]), _pack(low[:, 1]), _pack(delta[:, :16] | (delta[:, 16:] << 4))]
    return "whole", [_pack(raw)]


def make(draft_path: Path, target_path: Path, patch: Path, layers: list[int], step: Step = _silent) -> None:
    """Write the patch that makes the draft from the target's file. layers: which of the target's layers the draft's are."""
    draft, target = GgufFile(draft_path), GgufFile(target_path)
    infos = sorted(draft.tensors.values(), key=lambda t: t.offset)
    table: list[dict[str, Any]] = []
    blobs = [_pack(np.frombuffer(draft_path.read_bytes()[: infos[0].offset], np.uint8))]
    for i, info in enumerate(infos):
        source = info.name
        if source.startswith("blk."):
            _, number, rest = source.split(".", 2)
            source = f"blk.{layers[int(number)]}.{rest}"
        how, stored = _encoded(draft, target, info, source)
        entry = {"source": source, "how": how, "kind": info.kind, "offset": info.offset, "size": info.size}
        table.append(entry | {"blobs": [len(b) for b in stored]})
        blobs += stored
        step(i + 1, len(infos))
    head = {"header": [len(blobs[0]), infos[0].offset], "size": draft_path.stat().st_size, "tensors": table}
    head |= {"draft": _digest(draft_path), "target": _digest(target_path)}
    text = json.dumps(head).encode()
    with landing(patch) as part, part.open("wb") as out:
        out.write(MAGIC + struct.pack("<I", len(text)) + text)
        out.writelines(blobs)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _table(file: BinaryIO) -> dict[str, Any]:
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin as one")
    (length,) = struct.unpack("<I", file.read(4))
    if length > MAX_TABLE:
        raise ValueError("its table is too long")
    table: dict[str, Any] = json.loads(file.read(length))
    if not 0 < table["size"] <= MAX_FILE or not 0 < table["header"][1] <= table["size"]:
        raise ValueError("its sizes cannot be")
    return table


def apply(patch: Path, target_path: Path, draft: Path, step: Step = _silent) -> None:
    """Write the draft's file from the patch and the target's. Raises `DraftError` when either is not the one it was made with."""
    target = GgufFile(target_path)
    try:
        with patch.open("rb") as file:
            table = _table(file)
            if _digest(target_path) != table["target"]:
                raise DraftError(
                    f"{patch.name} belongs to another file than {target_path.name}; fetch the target again."
                )
            with landing(draft, needed=table["size"]) as part:
                _rebuild(file, table, target, part, step)
                if _digest(part) != table["draft"]:
                    raise ValueError("what it gives is not the draft it promises")
    except (OSError, ValueError, KeyError, TypeError, IndexError, struct.error, lzma.LZMAError) as error:
        raise DraftError(f"{patch} is not a usable draft patch: {error}. Get it again.") from error


def _rebuild(file: BinaryIO, table: dict[str, Any], target: GgufFile, part: Path, step: Step) -> None:
    with part.open("wb") as out:
        out.write(_unpack(file.read(table["header"][0]), table["header"][1]).tobytes())
        for i, entry in enumerate(table["tensors"]):
            if not out.tell() <= entry["offset"] <= entry["offset"] + entry["size"] <= table["size"]:
                raise ValueError(f"a tensor lies at byte {entry['offset']:,}")
            out.write(bytes(entry["offset"] - out.tell()))
            out.write(_decoded(entry, [file.read(n) for n in entry["blobs"]], target).tobytes())
            step(i + 1, len(table["tensors"]))
        out.write(bytes(table["size"] - out.tell()))


def _decoded(entry: dict[str, Any], blobs: list[bytes], target: GgufFile) -> Bytes:
    if entry["how"] == "copy":
        return target.raw(entry["source"]).reshape(-1)
    if entry["how"] == "q4_k":
        return q4_k(target.array(entry["source"])).reshape(-1)
    if entry["how"] == "whole":
        return _unpack(blobs[0], entry["size"])
    blocks = entry["size"] // BLOCK_BYTES
    low, high, packed = (_unpack(b, n) for b, n in zip(blobs, (blocks, blocks, blocks * 16), strict=True))
    scales = np.stack([low, high], axis=1).view(np.float16)[:, 0]
    delta = packed.reshape(-1, 16)
    base = nearest_places(target.array(entry["source"]).reshape(-1, BLOCK), scales, CODES[entry["kind"]])
    return repacked(scales, (base + np.concatenate([delta & 15, delta >> 4], axis=1)) & 15)
