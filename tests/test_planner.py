"""The planner: deadlines path by path against a simulation step by step, patience, and the switch."""

import math
import random

import pytest
from paceline.edge import planner
from paceline.edge.planner import LEAST, RAREST, Horizon, Switch, bar, late, patience, to_run, to_send
from paceline.protocol.cost import Patience
from paceline.protocol.tree import Tree


def play(times: list[float], begun: float, step: float, at: float) -> int:
    """The slow obvious one: the cloud's steps one after another along one path."""
    depth, now = 0, begun
    while now < at:
        while depth < len(times) and times[depth] <= now:
            depth += 1
        depth, now = depth + 1, now + step
    return depth


@pytest.mark.parametrize("seed", range(60))
def test_passed_is_the_cloud_played_forward(seed: int) -> None:
    rng = random.Random(seed)
    tree, horizon = Tree(0), Horizon(begun=rng.uniform(0, 0.1), step=rng.uniform(0.01, 0.05))
    node, times, now = tree.root, list[float](), rng.uniform(-0.1, 0.1)
    for token in range(rng.randrange(1, 8)):
        node = tree.add(node, token, -0.1)
        now += rng.choice([0.0, rng.uniform(0, 0.03)])
        times.append(now)
        horizon.sent([node], now)
    at = rng.uniform(0.0, 0.5)
    assert horizon.passed(tree, node, at) == play(times, horizon.begun, horizon.step, at)


def test_nothing_held_means_one_token_a_step() -> None:
    tree, horizon = Tree(0), Horizon(begun=1.0, step=0.03)
    assert horizon.passed(tree, tree.root, 1.1) == 4
    assert late(horizon, tree, tree.root, 1.1, {}) == 4
    assert late(horizon, tree, tree.root, 1.0, {}) == 0


def test_a_deep_node_in_time_goes_before_a_likelier_one_that_is_late() -> None:
    tree, horizon = Tree(0), Horizon(begun=0.0, step=0.03)
    chain = tree.root
    for token in range(6):
        chain = tree.add(chain, token, math.log(0.9))
    aside = tree.add(tree.root, 99, math.log(0.6))
    low = math.log(0.01)
    rows = to_run(tree, horizon, [chain, aside], at=0.1, step=0.005, count=2, least=low)
    assert [node for _, node in rows] == [chain, aside]
    assert (
        to_run(tree, horizon, [aside], at=0.1, step=0.04, count=2, least=low) == []
    )  # drafting is slower than the cloud
    assert to_send(tree, horizon, [aside], at=10.0, least=low) == []  # it would come far too late
    assert to_send(tree, horizon, [aside], at=0.0, least=low) == [aside]
    assert to_send(tree, horizon, [aside], at=0.0, least=math.log(0.7)) == []  # it is not worth its bytes


def test_the_cheaper_a_row_the_less_useful_it_may_be() -> None:
    assert bar(math.inf, 0.03) == bar(0.001, 0.0) == bar(0.0005, 0.03)  # a small GPU; nothing known; no free rows
    assert math.exp(bar(0.0005, 0.03).run) == pytest.approx(LEAST)
    runs = [bar(more, 0.03).run for more in (0.0003, 0.0001, 0.00005, 0.0)]
    assert runs == sorted(runs, reverse=True)
    assert len(set(runs)) == 4
    assert math.exp(runs[-1]) == pytest.approx(RAREST)
    assert all(bar(more, 0.03).send > bar(more, 0.03).run for more in (1.0, 0.0))


def test_messages_wait_for_the_clouds_next_step_and_no_longer() -> None:
    horizon = Horizon(begun=0.0, step=0.03)
    horizon.sent([1], 0.0)
    assert not horizon.starts_between(0.001, 0.02)
    assert horizon.starts_between(0.02, 0.031)
    assert horizon.starts_between(0.0, 0.05)


def test_patience_is_the_same_rule_at_both_ends() -> None:
    rule = Patience(longest=0.01, response=0.035, row=0.005)
    assert rule.start(now=0.0, missed=0.0, since=0) == 0.0  # due in 35 ms: too long to wait
    assert rule.start(now=0.03, missed=0.0, since=1) == pytest.approx(0.04)  # due in 10 ms
    assert rule.start(now=0.06, missed=0.0, since=2) == 0.06  # overdue: nothing will come


def test_patience_only_where_nodes_beat_the_rate() -> None:
    assert patience(0.0, 0.001, 0.8, 100.0).longest > 0
    assert patience(0.0, 0.05, 0.8, 100.0) == Patience()  # a row costs five tokens
    fast, slow = patience(0.0, 0.001, 0.8, 100.0), patience(0.0, 0.005, 0.8, 100.0)
    assert fast.longest > slow.longest


def test_the_switch_goes_off_where_nothing_is_accepted_and_comes_back() -> None:
    switch = Switch()
    for _ in range(1000):
        switch.observe(0)
    assert not switch.on
    drafted = 0
    for _ in range(10 * planner.PAUSE):
        drafted += switch.drafting
        switch.observe(0)
    assert drafted == 10 * planner.PROBE  # it only probes
    for _ in range(2 * planner.PAUSE):
        switch.observe(1 if switch.drafting else 0)
    assert switch.on


def test_the_switch_stays_on_between_its_bounds() -> None:
    switch = Switch()
    for i in range(5000):
        switch.observe(1 if i % 20 == 0 else 0)  # 5 % of a token a step
        assert switch.on
