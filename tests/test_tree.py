"""The tree against a naive model: a dictionary from paths (tuples of token and birth order) to weights."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.protocol.tree import SPARE, State, Tree

Path = tuple[int, ...]  # ids from just below the root of the beginning


class Model:
    """Every live node by its path of tokens from the root; a node's children carry distinct tokens."""

    def __init__(self) -> None:
        self.nodes: dict[Path, tuple[int, float]] = {}  # path -> (id in the tree, log-probability of the step)
        self.text: list[int] = []

    def advance(self, tokens: Path) -> list[int]:
        walked = []
        for n in range(1, len(tokens) + 1):
            if tokens[:n] not in self.nodes:
                break
            walked.append(self.nodes[tokens[:n]][0])
        n = len(tokens)
        self.nodes = {path[n:]: v for path, v in self.nodes.items() if path[:n] == tokens and len(path) > n}
        self.text += tokens
        return walked

    def reach(self, path: Path) -> float:
        return sum(self.nodes[path[: n + 1]][1] for n in range(len(path)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_tree_is_the_naive_model(data: st.DataObject) -> None:
    tree, model = Tree(7), Model()
    everyone: set[int] = {tree.root}
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 8))):
            path = data.draw(st.sampled_from([(), *model.nodes]))
            token, logp = data.draw(st.integers(0, 3)), -data.draw(st.sampled_from([0.0, 0.1, 0.5, 2.0]))
            parent = model.nodes[path][0] if path else tree.root
            known = model.nodes.get((*path, token))
            assert tree.child(parent, token) == (known[0] if known else None)
            if known is None:
                model.nodes[(*path, token)] = (tree.add(parent, token, logp), logp)
                everyone.add(tree.next_id - 1)
        check(tree, model, everyone)
        tokens = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3)))
        before = tree.next_id
        assert tree.advance(tokens) == model.advance(tokens)
        everyone |= set(range(before, tree.next_id))
        if data.draw(st.booleans()):
            tree.forget(len(model.text) - 1)
        check(tree, model, everyone)


def check(tree: Tree, model: Model, everyone: set[int]) -> None:
    live = {node for node, _ in model.nodes.values()} | {tree.root}
    assert len(tree) == len(model.nodes)
    assert set(tree.subtree(tree.root)) == live
    assert {n for n in everyone if tree.state(n) is State.LIVE} == live
    assert tree.position(tree.root) == len(model.text) - 1
    if model.text:
        assert tree.token(tree.root) == model.text[-1]
    for path, (node, _) in model.nodes.items():
        assert tuple(map(tree.token, tree.path(node))) == path
        assert tree.position(node) == len(model.text) + len(path) - 1
        assert tree.reach(node) == pytest.approx(model.reach(path))
    for node in live:
        children = tree.children(node)
        assert sorted(children, key=lambda c: (-tree.weight(c), c)) == [*children]
    for limit in (0, 1, 3, 1000):
        check_best(tree, model, limit, None)
        check_best(tree, model, limit, len(model.text) + 2)


def check_best(tree: Tree, model: Model, limit: int, exclude_from: int | None) -> None:
    """Connected, depth first, likeliest child first, and with the largest sum that greedy growth over all nodes can find."""
    best, likeliest = tree.best(limit, exclude_from), tree.likeliest(limit, exclude_from)
    assert set(best) == set(likeliest)
    assert sorted(likeliest, key=lambda n: (-tree.weight(n), n)) == likeliest
    assert tree.reaches(likeliest) == [tree.reach(n) for n in likeliest]
    allowed = {
        p: v for p, v in model.nodes.items() if exclude_from is None or len(model.text) + len(p) - 1 < exclude_from
    }
    assert len(set(best)) == len(best) == min(limit, len(allowed))
    seen = {tree.root}
    for node in best:
        assert tree.parent(node) in seen, "parents come first"
        seen.add(node)
    sums = sorted((math.exp(model.reach(p)) for p in allowed), reverse=True)  # a prefix of this is always connected
    assert sum(math.exp(tree.reach(n)) for n in best) == pytest.approx(sum(sums[:limit]))
    for before, after in pairwise(best):
        if tree.parent(after) != before:  # the walk turned back: to a sibling of `before` or of what is above it
            trail = {tree.parent(n): n for n in (*tree.path(before),)}
            older = trail[tree.parent(after)]
            assert (-tree.weight(older), older) < (-tree.weight(after), after)
            assert not set(tree.children(before)) & seen


def test_the_likeliest_chain_comes_first_in_one_piece() -> None:
    tree = Tree(0)
    a, b = tree.add(0, 1, -1.0), tree.add(0, 2, -0.1)
    c = tree.add(b, 3, -0.1)
    d = tree.add(a, 4, 0.0)
    assert tree.best(10) == [b, c, a, d]
    assert tree.best(3) == [b, c, a]


def test_a_walk_that_leaves_the_tree_drops_it_and_names_what_it_passed() -> None:
    tree = Tree(0)
    a = tree.add(0, 1)
    b = tree.add(a, 2)
    assert tree.advance([1, 9, 9]) == [a]
    assert [tree.state(n) for n in (0, a, b, tree.root)] == [State.COMMITTED, State.COMMITTED, State.DEAD, State.LIVE]
    assert (len(tree), tree.position(tree.root), tree.token(tree.root)) == (0, 2, 9)
    assert tree.advance([]) == []


def test_weights_never_rise_along_a_path_and_are_numbers() -> None:
    tree = Tree(0)
    assert tree.reach(tree.add(0, 1, 0.5)) == 0.0
    for bad in (-math.inf, math.nan):
        with pytest.raises(AssertionError):
            tree.add(0, 2, bad)


def test_children_grow_on_live_nodes_only() -> None:
    tree = Tree(0)
    a = tree.add(0, 1)
    tree.advance([2])
    for gone in (0, a):
        with pytest.raises(AssertionError):
            tree.add(gone, 3)


def test_memory_stays_flat_over_a_long_text() -> None:
    """100,000 tokens, hits and misses: what is kept is what is live, and a little."""
    tree, text_length, most = Tree(0), 0, 0
    for step in range(100_000):
        a = tree.add(tree.root, 1, -0.2)
        tree.add(tree.root, 2, -2.0)
        tree.add(a, 1, -0.2)
        tree.advance([1 if step % 3 else 5])
        text_length += 1
        tree.forget(text_length - 1)
        most = max(most, len(tree._state))
    assert most < SPARE + 20
    assert all(len(column) == len(tree._state) for column in (tree._parent, tree._token, tree._weight, tree._children))
    assert tree.position(tree.root) == text_length - 1
