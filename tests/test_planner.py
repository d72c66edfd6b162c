"""The planner's arithmetic against slow, obvious versions of it: what arrives in time, what runs, what is sent."""

import math
import random

import pytest
from paceline.edge.planner import LEAST, SENT, Horizon, late, patience, to_run, to_send, usefulness
from paceline.protocol.tree import Tree

STEP = 0.03


def chain(depth: int, weight: float = -0.1) -> tuple[Tree, list[int]]:
    tree, nodes = Tree(0), [0]
    for token in range(depth):
        nodes.append(tree.add(nodes[-1], token, weight))
    return tree, nodes


def horizon(arrives: dict[int, float] | None = None) -> Horizon:
    return Horizon(begun=0.0, step=STEP, arrives=arrives or {})


def passed_slowly(arrivals: list[float], at: float) -> int:
    """Play the cloud's steps one by one: each eats what has arrived below where it stands, and adds a token."""
    now, depth = 0.0, 0
    while now < at:
        while depth < len(arrivals) and arrivals[depth] <= now:
            depth += 1
        depth += 1
        now += STEP
    return depth


@pytest.mark.parametrize("seed", range(50))
def test_passed_plays_the_clouds_steps(seed: int) -> None:
    rng = random.Random(seed)
    tree, nodes = chain(rng.randrange(1, 8))
    arrivals = sorted(rng.uniform(0, 0.3) for _ in nodes[1:])
    h = horizon(dict(zip(nodes[1:], arrivals, strict=True)))
    at = rng.uniform(0, 0.4)
    assert h.passed(tree, nodes[-1], at) == passed_slowly(arrivals, at)


def test_what_is_drafted_late_is_late_by_the_tokens_it_missed() -> None:
    tree, nodes = chain(3)
    assert late(horizon(), tree, nodes[0], 0.0, {}) <= 0
    assert late(horizon(), tree, nodes[0], 3.5 * STEP, {}) == 4
    assert late(horizon(), tree, nodes[3], 3.5 * STEP, {}) == 1  # three below the root, so three tokens less late
    assert late(Horizon(), tree, nodes[0], 100.0, {}) == 0  # nothing is known of the cloud yet


def test_lateness_makes_useless_where_there_is_no_catching_up() -> None:
    assert usefulness(-0.5, 0, 0.0) == -0.5
    assert usefulness(-0.5, 2, 0.0) == -math.inf
    assert -math.inf < usefulness(-0.5, 2, 0.5) < usefulness(-0.5, 1, 0.5) < -0.5


@pytest.mark.parametrize("seed", range(20))
def test_to_run_takes_the_most_useful(seed: int) -> None:
    rng, tree = random.Random(seed), Tree(0)
    nodes = [tree.root]
    for token in range(40):
        nodes.append(tree.add(rng.choice(nodes), token, -rng.expovariate(1.0)))
    h, at, count = horizon(), rng.uniform(0, 0.1), rng.randrange(1, 10)
    gain = 1 - 0.005 / STEP
    scored = [(usefulness(tree.reach(n), late(h, tree, n, at, {}), gain), n) for n in nodes]
    expected = sorted((s for s in scored if s[0] > LEAST), reverse=True)[:count]
    found = to_run(tree, h, nodes, at, 0.005, count)
    assert [u for u, _ in found] == pytest.approx([u for u, _ in expected])
    assert len(found) == len(expected)


def test_to_send_puts_parents_first_and_leaves_out_the_unlikely() -> None:
    rng, tree = random.Random(3), Tree(0)
    nodes = [tree.root]
    for token in range(60):
        nodes.append(tree.add(rng.choice(nodes), token, -rng.expovariate(1.0)))
    sent = to_send(tree, horizon(), rng.sample(nodes[1:], 60), 0.0)
    assert sent
    assert all(tree.reach(n) > SENT for n in sent)
    for i, n in enumerate(sent):
        assert tree.parent(n) == tree.root or tree.parent(n) in sent[:i]


def test_a_step_begins_between() -> None:
    h = horizon()
    assert not h.starts_between(0.001, 0.029)
    assert h.starts_between(0.029, 0.031)
    assert h.starts_between(0.001, 0.001 + STEP)
    assert Horizon().starts_between(0.0, 0.0)


def test_nodes_that_are_gone_are_forgotten() -> None:
    tree, nodes = chain(3)
    side = tree.add(nodes[0], 50, -1.0)
    h = horizon(dict.fromkeys([*nodes[1:], side], 0.01))
    tree.advance([0])
    h.keep(tree)
    assert set(h.arrives) == set(nodes[2:])


def test_waiting_pays_for_a_quick_link_and_a_sure_draft_only() -> None:
    assert patience(0.0, 0.001, 0.95, 33) > 0
    assert patience(1.0, 0.001, 0.95, 33) == 0
    assert patience(0.0, 0.02, 0.4, 33) == 0
