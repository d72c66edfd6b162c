"""The rule `rejection`: the text has the target's distribution, whatever was drawn; and these tests would notice if it had not.

Two ways. By enumeration: the exact distribution of the choice, over everything that can be drawn, against the target's own. By
sampling: whole sessions over real frames with the toy engine, the joint distribution of three tokens by chi-square at
alpha = 1e-4, where the tree was there from the first step, where it came late and was kept (a hit), and where a step found
nothing (a miss). Every way of getting it wrong that was seen or thought of is tried at the end, and has to fail. All
seeds are fixed, so the tests are deterministic.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace as dataclass_replace
from functools import cache
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.cloud import engine as engine_module
from paceline.cloud.engine import Work
from paceline.cloud.engines.toy import ToyEngine
from paceline.edge.draft import Candidates, Choice
from paceline.edge.drawing import TOTAL, Drawing, drawn, favouring, quantised
from paceline.protocol.cloud_session import CloudSession, Limits, Walk
from paceline.protocol.codec import decode_from_cloud, decode_from_edge, encode
from paceline.protocol.edge_session import EdgeSession
from paceline.protocol.messages import Draft, Open, Opened
from paceline.protocol.philox import Floats, gumbel, uniforms
from paceline.protocol.proposal import Draw, Proposal, draws
from paceline.protocol.rejection import Remainder, choose_among, distribution
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import History, Sampling, choose
from test_sampling import chi_square_bound, reference_kept, reference_logits

V, PROMPT = 4, (1, 2, 3)
LIMITS = Limits(V, 64, 64)
TEXTS = 2000  # of each kind; broken ones are noticed after a few hundred
MANY = 200_000
TOY = ToyEngine(V, seed=5, sharpness=1.4)
DRAFT = ToyEngine(V, seed=6, sharpness=1.4)

SETTINGS = {
    "plain": Sampling(temperature=0.9),
    "top_k": Sampling(temperature=1.1, top_k=3),
    "top_p": Sampling(temperature=1.1, top_p=0.85),
    "min_p": Sampling(temperature=1.1, min_p=0.15),
    "penalties": Sampling(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, logit_bias=((0, 0.7),)),
}


# ---- enumeration


def outcomes(rest: Remainder, proposal: Proposal, before: tuple[int, ...], siblings: int) -> Floats:
    """The exact distribution [V] of the choice with `siblings` draws to come, over all that can be drawn."""
    if len(before) == siblings:
        return rest.p
    out = np.zeros(len(rest.p))
    left = {t: n for t, n in zip(proposal.tokens, proposal.counts, strict=True) if t not in before}
    for token, count in left.items():
        draw, branch = Draw(token, proposal, before), Remainder(rest.p.copy())
        chance, probability = branch.chance(draw), count / sum(left.values())
        branch.refuse(draw)
        out[token] += probability * chance
        if chance < 1:
            out += probability * (1 - chance) * outcomes(branch, proposal, (*before, token), siblings)
    return out


weights = st.lists(st.sampled_from([0.0, 0.0, 1e-9, 0.1, 0.5, 1.0, 3.0, 20.0]), min_size=6, max_size=6).filter(any)


@settings(max_examples=150, deadline=None)
@given(
    weights,
    st.lists(st.integers(1, 255), min_size=1, max_size=6),
    st.permutations(range(6)),
    st.integers(1, 4),
)
def test_the_choice_has_the_targets_distribution_exactly(
    p: list[float], counts: list[int], ids: list[int], siblings: int
) -> None:
    target = np.array(p) / sum(p)
    proposal = Proposal(1, tuple(ids[: len(counts)]), bytes(counts))
    found = outcomes(Remainder(target.copy()), proposal, (), min(siblings, len(counts)))
    np.testing.assert_allclose(found, target, atol=1e-12)


def test_the_joint_of_three_tokens_is_the_product_exactly() -> None:
    """A tree of draws three deep over six tokens, by enumeration, against the product of the target's distributions."""
    target, draft = ToyEngine(6, seed=3, sharpness=1.5), ToyEngine(6, seed=4, sharpness=1.5)
    params = Sampling(temperature=0.9, presence_penalty=0.3, top_p=0.95)
    ids = tuple(range(6))
    joint, expected = np.ones((6,) * 3), np.ones((6,) * 3)
    for text in product(ids, repeat=3):
        for i, token in enumerate(text):
            sequence, history = [*PROMPT, *text[:i]], History(PROMPT, text[:i])
            p = distribution(target.logits(sequence), params, history)
            q = quantised(distribution(draft.logits(sequence), replace(params, top_p=1.0), history))
            proposal = Proposal(1, tuple(np.flatnonzero(q).tolist()), bytes(q[q > 0].tolist()))
            joint[text] *= outcomes(Remainder(p.copy()), proposal, (), min(2, len(proposal.tokens)))[token]
            expected[text] *= exact(target, params, text[:i])[token]
    assert abs(joint - expected).max() < 1e-12
    assert joint.sum() == pytest.approx(1, abs=1e-12)


def test_one_draw_is_taken_as_often_as_the_distributions_overlap() -> None:
    p, proposal = np.array([0.5, 0.3, 0.2]), Proposal(1, (0, 1), bytes((10, 90)))
    taken = sum(n / 100 * Remainder(p.copy()).chance(Draw(t, proposal)) for t, n in ((0, 10), (1, 90)))
    assert taken == pytest.approx(np.minimum(p, [0.1, 0.9, 0]).sum())


# ---- corners of the choice


ROW = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))


def test_without_draws_and_for_a_greedy_target_it_is_the_plain_choice() -> None:
    some = draws([2], Proposal(1, (2, 3), b"\x01\x01"))
    for seed in range(50):
        params = Sampling(seed=seed, temperature=0.9)
        assert choose_among(ROW, params, 7, None, []) == choose(ROW, params, 7)
        assert choose_among(ROW, Sampling(seed=seed), 7, None, some) == 0


def test_what_the_filters_rule_out_never_passes() -> None:
    some = draws([3, 2], Proposal(2, (3, 2), b"\xfe\x01"))
    seen = {choose_among(ROW, Sampling(seed=s, temperature=1.0, top_k=2), 9, None, some) for s in range(300)}
    assert seen == {0, 1}


def test_a_draw_from_the_targets_own_distribution_is_always_taken() -> None:
    p = np.array([0.5, 0.25, 0.25])
    proposal = Proposal(1, (0, 1, 2), bytes((2, 1, 1)))
    for token in range(3):
        rest = Remainder(p.copy())
        assert rest.chance(Draw(token, proposal)) == 1
        rest.refuse(Draw(token, proposal))  # happens with no probability; nothing is left, and the target's own stays
        assert rest.p.tolist() == p.tolist()


def test_damaged_logits_are_an_error() -> None:
    some = draws([0], Proposal(1, (0,), b"\x01"))
    for bad in (np.full(4, np.nan, np.float32), np.full(4, -np.inf, np.float32)):
        with pytest.raises(FloatingPointError, match="not finite"):
            choose_among(bad, Sampling(temperature=1.0), 3, None, some)


def test_the_numbers_by_which_draws_are_accepted_are_independent_of_the_choices_noise() -> None:
    u = np.array([uniforms(7, i, 3) for i in range(5_000)])
    noise = np.array([gumbel(7, i, np.arange(3)) for i in range(5_000)])
    assert ((u > 0) & (u < 1)).all()
    assert abs(np.sort(u[:, 0]) - (np.arange(5_000) + 0.5) / 5_000).max() < 2.23 / 5_000**0.5
    for pair in [(u[:, 0], u[:, 1]), (u[:, 0], u[:, 2]), *((u[:, i], noise[:, j]) for i in range(2) for j in range(3))]:
        assert abs(np.corrcoef(*pair)[0, 1]) < 5 / 5_000**0.5
    assert uniforms(7, 5, 9)[:3].tolist() == uniforms(7, 5, 3).tolist()


# ---- the edge's part


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=32))
def test_counts_are_whole_sum_to_their_total_and_are_near(q: list[float]) -> None:
    weight = np.array(q)
    counts = quantised(weight)
    assert counts.sum() == TOTAL
    assert (counts >= 0).all()
    assert abs(counts - TOTAL * weight / weight.sum()).max() < 1


def test_saguaro_sampling_makes_the_favoured_tokens_rarer_and_the_residual_fall_on_them() -> None:
    q = np.array([0.5, 0.3, 0.15, 0.05])
    rarer = favouring(q, 2, 0.5)
    assert (rarer / rarer.sum())[:2].sum() < q[:2].sum()
    residual = np.maximum(q - rarer / rarer.sum(), 0)
    assert residual[2:].sum() == 0  # where draft and target agree, a refusal always ends at a prepared outcome
    assert residual[:2].sum() > 0
    assert favouring(q, 4, 0.0).tolist() == q.tolist()  # nothing would be left to draw


def test_draws_follow_their_counts_without_replacement() -> None:
    random = np.random.default_rng(1)
    row = np.log(np.array([0.45, 0.3, 0.15, 0.1], dtype=np.float32))
    choice = Choice(Sampling(temperature=1.0))
    found = [drawn(row, choice, Drawing(random, 2)) for _ in range(20_000)]
    q = quantised(np.exp(row.astype(np.float64))) / TOTAL
    seen = np.zeros((4, 4))
    for c in found:
        seen[tuple(c.tokens.tolist())] += 1
    expected = np.zeros((4, 4))
    for a, b in permutations(range(4), 2):
        expected[a, b] = q[a] * q[b] / (1 - q[a])
    assert fits(seen, expected)
    assert all(c.confidence.tolist() == found[0].confidence.tolist() for c in found), "whatever was drawn"
    assert all((c.support, c.counts) == (found[0].support, found[0].counts) for c in found)


# ---- whole sessions, by sampling


@cache
def exact(engine: ToyEngine, params: Sampling, text: tuple[int, ...]) -> Floats:
    """The target's distribution after `text`, by the obvious reference."""
    row = engine.logits([*PROMPT, *text])
    x = reference_logits(row, params, list(PROMPT), list(text))
    kept = reference_kept(x, params)
    out = np.zeros(len(x))
    out[kept] = np.exp((np.array(x)[kept] - max(x)) / params.temperature)
    return out / out.sum()


@cache
def exact_joint(params: Sampling) -> Floats:
    out = np.ones((V,) * 3)
    for text in product(range(V), repeat=3):
        for i, token in enumerate(text):
            out[text] *= exact(TOY, params, text[:i])[token]
    return out


def fits(counts: Floats, p: Floats) -> bool:
    """Chi-square at alpha = 1e-4; rare cells are pooled, impossible ones are empty."""
    n, counts, p = counts.sum(), counts.ravel(), p.ravel()
    if counts[p == 0].sum():
        return False
    rare = p * n < 10
    observed, expected = np.append(counts[~rare], counts[rare].sum()), np.append(p[~rare], p[rare].sum()) * n
    observed, expected = observed[expected > 0], expected[expected > 0]
    return float(((observed - expected) ** 2 / expected).sum()) < chi_square_bound(max(1, len(expected) - 1))


class Pair:
    """Both ends of one generation after another, over real frames. Its methods are what the controls replace."""

    def __init__(self, params: Sampling, path: str) -> None:
        self.params, self.path = params, path
        self.random = np.random.default_rng(11)
        self.accepted = self.refused = 0

    def text(self, seed: int) -> tuple[int, ...]:
        """Three tokens, with a fresh seed of the target's choices."""
        self.seed = seed
        request = GenerationRequest(PROMPT, replace(self.params, seed=seed), 8)
        self.edge = EdgeSession(request, rule="rejection", vocabulary_size=V)
        opened = decode_from_edge(encode(self.edge.open(1)))
        assert isinstance(opened, Open)
        self.cloud, handle = CloudSession(opened, LIMITS, "t"), TOY.open(())
        self.edge.receive(Opened(1, 0, "t", 8))
        frames = self.draft(1 if self.path == "miss" else 2)
        if self.path != "late":
            self.deliver(frames)
        while len(self.edge.committed) < 3:
            self.step(handle)
            if self.path == "late":
                self.deliver(frames)
        TOY.close(handle)
        return tuple(self.edge.committed[:3])

    def draft(self, depth: int) -> list[bytes]:
        """A tree of draws below the end of the text."""
        tree, level, nodes = self.edge.tree, [self.edge.tree.root], list[int]()
        for _ in range(depth):
            level = [child for node in level for child in self.children(node)]
            nodes += level
        return [encode(m) for m in self.edge.send(n for n in nodes if tree.state(n) == 0)]

    def children(self, node: int) -> list[int]:
        tree = self.edge.tree
        path = [*self.edge.committed, *(tree.token(n) for n in tree.path(node))]
        found = self.drawn(path)
        nodes = [tree.add(node, int(t), -0.5 - i) for i, t in enumerate(found.tokens)]
        self.edge.drew(nodes, found.support, found.counts)
        return nodes

    def drawn(self, path: list[int]) -> Candidates:
        history = History(PROMPT, path)
        return drawn(DRAFT.logits([*PROMPT, *path]), Choice(self.params, history), Drawing(self.random, 2))

    def deliver(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            message = decode_from_edge(frame)
            assert isinstance(message, Draft)
            self.cloud.receive(message)

    def step(self, handle: int) -> None:
        cloud = self.cloud
        plan = cloud.plan(16)
        new = tuple(cloud.sequence[TOY.length(handle) :])
        [walk] = TOY.verify([Work(handle, new, plan, cloud.sampling, cloud.history)])
        assert isinstance(walk, Walk)
        self.accepted += len(walk.accepted)
        self.refused += bool(plan.nodes) and not walk.accepted
        self.edge.receive(decode_from_cloud(encode(cloud.apply(plan, walk))))


def counted(pair: Pair, texts: int = TEXTS) -> Floats:
    counts = np.zeros((V,) * 3)
    for seed in range(texts):
        counts[pair.text(seed)] += 1
    return counts


def noticed(pair: Pair) -> bool:
    """Whether as many texts as the tests above take are seen not to fit; often a few hundred are enough."""
    counts = np.zeros((V,) * 3)
    for seed in range(TEXTS):
        counts[pair.text(seed)] += 1
        if seed % 250 == 249 and not fits(counts, exact_joint(pair.params)):
            return True
    return False


@pytest.mark.parametrize(
    ("path", "name"), [*product(["first", "late", "miss"], ["plain"]), *(("first", n) for n in [*SETTINGS][1:])]
)
def test_three_tokens_of_a_session_have_the_targets_joint_distribution(path: str, name: str) -> None:
    pair = Pair(SETTINGS[name], path)
    counts = counted(pair)
    assert pair.accepted > TEXTS / 8, "draws were accepted"
    assert pair.refused > TEXTS / 20, "and refused"
    assert fits(counts, exact_joint(SETTINGS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["first", "late", "miss"])
def test_they_have_it_to_a_hundredth(path: str) -> None:
    assert fits(counted(Pair(SETTINGS["plain"], path), MANY), exact_joint(SETTINGS["plain"]))


# ---- negative controls: each breaks one thing, and the tests above must notice

Chooser = Callable[..., int]


def always_accept(row: Any, params: Sampling, position: int, history: Any, drawn: Sequence[Draw]) -> int:
    return drawn[0].token if drawn else choose(row, params, position, history)


def no_residual(row: Any, params: Sampling, position: int, history: Any, drawn: Sequence[Draw]) -> int:
    """After a refusal, the target's distribution as it was."""
    rest = Remainder(distribution(row, params, history))
    for draw, u in zip(drawn, uniforms(params.seed, position, len(drawn)), strict=True):
        if u < rest.chance(draw):
            return draw.token
    return choose(row, params, position, history)


def argmax_accept(row: Any, params: Sampling, position: int, history: Any, drawn: Sequence[Draw]) -> int:
    """A draw is taken if it is the target's likeliest, at a temperature above 0 as well."""
    best = int(np.argmax(distribution(row, params, history)))
    return best if any(d.token == best for d in drawn) else choose(row, params, position, history)


def matched_point_mass(row: Any, params: Sampling, position: int, history: Any, drawn: Sequence[Draw]) -> int:
    """A draw is accepted with q as if it had been picked, its residual that of a draw."""
    rest = Remainder(distribution(row, params, history))
    for draw, u in zip(drawn, uniforms(params.seed, position, len(drawn)), strict=True):
        if u < rest.p[draw.token]:
            return draw.token
        rest.refuse(draw)
    ids = np.flatnonzero(rest.p)
    return int(ids[np.argmax(np.log(rest.p[ids]) + gumbel(params.seed, position, ids))])


def one_noise_for_all_positions(row: Any, params: Sampling, position: int, history: Any, drawn: Sequence[Draw]) -> int:
    """Noise keyed by the step instead of the position."""
    return choose_among(row, params, 0, history, drawn)


def with_replacement(row: Any, params: Sampling, position: int, history: Any, drawn: Sequence[Draw]) -> int:
    """Later siblings are held against the whole q, not against what was left of it."""
    return choose_among(row, params, position, history, [Draw(d.token, d.proposal) for d in drawn])


CONTROLS: list[Chooser] = [
    always_accept, no_residual, argmax_accept, matched_point_mass, one_noise_for_all_positions, with_replacement,
]  # fmt: skip


@pytest.mark.parametrize("broken", CONTROLS, ids=lambda f: f.__name__)
def test_a_broken_verifier_is_noticed(broken: Chooser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "choose_among", broken)
    assert noticed(Pair(SETTINGS["plain"], "first"))


class OtherQ(Pair):
    """What is sent is not what was drawn from, but the draft's q at another temperature."""

    def drawn(self, path: list[int]) -> Candidates:
        found = super().drawn(path)
        return dataclass_replace(found, counts=bytes(int(n**0.5) for n in found.counts))


class SharedNoise(Pair):
    """The edge draws with the very numbers by which its draws are then accepted."""

    def drawn(self, path: list[int]) -> Candidates:
        found = super().drawn(path)
        left, tokens = np.frombuffer(found.counts, np.uint8).astype(int), list[int]()
        for u in uniforms(self.seed, len(PROMPT) + len(path), found.drawn):
            at = int(np.searchsorted(np.cumsum(left), u * left.sum(), side="right"))
            tokens.append(found.support[at])
            left[at] = 0
        return dataclass_replace(found, tokens=np.array(tokens))


class OnlyTheLikely(Pair):
    """A draw that looks bad is not sent: whether it is depends on what was drawn."""

    def children(self, node: int) -> list[int]:
        nodes = super().children(node)
        family = self.edge._families[nodes[0]]
        likely = dict(zip(family.proposal.tokens, family.proposal.counts, strict=True))
        kept = [n for n in nodes if likely[self.edge.tree.token(n)] > TOTAL // 4]
        for n in nodes:
            del self.edge._families[n]
        if kept:
            self.edge.drew(kept, family.proposal.tokens, family.proposal.counts)
        return kept


class Sorted(Pair):
    """Siblings in the order of their probabilities, not of drawing."""

    def drawn(self, path: list[int]) -> Candidates:
        found = super().drawn(path)
        likely = dict(zip(found.support, found.counts, strict=True))
        order = sorted(found.tokens.tolist(), key=lambda t: -likely[t])
        return dataclass_replace(found, tokens=np.array(order))


@pytest.mark.parametrize("broken", [OtherQ, SharedNoise, OnlyTheLikely, Sorted])
def test_a_broken_edge_is_noticed(broken: type[Pair]) -> None:
    assert noticed(broken(SETTINGS["plain"], "first"))
