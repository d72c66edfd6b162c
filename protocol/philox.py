"""Counter-based noise: Philox-4x32-10 and Gumbel variates, as arrays.

The generator is that of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). One
block gives four 32-bit words; token `v` at absolute position `i` under seed `s` uses

    key = (s mod 2^32, s div 2^32)    counter = (v div 4, 0, i mod 2^32, i div 2^32)    word = v mod 4

so noise depends on nothing but (s, i, v): not on the step, the batch, or who asks. Counters whose second word is 1 hold
the uniform numbers by which draws are accepted (`uniforms`). The same integers are computed by
the torch and Triton code of `paceline.kernels`; one file of test vectors holds all three to it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.integer]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float64]
Counter = npt.NDArray[np.uint64] | int

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
_UNIFORM = 1  # second word of the counter: 0 is the Gumbel noise's
_MANY = 1024  # tokens from which it pays to look how they lie


def philox(counter: Sequence[Counter], key: tuple[int, int]) -> Words:
    """Philox-4x32-10 blocks [n, 4] of the counters, whose four words are arrays [n] or numbers, under one key."""
    n = np.broadcast(*counter).size
    even, odd = np.empty((2, n), np.uint64), np.empty((2, n), np.uint64)  # words 0 and 2, words 1 and 3
    even[0], odd[0], even[1], odd[1] = counter
    product = np.empty_like(even)
    crossed = product[::-1]  # each product goes to the other pair
    low, high = key
    for _ in range(_ROUNDS):
        np.multiply(even, _MULTIPLIERS, out=product)
        np.right_shift(crossed, _SHIFT, out=even)
        even ^= odd
        even ^= np.array([[low], [high]], np.uint64)
        np.bitwise_and(crossed, _LOW, out=odd)
        low, high = (low + _WEYL[0]) & 0xFFFFFFFF, (high + _WEYL[1]) & 0xFFFFFFFF
    out = np.empty((n, 4), np.uint32)
    out[:, 0], out[:, 1], out[:, 2], out[:, 3] = even[0], odd[0], even[1], odd[1]
    return out


def blocks(seed: int, position: int, first_word: npt.NDArray[np.uint64], stream: int = 0) -> Words:
    """Philox blocks [n, 4] for the counters (first_word[n], stream, position)."""
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    return philox((first_word, stream, position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF), key)


def uniforms(seed: int, position: int, count: int) -> Floats:
    """`count` uniform numbers [n] in (0, 1) for one position: a stream of its own, independent of the Gumbel noise there."""
    rows = blocks(seed, position, np.arange((count + 3) // 4, dtype=np.uint64), _UNIFORM)
    out: Floats = (rows.ravel()[:count].astype(np.float64) + 0.5) * 2.0**-32
    return out


def words(seed: int, position: int, tokens: Ids) -> Words:
    """The 32-bit random words [n] of `tokens` [n] at one position."""
    n = len(tokens)
    if n > _MANY and (int(tokens.max()) - int(tokens.min())) >> 2 < n:
        return _dense_words(seed, position, tokens)
    every = blocks(seed, position, (tokens >> 2).astype(np.uint64))
    out: Words = every[np.arange(n), tokens & 3]
    return out


def _dense_words(seed: int, position: int, tokens: Ids) -> Words:
    """The same for tokens that lie close together: whole blocks cost less than a block for each token."""
    low, high = int(tokens.min()), int(tokens.max())
    row: Words = blocks(seed, position, np.arange(low >> 2, (high >> 2) + 1, dtype=np.uint64)).ravel()
    start = low & ~3  # the token that the row begins with
    if high - low == len(tokens) - 1 and bool(np.all(tokens[1:] > tokens[:-1])):
        return row[low - start : high + 1 - start]
    return row[tokens - start]


def gumbel(seed: int, position: int, tokens: Ids) -> Floats:
    """Standard Gumbel noise G(seed, position, token) [n] = -log(-log u), u = 1 - (word + 1/2) / 2^32, always in (0, 1).

    Written with log1p of the complement, so that the words that matter (small ones win the argmax) keep all their
    bits in single precision as well.
    """
    v = (words(seed, position, tokens).astype(np.float64) + 0.5) * 2.0**-32
    out: Floats = -np.log(-np.log1p(-v))
    return out
