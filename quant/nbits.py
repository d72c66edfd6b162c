"""A GGUF matrix in the blocks of ONNX Runtime's `MatMulNBits`: w = (code - middle) * scale + offset, 32 weights to a scale.

Q4_0, Q4_1 and Q4_K are held exactly in 4 bits, Q8_0 and IQ4_NL in 8; anything else, and those two where 4 bits are asked
for, by the nearest code. `MatMulNBits` itself has no offset that its fast kernels take unrounded; since in a block
sum(((c - m) s + o) x) = sum((c - m) s x) + o sum(x), the graph adds o times the sum of the block's inputs instead
(`onnx_graph`). NumPy only; layouts are ggml's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
from numpy.typing import NDArray
from paceline.kernels.gguf_file import GgufFile

from .affine import BYTES, SUPER
from .errors import WeightsError

BLOCK = 32
PIECE = 1 << 15  # blocks fitted at a time
Codes = NDArray[np.uint8]


@dataclass(frozen=True)
class Blocks:
    """codes [R, C / 32, 32] below 2 ** bits, their middle being 2 ** (bits - 1); scales and offsets [R, C / 32]."""

    bits: int
    codes: Codes
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32] | None = None

    @property
    def packed(self) -> Codes:
        """[R, C / 32, 4 * bits] bytes; of two 4-bit codes the first is in the low half."""
        if self.bits == 8:
            return self.codes
        pairs: Codes = np.bitwise_or(self.codes[..., 0::2], np.left_shift(self.codes[..., 1::2], np.uint8(4)))
        return pairs

    def values(self) -> NDArray[np.float32]:
        """The weights [R, C]."""
        w = (self.codes.astype(np.float32) - np.float32(1 << (self.bits - 1))) * self.scales[..., None]
        return (w if self.offsets is None else w + self.offsets[..., None]).reshape(len(w), -1)

    def widened(self) -> Blocks:
        """The same values in 8-bit codes."""
        return self if self.bits == 8 else Blocks(8, self.codes + np.uint8(120), self.scales, self.offsets)


def blocks_of(file: GgufFile, name: str, bits: int = 0) -> Blocks:
    """The matrix `name` in `bits` bits; 0: in as few as hold it exactly, and 8 where none do. Raises `WeightsError`."""
    info = file.info(name)
    if info.shape[-1] % BLOCK:
        raise WeightsError(
            f"{file.path.name}: rows of {name!r} ({info.shape[-1]}) do not divide into blocks of {BLOCK}."
        )
    kind = kind_of(file, name)
    if holds(kind, bits):
        exact = _EXACT[kind](file.raw(name))
        return exact.widened() if bits == 8 else exact
    return nearest(file.array(name), bits or 8)


def kind_of(file: GgufFile, name: str) -> str:
    """ggml's name of the tensor's type."""
    return str(gguf.GGMLQuantizationType(file.info(name).kind).name)


def holds(kind: str, bits: int) -> bool:
    """Whether codes of `bits` bits (0: of either width) hold every value of that kind exactly."""
    return kind in _EXACT and bits in (0, _BITS[kind], 8)


def joined(parts: list[Blocks]) -> Blocks:
    """Matrices over the same inputs as one, rows below rows, in the widest of their codes."""
    if len({p.bits for p in parts}) > 1:
        parts = [p.widened() for p in parts]
    offsets = None
    if any(p.offsets is not None for p in parts):
        offsets = np.concatenate([np.zeros_like(p.scales) if p.offsets is None else p.offsets for p in parts])
    codes, scales = np.concatenate([p.codes for p in parts]), np.concatenate([p.scales for p in parts])
    return Blocks(parts[0].bits, codes, scales, offsets)


def nearest(w: NDArray[np.float32], bits: int) -> Blocks:
    """w [R, C] rounded to symmetric codes: the scale of a block is that of a few candidates with the least squared error."""
    flat = w.reshape(-1, BLOCK)
    codes, scales = np.empty(flat.shape, np.uint8), np.empty(len(flat), np.float32)
    for at in range(0, len(flat), PIECE):
        codes[at : at + PIECE], scales[at : at + PIECE] = _fitted(flat[at : at + PIECE], bits)
    return Blocks(bits, codes.reshape(len(w), -1, BLOCK), scales.reshape(len(w), -1))


def error(w: NDArray[np.float32], blocks: Blocks) -> float:
    """Squared error of `blocks` as a share of the squares of w [R, C]."""
    return float(((blocks.values() - w) ** 2).sum(dtype=np.float64) / max(float((w**2).sum(dtype=np.float64)), 1e-30))


def _fitted(w: NDArray[np.float32], bits: int) -> tuple[Codes, NDArray[np.float32]]:
    """w [N, 32] as codes and scales [N]. The largest weight takes the code furthest from the middle, or nearly so."""
    middle = 1 << (bits - 1)
    most = np.take_along_axis(w, np.abs(w).argmax(1)[:, None], 1)[:, 0]
    best = np.full(len(w), np.inf, np.float32)
    codes, scales = np.full(w.shape, middle, np.uint8), np.zeros(len(w), np.float32)
    for reach in (middle, middle - 0.5, middle - 1) if bits == 8 else np.linspace(middle - 2, middle + 1, 13):
        scale = most / np.float32(-reach)
        q = np.clip(np.rint(w / np.where(scale == 0, np.float32(1), scale)[:, None]), -middle, middle - 1)
        scale = (w * q).sum(1) / np.maximum((q * q).sum(1), np.float32(1))  # the best for these codes
        wrong = ((w - q * scale[:, None]) ** 2).sum(1)
        better = wrong < best
        best, scales = np.where(better, wrong, best), np.where(better, scale, scales)
        codes = np.where(better[:, None], (q + middle).astype(np.uint8), codes)
    return codes, scales


def _halves(packed: Codes) -> Codes:
    """[..., 16] bytes as [..., 32] codes: the low halves, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _float16(raw: Codes) -> NDArray[np.float32]:
    """[..., 2] bytes as float32 [...]."""
    return np.ascontiguousarray(raw).view(np.float16)[..., 0].astype(np.float32)


def _q4_0(raw: Codes) -> Blocks:
    b = raw.reshape(len(raw), -1, 18)
    return Blocks(4, _halves(b[..., 2:]), _float16(b[..., :2]))


def _q4_1(raw: Codes) -> Blocks:
    b = raw.reshape(len(raw), -1, 20)
    scale = _float16(b[..., :2])
    return Blocks(4, _halves(b[..., 4:]), scale, 8 * scale + _float16(b[..., 2:4]))


def _q8_0(raw: Codes) -> Blocks:
    b = raw.reshape(len(raw), -1, 34)
    return Blocks(8, b[..., 2:] ^ np.uint8(128), _float16(b[..., :2]))


def _iq4_nl(raw: Codes) -> Blocks:
    b = raw.reshape(len(raw), -1, 18)
    grid = np.array(gguf.quants.IQ4_NL.kvalues, np.int16) + 128
    return Blocks(8, grid.astype(np.uint8)[_halves(b[..., 2:])], _float16(b[..., :2]))


def _q4_k(raw: Codes) -> Blocks:
    b = raw.reshape(len(raw), -1, BYTES)
    sixes = gguf.quants.Q4_K.get_scale_min(b[..., 4:16].reshape(-1, 12))
    scale, low = (part.reshape(*b.shape[:2], 8) for part in sixes)
    d, dmin = _float16(b[..., :2])[..., None] * scale, _float16(b[..., 2:4])[..., None] * low  # [R, C / 256, 8]
    pairs = b[..., 16:].reshape(*b.shape[:2], 4, 1, BLOCK)
    codes = np.concatenate([pairs & 15, pairs >> 4], 3)
    shape = (len(raw), b.shape[1] * (SUPER // BLOCK))
    return Blocks(4, codes.reshape(*shape, BLOCK), d.reshape(shape), (8 * d - dmin).reshape(shape))


_EXACT: dict[str, Callable[[Codes], Blocks]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q8_0": _q8_0, "IQ4_NL": _iq4_nl,
}  # fmt: skip
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q8_0": 8, "IQ4_NL": 8}
