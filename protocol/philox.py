"""Counter-based noise: Philox-4x32-10 and Gumbel variates, as arrays.

The generator is that of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). One
block gives four 32-bit words; token `v` at absolute position `i` under seed `s` uses

    key = (s mod 2^32, s div 2^32)    counter = (v div 4, 0, i mod 2^32, i div 2^32)    word = v mod 4

so noise depends on nothing but (s, i, v): not on the step, the batch, or who asks. The same integers are computed by
the torch and Triton code of `paceline.kernels`; one file of test vectors holds all three to it.
"""

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.integer]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10

#: The largest value `gumbel` can take: the word 0 gives -log(-log1p(-2^-33)).
GUMBEL_MAX = float(-np.log(-np.log1p(-(2.0**-33))))


def blocks(seed: int, position: int, first_word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox blocks [4, n] (32-bit words held in uint64) for the counters (first_word[n], 0, position)."""
    c0 = first_word
    c1 = np.zeros_like(c0)
    c2 = np.full_like(c0, position & 0xFFFFFFFF)
    c3 = np.full_like(c0, (position >> 32) & 0xFFFFFFFF)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3))


def words(seed: int, position: int, tokens: Ids) -> Words:
    """The 32-bit random words [n] of `tokens` [n] at one position."""
    ids = tokens.astype(np.uint64)
    every_block = blocks(seed, position, ids >> np.uint64(2))
    return every_block[(ids & np.uint64(3)).astype(np.intp), np.arange(len(ids))].astype(np.uint32)


def gumbel(seed: int, position: int, tokens: Ids) -> Floats:
    """Standard Gumbel noise G(seed, position, token) [n] = -log(-log u), u = 1 - (word + 1/2) / 2^32, always in (0, 1).

    Written with log1p of the complement, so that the words that matter (small ones win the argmax) keep all their
    bits in single precision as well.
    """
    v = (words(seed, position, tokens).astype(np.float64) + 0.5) * 2.0**-32
    out: Floats = -np.log(-np.log1p(-v))
    return out
