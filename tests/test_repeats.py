"""Repeats: what followed the longest earlier agreement, learned by how often it is right; and their place in a tree."""

import math
import random

import pytest
from paceline.protocol.repeats import KEYS, LONGEST, PLACES, Repeats
from paceline.protocol.tree import Tree


def slow(text: list[int], path: list[int]) -> tuple[int, int] | None:
    """The obvious search: among the latest places that agree in three tokens, or else in two, or in one."""
    end = (text[-LONGEST:] + path)[-LONGEST:]
    for size in KEYS:
        places = [p for p in range(size, len(text)) if len(end) >= size and text[p - size : p] == end[-size:]]
        best = None
        for place in places[::-1][:PLACES]:
            length = 0
            while length < min(len(end), place) and text[place - 1 - length] == end[-1 - length]:
                length += 1
            if best is None or length > best[1]:
                best = (text[place], length)
        if best is not None:
            return best
    return None


@pytest.mark.parametrize("seed", range(40))
def test_the_index_finds_what_a_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(3) for _ in range(60)]
    repeats = Repeats(text[:20])
    repeats.extend(text[20:])
    for _ in range(20):
        path = [rng.randrange(3) for _ in range(rng.randrange(6))]
        found, wanted = repeats.next(path), slow(text, path)
        assert (found and found[0]) == (wanted and wanted[0])


def test_nothing_is_said_of_an_end_that_never_came_before() -> None:
    assert Repeats().next([]) is None
    assert Repeats([1, 2]).next([3, 4]) is None
    assert Repeats([1, 2, 3, 4]).next([9]) is None
    assert Repeats([1, 2, 3, 4]).next([]) is None


def test_one_token_of_agreement_is_enough_and_more_of_it_goes_first() -> None:
    repeats = Repeats([1, 2, 3, 4, 9, 9, 8, 3, 7])
    assert (found := repeats.next([3])) is not None
    assert found[0] == 7  # the latest place
    assert (longer := repeats.next([2, 3])) is not None
    assert longer[0] == 4  # further back, and two tokens agree
    assert longer[1] > found[1] > 0.05


def test_chances_follow_what_happened() -> None:
    right, wrong = Repeats(), Repeats()
    right.extend([1, 2, 3, 4, 5] * 40)
    rng = random.Random(1)
    wrong.extend(t for _ in range(60) for t in (1, 2, 3, 10 + rng.randrange(40)))
    said = right.next([]), wrong.next([1, 2, 3])
    assert said[0] is not None
    assert said[1] is not None
    assert said[0][0] == 1
    assert said[0][1] > 0.95
    assert said[1][1] < 0.4


def test_reweigh_moves_what_hangs_below() -> None:
    tree = Tree(0)
    a = tree.add(tree.root, 1, math.log(0.5))
    b, c = tree.add(a, 2, math.log(0.5)), tree.add(tree.root, 3, math.log(0.6))
    assert [*tree.children(tree.root)] == [c, a]
    tree.reweigh(a, math.log(0.9))
    assert [*tree.children(tree.root)] == [a, c]
    assert tree.reach(a) == pytest.approx(math.log(0.9))
    assert tree.reach(b) == pytest.approx(math.log(0.45))
