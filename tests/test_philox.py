"""Philox and Gumbel noise against published answers, NumPy's own generator, and plain integers."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from paceline.protocol.philox import gumbel, philox, uniforms, words

VECTORS = json.loads((Path(__file__).parent / "vectors" / "philox_gumbel.json").read_text())

# Multipliers and Weyl constants of Salmon et al. (2011), by word width in bits.
CONSTANTS = {
    32: ((0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)),
    64: ((0xD2E7470EE14C6C93, 0xCA5A826395121157), (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)),
}


def reference(counter: tuple[int, ...], key: tuple[int, ...], width: int) -> list[int]:
    """Philox-4x`width`-10 in Python's integers."""
    (m0, m1), weyl = CONSTANTS[width]
    low = 2**width - 1
    c0, c1, c2, c3 = counter
    for round_ in range(10):
        k0, k1 = ((k + round_ * w) & low for k, w in zip(key, weyl, strict=True))
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (p1 >> width) ^ c1 ^ k0, p1 & low, (p0 >> width) ^ c3 ^ k1, p0 & low
    return [c0, c1, c2, c3]


def word(seed: int, position: int, token: int) -> int:
    counter = (token >> 2, 0, position & 0xFFFFFFFF, position >> 32)
    return reference(counter, (seed & 0xFFFFFFFF, seed >> 32), 32)[token & 3]


def test_the_reference_is_numpys_philox_at_64_bits() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        counter = rng.integers(0, 2**64, 4, dtype=np.uint64)
        key = rng.integers(0, 2**64, 2, dtype=np.uint64)
        numbers = np.random.Philox(counter=counter, key=key).random_raw(4)
        following = sum(c << 64 * i for i, c in enumerate(counter.tolist())) + 1  # NumPy counts up before it draws
        words_of_it = tuple(following >> 64 * i & 2**64 - 1 for i in range(4))
        assert reference(words_of_it, tuple(key.tolist()), 64) == numbers.tolist()


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # the known answers that Random123 ships (kat_vectors, philox4x32, 10 rounds)
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], answer: str) -> None:
    expected = [int(x, 16) for x in answer.split()]
    assert reference(counter, key, 32) == expected
    columns = tuple(np.full(3, c, np.uint64) for c in counter)
    assert philox(columns, key).tolist() == [expected] * 3


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda c: f"{c['seed']}-{c['position']}")
def test_the_shared_vectors(case: dict[str, list[int]]) -> None:
    seed, position, tokens = case["seed"], case["position"], np.array(case["tokens"])
    assert [word(seed, position, t) for t in case["tokens"]] == case["words"]
    assert words(seed, position, tokens).tolist() == case["words"]
    np.testing.assert_allclose(gumbel(seed, position, tokens), case["gumbel"], rtol=1e-14)


def test_a_whole_vocabulary() -> None:
    case = VECTORS["whole_vocabulary"]
    drawn = words(case["seed"], case["position"], np.arange(case["size"])).astype("<u4")
    assert hashlib.sha256(drawn.tobytes()).hexdigest() == case["sha256_of_words_little_endian"]


def test_noise_does_not_depend_on_who_is_asked_about_besides() -> None:
    """Every way to lay out the work gives a token the same integer: dense, with gaps, sparse, in another order, alone."""
    rng = np.random.default_rng(1)
    whole = words(3, 99, np.arange(20_000, dtype=np.int32))
    shifted = np.arange(4_321, 9_999)
    gaps = np.flatnonzero(rng.random(20_000) < 0.5)
    sparse = np.sort(rng.choice(20_000, 2_000, replace=False))
    few = np.array([19_999, 3, 17])
    for tokens in (shifted, gaps, sparse, few, rng.permutation(20_000), shifted[::-1], np.array([], dtype=np.int64)):
        assert words(3, 99, tokens).tolist() == whole[tokens].tolist()
        assert gumbel(3, 99, tokens).tolist() == gumbel(3, 99, np.arange(20_000))[tokens].tolist()


def test_every_word_gives_finite_noise() -> None:
    extremes = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], dtype=np.uint32)
    v = (extremes.astype(np.float64) + 0.5) * 2.0**-32
    assert np.all((v > 0) & (v < 1))
    noise = -np.log(-np.log1p(-v))
    assert np.isfinite(noise).all()
    assert noise[0] == pytest.approx(33 * np.log(2))
    assert np.all(np.diff(noise) < 0)  # a smaller word is a larger noise


def test_noise_is_gumbel() -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)) at alpha 1e-4, and no correlation between neighbours in any argument."""
    n = 100_000
    noise = np.sort(gumbel(11, 5, np.arange(n)))
    distance = np.abs(np.exp(-np.exp(-noise)) - (np.arange(n) + 0.5) / n).max()
    assert distance < 2.23 / np.sqrt(n)
    base = gumbel(11, 5, np.arange(n))
    for other in (gumbel(12, 5, np.arange(n)), gumbel(11, 6, np.arange(n)), gumbel(11, 5, np.arange(1, n + 1))):
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / np.sqrt(n)


def test_uniform_numbers_are_a_stream_of_their_own() -> None:
    seed, position = (7 << 32) + 5, (3 << 32) + 11
    expected = [w for block in range(3) for w in reference((block, 1, 11, 3), (5, 7), 32)]
    assert uniforms(seed, position, 9).tolist() == [(w + 0.5) / 2**32 for w in expected[:9]]
    assert not set(uniforms(seed, position, 8)) & {
        (w + 0.5) / 2**32 for w in words(seed, position, np.arange(8)).tolist()
    }
    assert uniforms(seed, position, 0).tolist() == []
