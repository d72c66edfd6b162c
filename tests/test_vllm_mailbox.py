"""Trees from the door to the drafter: found by the text, followed by what was sampled since, never waited for."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.cloud.vllm.drafter import Drafter
from paceline.cloud.vllm.mailbox import LAG, NODES, VARIABLE, WINDOW, Branches, Mailbox
from paceline.protocol.errors import EngineError
from paceline.protocol.tree import Tree

TEXT = [7, 8, 9, 10]
END = 1 << 20


@pytest.fixture
def path() -> Iterator[Path]:
    made = Mailbox.create(4)
    yield made
    made.unlink()


@pytest.fixture
def door(path: Path) -> Mailbox:
    return Mailbox(path)


@pytest.fixture
def drafter(path: Path, monkeypatch: pytest.MonkeyPatch) -> Drafter:
    monkeypatch.setenv(VARIABLE, str(path))
    return Drafter(SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=3)))


def tree_of(*paths: tuple[list[int], float]) -> Tree:
    """A tree with these paths; the last token of each is taken with that probability, the others surely."""
    tree = Tree(0)
    for path, probability in paths:
        node = tree.root
        for token in path[:-1]:
            child = tree.child(node, token)
            node = tree.add(node, token) if child is None else child
        tree.add(node, path[-1], math.log(probability))
    return tree


def put(door: Mailbox, slot: int, text: list[int], tree: Tree) -> None:
    door.publish(slot, len(text), np.array(text[-WINDOW:], np.int32), Branches.of(tree, END))


def propose(drafter: Drafter, *texts: list[int], sampled: int = 1) -> list[list[int]]:
    """As vLLM asks: rows of one array, wider than any text and full of what other requests left there."""
    rows = np.full((len(texts) + 2, 4096), 12345, np.int32)
    for row, text in zip(rows, texts, strict=False):
        row[: len(text)] = text
    counts = np.array([*map(len, texts), 0, 0], np.int32)
    return drafter.propose([[0] * sampled for _ in texts], counts, rows, slot_mappings=None)


def test_the_likeliest_path_below_the_text_is_proposed(door: Mailbox, drafter: Drafter) -> None:
    put(door, 2, TEXT, tree_of(([1, 2], 0.4), ([1, 3], 0.6), ([1, 3, 4], 0.9), ([5], 0.1)))
    assert propose(drafter, TEXT) == [[1, 3, 4]]
    assert door.step(2, len(TEXT)) == (5, 3)


def test_what_was_sampled_since_leads_into_the_tree(door: Mailbox, drafter: Drafter) -> None:
    put(door, 0, TEXT, tree_of(([1, 2, 6], 0.5), ([1, 3], 0.5), ([5, 4, 3], 0.9)))
    assert propose(drafter, [*TEXT, 5], sampled=1) == [[4, 3]]
    assert propose(drafter, [*TEXT, 1, 2], sampled=2) == [[6]]
    assert door.step(0, len(TEXT) + 2) == (1, 1)
    assert propose(drafter, [*TEXT, 9]) == [[]]
    assert door.step(0, len(TEXT) + 1) == (0, 0), "a step began there, and held nothing"
    assert door.step(0, len(TEXT) + 3) is None


def test_another_text_of_the_same_length_has_no_tree_here(door: Mailbox, drafter: Drafter) -> None:
    put(door, 0, TEXT, tree_of(([1], 1.0)))
    put(door, 1, [3] * 400, tree_of(([2], 1.0)))
    assert propose(drafter, [7, 8, 9, 11], TEXT, [3] * 400, [3] * 399, [4] * 400) == [[], [1], [2], [], []]


def test_a_text_that_has_run_far_ahead_is_not_searched_for(door: Mailbox, drafter: Drafter) -> None:
    path = [i % 50 for i in range(LAG + 2)]
    put(door, 0, TEXT, tree_of((path, 1.0)))
    assert propose(drafter, TEXT + path[: LAG - 1]) == [path[LAG - 1 : LAG + 2]]
    assert propose(drafter, TEXT + path[:LAG]) == [[]]


def test_an_empty_mailbox_and_a_prompt_that_is_being_read(door: Mailbox, drafter: Drafter) -> None:
    assert propose(drafter, TEXT, TEXT) == [[], []]
    put(door, 0, TEXT, tree_of(([1], 1.0)))
    assert propose(drafter, TEXT, sampled=0) == [[]]
    put(door, 0, TEXT, Tree(0))
    assert propose(drafter, TEXT) == [[]]


def test_nodes_that_are_hardly_ever_reached_are_not_worth_a_row(door: Mailbox, drafter: Drafter) -> None:
    put(door, 0, TEXT, tree_of(([1], 0.9), ([1, 2], 0.3), ([1, 2, 3], 0.3)))
    assert propose(drafter, TEXT) == [[1, 2]]
    assert propose(drafter, [*TEXT, 1]) == [[2]]
    assert propose(drafter, [*TEXT, 1, 2]) == [[3]]


@pytest.mark.parametrize("offset", [64, 68, 72, 76, 80, 80 + 4 * NODES, 80 + 5 * NODES])
def test_a_slot_that_is_torn_is_a_miss(path: Path, door: Mailbox, drafter: Drafter, offset: int) -> None:
    put(door, 0, TEXT, tree_of(([1, 2], 0.9)))
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([whole[offset] ^ 1]))
    assert propose(drafter, TEXT) == [[]]
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(whole[offset : offset + 1])
    assert propose(drafter, TEXT) == [[1, 2]]


def test_sessions_with_one_text_have_a_tree_and_a_record_each(door: Mailbox, drafter: Drafter) -> None:
    put(door, 0, TEXT, tree_of(([1], 0.9)))
    put(door, 3, TEXT, tree_of(([2], 0.9)))
    assert sorted(propose(drafter, TEXT, TEXT)) == [[1], [2]]
    assert door.step(0, len(TEXT)) == door.step(3, len(TEXT)) == (1, 1)


def test_a_freed_slot_remembers_no_step(door: Mailbox, drafter: Drafter) -> None:
    put(door, 0, TEXT, tree_of(([1], 0.9)))
    propose(drafter, TEXT)
    door.clear(0)
    assert door.step(0, len(TEXT)) is None


def test_a_file_that_is_no_mailbox_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=3))
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(EngineError, match="paceline cloud --engine vllm"):
        Drafter(config)
    other = tmp_path / "other"
    for content in (b"", b"x" * 5000, None):
        other.unlink(missing_ok=True) if content is None else other.write_bytes(content)
        monkeypatch.setenv(VARIABLE, str(other))
        with pytest.raises(EngineError, match="other"):
            Drafter(config)
    whole = Mailbox.create(1)
    other.write_bytes(whole.read_bytes()[:-1])
    whole.unlink()
    with pytest.raises(EngineError, match="no mailbox of this version"):
        Mailbox(other)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    tree, nodes = Tree(0), [0]
    for _ in range(draw(st.integers(0, 40))):
        parent, token = draw(st.sampled_from(nodes)), draw(st.integers(0, 5))
        if tree.child(parent, token) is None:
            nodes.append(tree.add(parent, token, -draw(st.integers(0, 12)) / 16))
    return tree


@settings(deadline=None, max_examples=300)
@given(trees(), st.lists(st.integers(0, 5), max_size=6), st.integers(1, 6))
def test_branches_say_what_the_tree_says(tree: Tree, path: list[int], limit: int) -> None:
    held, chain = Branches.of(tree, END).below(path, limit)
    node: int | None = tree.root
    for token in path:
        node = None if node is None else tree.child(node, token)
    assert held == (0 if node is None else len(list(tree.subtree(node))) - 1)
    expected: list[int] = []
    start = node
    while node is not None and tree.children(node) and len(expected) < limit:
        node = max(tree.children(node), key=lambda c: (tree.weight(c), -c))
        if start is not None and tree.weight(start) - tree.weight(node) > math.log(10):
            break
        expected.append(tree.token(node))
    assert chain == expected


def test_positions_beyond_the_end_and_nodes_beyond_the_room_are_left_out() -> None:
    tree = tree_of(([1, 2, 3, 4], 1.0))
    assert Branches.of(tree, 2).tokens == [1, 2]
    node = tree.root
    for i in range(3 * NODES):
        node = tree.add(node, i)
    assert len(Branches.of(tree, END).tokens) == NODES
