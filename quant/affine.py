"""Q4_K: 4-bit codes with a scale and an offset for every 32 weights, themselves 6-bit numbers under two float16 of 256 weights.

It needs rows that divide by 256. Where a target's matrix lies on a 4-bit grid with offsets already (Q4_1, Q4_K), this holds it
nearly exactly, at the size of the symmetric 4-bit kinds. NumPy only; the layout is ggml's `block_q4_K`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SUPER, BLOCK, BYTES = 256, 32, 144
Floats = NDArray[np.float32]


def _six_bits(values: Floats) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """values >= 0 [S, 8] as float16 unit [S] and 6-bit multiples [S, 8]."""
    unit = (values.max(1) / np.float32(63)).astype(np.float16)
    wide = unit.astype(np.float32)[:, None]
    return unit, np.clip(np.rint(values / np.where(wide == 0, np.float32(1), wide)), 0, 63).astype(np.uint8)


def _codes(w: Floats, scale: Floats, offset: Floats) -> NDArray[np.uint8]:
    """Nearest codes of w [S, 8, 32] under scale, offset [S, 8]."""
    safe = np.where(scale == 0, np.float32(1), scale)[..., None]
    return np.clip(np.rint((w + offset[..., None]) / safe), 0, 15).astype(np.uint8)


def q4_k(w: Floats) -> NDArray[np.uint8]:
    """The bytes of w [R, C], C a multiple of 256, as [R, C / 256 * 144].

    Scale and offset of a block are its range, rounded to 6 bits; of the multiples next to each the pair with the least squared
    error is taken, so that a block already on such a grid keeps its codes.
    """
    blocks = np.asarray(w, np.float32).reshape(-1, 8, BLOCK)
    low = np.minimum(blocks.min(2), 0)
    unit, places = _six_bits((blocks.max(2) - low) / np.float32(15))
    low_unit, low_places = _six_bits(-low)
    d, dmin = unit.astype(np.float32)[:, None], low_unit.astype(np.float32)[:, None]
    best, chosen = (
        np.full(places.shape, np.inf, np.float32),
        (places, low_places, _codes(blocks, d * places, dmin * low_places)),
    )
    for move in (0, -1, 1):
        for low_move in (0, -1, 1):
            p = np.clip(places.astype(np.int16) + move, 0, 63).astype(np.uint8)
            m = np.clip(low_places.astype(np.int16) + low_move, 0, 63).astype(np.uint8)
            codes = _codes(blocks, d * p, dmin * m)
            error = ((codes * (d * p)[..., None] - (dmin * m)[..., None] - blocks) ** 2).sum(2)
            better = error < best
            best = np.where(better, error, best)
            chosen = (
                np.where(better, p, chosen[0]),
                np.where(better, m, chosen[1]),
                np.where(better[..., None], codes, chosen[2]),
            )
    return _packed(unit, low_unit, *chosen).reshape(len(w), -1)


def _packed(
    unit: NDArray[np.float16],
    low_unit: NDArray[np.float16],
    scale: NDArray[np.uint8],
    offset: NDArray[np.uint8],
    codes: NDArray[np.uint8],
) -> NDArray[np.uint8]:
    """ggml's order: two float16, twelve bytes of 6-bit pairs, then 64 weights to 32 bytes, the first 32 in the low nibbles."""
    out = np.empty((len(unit), BYTES), np.uint8)
    out[:, 0:2], out[:, 2:4] = unit.view(np.uint8).reshape(-1, 2), low_unit.view(np.uint8).reshape(-1, 2)
    out[:, 4:8] = scale[:, :4] | ((scale[:, 4:] >> 4) << 6)
    out[:, 8:12] = offset[:, :4] | ((offset[:, 4:] >> 4) << 6)
    out[:, 12:16] = (scale[:, 4:] & 15) | ((offset[:, 4:] & 15) << 4)
    pairs = codes.reshape(-1, 4, 2, BLOCK)
    out[:, 16:] = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)
    return out
