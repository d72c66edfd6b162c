"""The choice of a token against a slow, obvious reference, and its distribution against the exact softmax."""

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.protocol.philox import gumbel, philox
from paceline.protocol.sampling import (
    History,
    Sampling,
    adjusted,
    choose,
    kth_largest,
    largest,
    log_softmax,
    rank,
    survivors,
)

Row = npt.NDArray[np.float32]
DRAWS = 200_000
NORMAL_QUANTILE = 3.719  # of 1 - 1e-4


# ---- the obvious reference: plain Python over a list of logits


def reference_logits(logits: Row, p: Sampling, prompt: list[int], text: list[int]) -> list[float]:
    x = [float(v) for v in logits]
    for token, bias in p.logit_bias:
        if token < len(x):
            x[token] += bias
    for t in {t for t in prompt + text if t < len(x)}:
        x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
        if t in text:
            x[t] -= p.frequency_penalty * text.count(t) + p.presence_penalty
    return x


def reference_kept(x: list[float], p: Sampling) -> list[int]:
    scale = 1.0 if p.temperature_last else p.temperature
    kept = list(range(len(x)))
    if 0 < p.top_k < len(x):
        edge = sorted((x[i] for i in kept), reverse=True)[p.top_k - 1]
        kept = [i for i in kept if x[i] >= edge]
    mass = {i: np.exp(x[i] / scale - max(x) / scale) for i in kept}
    if p.top_p < 1:
        total, so_far, edge = sum(mass.values()), 0.0, 0.0
        for i in sorted(kept, key=lambda i: -mass[i]):
            so_far, edge = so_far + mass[i], mass[i]
            if so_far >= p.top_p * total:
                break
        kept = [i for i in kept if mass[i] >= edge]
    if p.min_p > 0:
        kept = [i for i in kept if mass[i] >= p.min_p]
    return kept


def reference_rank(logits: Row, p: Sampling, position: int, prompt: list[int], text: list[int]) -> list[int]:
    x = reference_logits(logits, p, prompt, text)
    if p.temperature < 1e-5:
        return sorted(range(len(x)), key=lambda i: (-x[i], i))
    score = {i: x[i] / p.temperature + gumbel(p.seed, position, np.array([i]))[0] for i in reference_kept(x, p)}
    return sorted(score, key=lambda i: (-score[i], i))


def history(prompt: list[int], text: list[int]) -> History:
    return History(prompt, text)


def row(seed: int, size: int, spread: float = 3.0) -> Row:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


params = st.builds(
    Sampling,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 1e-6, 0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 10**6]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.31, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    logit_bias=st.sampled_from([(), ((2, 5.0), (3, -100.0), (10**9, 7.0))]),
    temperature_last=st.booleans(),
)
tokens = st.lists(st.sampled_from([0, 1, 2, 5, 8, 400]), max_size=6)


@settings(max_examples=300, deadline=None)
@given(params, st.integers(0, 10**6), st.sampled_from([1, 2, 9, 50, 700]), st.integers(0, 50), tokens, tokens)
def test_every_choice_is_the_references(
    p: Sampling, position: int, size: int, seed: int, prompt: list[int], text: list[int]
) -> None:
    logits = row(seed, size)
    expected = reference_rank(logits, p, position, prompt, text)
    ids, scores = rank(logits, p, position, history(prompt, text), 8)
    assert ids.tolist() == expected[:8]
    assert np.all(np.diff(scores) <= 0)
    assert choose(logits, p, position, history(prompt, text)) == expected[0]


@pytest.mark.parametrize("p", [
    Sampling(temperature=0.8, seed=3), Sampling(temperature=0.01, seed=3), Sampling(temperature=50, seed=3),
    Sampling(temperature=0.8, seed=3, top_p=0.95), Sampling(temperature=2, seed=3, min_p=1e-4),
    Sampling(temperature=1, top_k=5000), Sampling(temperature=3, top_p=0.9),
    Sampling(), Sampling(logit_bias=((5, 3.0),)), Sampling(temperature=0.8, seed=4, repetition_penalty=1.2),
])  # fmt: skip
def test_the_short_cuts_over_a_real_vocabulary_lose_nothing(p: Sampling) -> None:
    """49,152 logits, where noise is drawn in chunks and only for tokens that can win, against noise for every token."""
    seen = history([1, 2, 3], [4, 4, 5])
    for position in range(12):
        logits = row(position, 49_152)
        logits[position * 4000 : position * 4000 + 30] += 9
        x = adjusted(logits, p, seen)
        score = x.copy()
        if not p.greedy:
            score = np.full(len(x), -np.inf)
            kept = survivors(x, p)
            score[kept] = x[kept] / p.temperature + gumbel(p.seed, position, np.arange(len(x)))[kept]
        expected = np.argsort(-score, kind="stable")[: min(8, int((score > -np.inf).sum()))]
        assert rank(logits, p, position, seen, 8)[0].tolist() == expected.tolist()
        assert choose(logits, p, position, seen) == expected[0]


def test_top_p_is_computed_over_what_top_k_leaves_and_min_p_over_both() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    p = Sampling(temperature=1)
    assert survivors(logits, replace(p, top_p=0.69)).tolist() == [0, 1]
    assert survivors(logits, replace(p, top_k=2, top_p=0.56)).tolist() == [0]  # 0.4 / 0.7 = 0.571
    assert survivors(logits, replace(p, top_k=3, min_p=0.6)).tolist() == [0, 1]
    hot = replace(p, temperature=2.0, top_p=0.69)  # at temperature 2: 0.326, 0.282, 0.230, 0.163
    assert survivors(logits, hot).tolist() == [0, 1, 2]
    assert survivors(logits, replace(hot, temperature_last=True)).tolist() == [0, 1]


def test_bias_comes_before_penalties_and_repetition_before_the_others() -> None:
    logits = np.array([1.0, -1.0, 0.0], np.float32)
    p = Sampling(repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((1, 3.0),))
    x = adjusted(logits, p, history([0], [1, 1]))
    assert x.tolist() == [0.5, (-1 + 3) / 2 - 0.5 - 2 * 0.25, 0.0]


def test_a_history_grows_alike_in_every_way() -> None:
    whole = history([1, 7, 1], [7, 2, 9, 2])
    grown = history([1, 7, 1], [7])
    before = [a.tolist() for a in grown.seen(8)]
    ahead = grown.after([2]).after([9, 2])
    assert [a.tolist() for a in grown.seen(8)] == before, "looking ahead leaves the text as it is"
    grown.extend([2, 9, 2])
    for h in (ahead, grown):
        assert [a.tolist() for a in h.seen(100)] == [a.tolist() for a in whole.seen(100)]
    assert whole.seen(8)[0].tolist() == [1, 7, 2]
    assert whole.seen(8)[1].tolist() == [0, 1, 2]


# ---- temperature zero, seeds, odd rows


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy(temperature: float) -> None:
    p = Sampling(temperature=temperature, seed=9, top_k=2, top_p=0.1, min_p=0.5)
    for seed in range(20):
        logits = row(seed, 5000)
        assert choose(logits, p, seed) == int(np.argmax(logits))
        assert rank(logits, p, seed, None, 5)[0].tolist() == np.argsort(-logits, kind="stable")[:5].tolist()


def test_a_cold_temperature_is_all_but_greedy_and_does_not_overflow() -> None:
    logits = row(1, 5000) * np.float32(1e30)
    with np.errstate(all="raise", under="ignore"):
        assert choose(logits, Sampling(temperature=1.1e-5, seed=1), 0) == int(np.argmax(logits))


def test_the_seed_matters_and_repeats() -> None:
    logits = np.zeros(1000, np.float32)
    texts = [
        [choose(logits, Sampling(seed=s, temperature=1), i) for i in range(20)] for s in (1, 2, 1, 2**32 + 1, 2**63 - 1)
    ]
    assert texts[0] == texts[2]
    assert len({tuple(t) for t in texts}) == 4
    assert len(set(texts[0])) > 15, "the position matters as well"


@pytest.mark.parametrize("size", [1, 2, 255, 256, 300, 5000])
@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.5}, {"min_p": 1.0}])
def test_equal_logits(size: int, filters: dict[str, float]) -> None:
    """Filters keep ties, so all survive; greedy takes the lowest ids, in order."""
    logits = np.full(size, 2.5, np.float32)
    p = Sampling(temperature=1.0, seed=5, **filters)
    assert len(survivors(logits, p)) == size
    assert choose(logits, p, 3) == int(np.argmax(gumbel(5, 3, np.arange(size))))
    assert rank(logits, Sampling(), 3, None, 4)[0].tolist() == list(range(min(4, size)))


def test_masked_tokens_never_come_back() -> None:
    logits = np.full(3000, -np.inf, np.float32)
    logits[[5, 77]] = 1.0, 2.0
    for p in (
        Sampling(),
        Sampling(temperature=1),
        Sampling(temperature=1, top_p=0.99),
        Sampling(temperature=9, top_k=50),
    ):
        with np.errstate(all="raise", under="ignore"):
            assert sorted(rank(logits, p, 1, None, 8)[0].tolist()) == [5, 77]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("p", [Sampling(), Sampling(temperature=1), Sampling(presence_penalty=1.0)])
def test_damaged_logits_are_an_error(bad: float, p: Sampling) -> None:
    logits = row(0, 400)
    logits[123] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        choose(logits, p, 0, history([], []))
    with pytest.raises(FloatingPointError, match="not finite"):
        choose(np.full(4, -np.inf, np.float32), p, 0, history([], []))


def test_ids_beyond_the_vocabulary_are_never_chosen() -> None:
    """A row holds the real tokens only; bias and history may name padding ids, to no effect."""
    p = Sampling(temperature=2, seed=1, logit_bias=((10, 100.0), (2**31 - 1, 100.0)), repetition_penalty=0.1)
    chosen = {choose(row(i, 10), p, i, history([10, 11], [2**31 - 1])) for i in range(200)}
    assert max(chosen) < 10
    assert len(chosen) > 5


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 0.5000001, 3.0]), min_size=1, max_size=400), st.data())
def test_largest(values: list[float], data: st.DataObject) -> None:
    x = np.tile(np.array(values, np.float32), data.draw(st.sampled_from([1, 17])))
    k = data.draw(st.integers(1, len(x)))
    order = np.argsort(-x, kind="stable")
    assert kth_largest(x, k) == x[order[k - 1]]
    assert largest(x, k).tolist() == sorted(order[:k].tolist())


def test_log_softmax() -> None:
    logits = row(2, 1000) * 50
    assert np.exp(log_softmax(logits)).sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(np.diff(log_softmax(logits)), np.diff(logits.astype(np.float64)), atol=1e-9)


# ---- distribution


def chi_square_bound(degrees: int) -> float:
    """The 1 - 1e-4 quantile, by Wilson and Hilferty (1931)."""
    a = 2 / (9 * degrees)
    return degrees * (1 - a + NORMAL_QUANTILE * a**0.5) ** 3


def demand_fit(counts: npt.NDArray[np.int64], p: npt.NDArray[np.float64]) -> None:
    """Chi-square of `counts` against probabilities `p`; rare cells are pooled, impossible ones are empty."""
    n = counts.sum()
    assert counts[p == 0].sum() == 0
    rare = p * n < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(p[~rare], p[rare].sum()) * n
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert statistic < chi_square_bound(max(1, len(expected) - 1))


def softmax(x: npt.NDArray[np.float64], p: Sampling) -> npt.NDArray[np.float64]:
    out = np.zeros(len(x))
    kept = reference_kept(x.tolist(), p)
    out[kept] = np.exp((x[kept] - x.max()) / p.temperature)
    return out / out.sum()


SETTINGS = {
    "plain": Sampling(temperature=0.8),
    "top_k": Sampling(temperature=0.8, top_k=3),
    "top_p": Sampling(temperature=1.2, top_p=0.8),
    "min_p": Sampling(temperature=1.2, min_p=0.1),
    "penalties": Sampling(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3),
    "all": Sampling(temperature=0.9, top_k=5, top_p=0.9, min_p=0.02, presence_penalty=0.5, logit_bias=((0, 1.0),)),
}
CONTEXTS = [row(100 + i, 6, 1.5) for i in range(7)]  # logits after each of six tokens, and (last) at the beginning


def exact_joint(p: Sampling, length: int) -> npt.NDArray[np.float64]:
    """Probability of every text of `length` tokens over six, by enumeration. [6, ..., 6]"""
    out = np.zeros((6,) * length)
    for text in product(range(6), repeat=length):
        out[text] = 1
        for i, token in enumerate(text):
            logits = CONTEXTS[text[i - 1] if i else 6]
            out[text] *= softmax(np.array(reference_logits(logits, p, [], list(text[:i]))), p)[token]
    return out


def all_choices(p: Sampling, length: int) -> npt.NDArray[np.int64]:
    """How often each text was written in DRAWS positions' worth of coupled choices, vectorised over positions.

    The noise of token v at position i is `gumbel(seed, i, v)`; texts begin at positions 0, length, 2 length, ... of one seed.
    """
    noise = drawn_noise(length * DRAWS).reshape(DRAWS, length, 6)
    counts = np.zeros((6,) * length, np.int64)
    prefixes = {(): np.arange(DRAWS)}
    for i in range(length):
        grown: dict[tuple[int, ...], npt.NDArray[np.int64]] = {}
        for text, rows in prefixes.items():
            x = np.array(reference_logits(CONTEXTS[text[-1] if text else 6], p, [], list(text)))
            kept = survivors(x, p)
            token = kept[np.argmax(x[kept] / p.temperature + noise[rows, i][:, kept], axis=1)]
            grown |= {(*text, int(t)): rows[token == t] for t in np.unique(token)}
        prefixes = grown
    for text, rows in prefixes.items():
        counts[text] = len(rows)
    return counts


def drawn_noise(positions: int) -> npt.NDArray[np.float64]:
    """Noise [positions, 6] as `gumbel` gives it: each position's first two blocks."""
    i = np.arange(positions, dtype=np.uint64)
    blocks = [philox((np.full_like(i, b), 0, i, 0), (77, 0)) for b in (0, 1)]
    words = np.concatenate(blocks, axis=1)[:, :6]
    return -np.log(-np.log1p(-(words + 0.5) * 2.0**-32))


def test_the_vectorised_noise_and_choice_are_the_real_ones() -> None:
    noise = drawn_noise(300)
    for position in range(300):
        assert noise[position].tolist() == gumbel(77, position, np.arange(6)).tolist()
    for name, p in SETTINGS.items():
        p = replace(p, seed=77)
        for position in range(100):
            x = np.array(reference_logits(CONTEXTS[6], p, [], []))
            kept = survivors(x, p)
            vectorised = kept[np.argmax(x[kept] / p.temperature + noise[position][kept])]
            assert choose(CONTEXTS[6], p, position, history([], [])) == vectorised, name


@pytest.mark.parametrize("name", SETTINGS)
def test_single_tokens_follow_the_softmax(name: str) -> None:
    p = SETTINGS[name]
    demand_fit(all_choices(p, 1), exact_joint(p, 1))


@pytest.mark.parametrize("name", SETTINGS)
def test_three_tokens_follow_the_product_of_the_targets_distributions(name: str) -> None:
    p = SETTINGS[name]
    demand_fit(all_choices(p, 3).ravel(), exact_joint(p, 3).ravel())


def test_the_test_can_fail() -> None:
    p = exact_joint(SETTINGS["plain"], 1)
    wrong = exact_joint(replace(SETTINGS["plain"], temperature=0.84), 1)
    with pytest.raises(AssertionError):
        demand_fit(all_choices(SETTINGS["plain"], 1), wrong)
    with pytest.raises(AssertionError):
        demand_fit(all_choices(SETTINGS["plain"], 1), np.roll(p, 1))


def test_choices_through_choose_follow_the_softmax_over_a_large_row() -> None:
    """Through `choose` itself with its short cuts: 5,000 tokens, 6,000 positions."""
    logits = row(5, 5000, 2.5)
    p = Sampling(temperature=1.0, seed=13)
    counts = np.bincount([choose(logits, p, i) for i in range(6_000)], minlength=5000)
    demand_fit(counts, np.exp(log_softmax(logits)))


def test_coupling_agrees_more_often_than_independent_sampling_and_as_the_closed_form_says() -> None:
    """P(same token) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) >= (1 - TV) / (1 + TV) (arXiv 2408.07978)."""
    a, b = row(1, 6, 1.0).astype(np.float64), row(2, 6, 1.0).astype(np.float64)
    p, q = np.exp(a) / np.exp(a).sum(), np.exp(b) / np.exp(b).sum()
    noise = drawn_noise(DRAWS)
    agree = float(np.mean(np.argmax(np.log(p) + noise, axis=1) == np.argmax(np.log(q) + noise, axis=1)))
    exact = sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(6)) for i in range(6))
    tv = 0.5 * np.abs(p - q).sum()
    assert agree == pytest.approx(exact, abs=4 * (exact * (1 - exact) / DRAWS) ** 0.5)
    assert exact >= (1 - tv) / (1 + tv)
    assert agree > float(p @ q)
