"""Rounds: the fan-out of theorem 12, chains, and when a round is long enough."""

import itertools
import math

import pytest
from paceline.edge.rounds import Rounds, chain_below, fan_out
from paceline.protocol.tree import Tree


@pytest.mark.parametrize("budget", [1, 4, 9, 33])
@pytest.mark.parametrize("acceptance", [0.3, 0.8, 0.97])
def test_fan_out_spends_its_budget_geometrically_with_more_at_the_end(budget: int, acceptance: float) -> None:
    counts = fan_out(5, budget, acceptance)
    assert sum(counts) == budget
    assert len(counts) == 6
    assert all(a >= b for a, b in itertools.pairwise(counts[:5]))


def test_fan_out_is_the_formula_but_for_rounding() -> None:
    a, budget = 0.8, 10_000
    counts = fan_out(3, budget, a)
    assert counts[1] / counts[0] == pytest.approx(math.sqrt(a), rel=0.01)
    assert counts[3] / counts[0] == pytest.approx(a**1.5 * (1 - a) ** -0.5, rel=0.01)


def grown(*chances: float) -> tuple[Tree, list[int]]:
    tree, chain = Tree(0), list[int]()
    for token, chance in enumerate(chances):
        node = tree.add(chain[-1] if chain else tree.root, token, math.log(chance))
        tree.add(chain[-1] if chain else tree.root, 100 + token, math.log((1 - chance) / 2))
        chain.append(node)
    return tree, chain


def test_a_round_runs_the_tip_until_its_length() -> None:
    tree, chain = grown(0.9, 0.8)
    everything = set(tree.subtree(tree.root))
    assert chain_below(tree, tree.root, 8) == chain
    assert Rounds(3).rows(tree, everything, 0.05, 0.005) == [chain[-1]]
    assert Rounds(2).rows(tree, everything, 0.05, 0.005) == []
    assert Rounds(2).chain(tree) == chain


def test_an_adaptive_round_is_longer_where_the_round_trip_is() -> None:
    tree, chain = grown(0.8, 0.7, 0.6, 0.5)
    everything = set(tree.subtree(tree.root))
    assert Rounds(0).rows(tree, everything, overhead=0.3, step=0.005) == [chain[-1]]
    assert Rounds(0).rows(tree, everything, overhead=0.01, step=0.005) == []


def test_outcomes_are_prepared_only_while_a_round_is_on_its_way() -> None:
    tree, chain = grown(0.9, 0.8)
    everything = set(tree.subtree(tree.root)) - {tree.root, chain[0]}  # those two were run
    waiting = Rounds(2, outcomes=3, sent=True)
    rows = waiting.rows(tree, everything, 0.05, 0.005)
    assert chain[-1] in rows  # its candidates are outcomes too
    assert set(rows) - {chain[-1]} <= everything - set(chain)
    assert Rounds(2, outcomes=0, sent=True).rows(tree, everything, 0.05, 0.005) == []
