"""What is offered again of what the edge drafted elsewhere: where, how far, and how far it is believed."""

import itertools
import math

import pytest
from paceline.cloud.backup import LONGEST
from paceline.cloud.recycling import FAINT, Recycling
from paceline.protocol.cloud_session import CloudSession, Limits
from paceline.protocol.messages import Draft, Open
from paceline.protocol.sampling import Sampling

ROUND = tuple(range(4, 10))  # a ring of words: what follows is always known


def session(max_tokens: int = 40, stop_ids: tuple[int, ...] = ()) -> CloudSession:
    opened = Open(sid=1, prompt=(1, 2, 3), sampling=Sampling(), max_tokens=max_tokens, stop_ids=stop_ids)
    return CloudSession(opened, Limits(12, 4096), "t")


def drafted(one: CloudSession, parents: tuple[int, ...], tokens: tuple[int, ...]) -> CloudSession:
    """The edge drafted these; the target chose another word, and came back to the draft's: 9, 5."""
    one.receive(Draft(sid=1, base_committed_len=0, first=0, parents=parents, tokens=tokens))
    one.committed += [9, 5]
    one.tree.advance([9, 5])
    return one


def words(one: CloudSession, recycling: Recycling, least: float = 0.0) -> list[list[int]]:
    return [[one.tree.token(n) for n in grown.nodes] for grown in recycling.offer(one, least)]


def test_what_was_drafted_for_another_word_is_offered_where_it_fits() -> None:
    assert Recycling().offer(session()) == []  # nothing was drafted yet
    one = drafted(session(), (0, 1, 1, 1, 3), (4, 5, 6, 7, 8))
    near, far = Recycling().offer(one)
    assert [one.tree.token(n) for n in (*near.nodes, *far.nodes)] == [6, 7, 8]
    assert near.parent == far.parent == one.tree.root
    assert [one.tree.parent(n) for n in near.nodes] == [one.tree.root, near.nodes[0]]
    assert [math.exp(one.tree.reach(n)) for n in near.nodes] == pytest.approx([0.5, 0.3])


def test_nothing_goes_on_after_a_word_that_ends_the_text() -> None:
    one = drafted(session(stop_ids=(7,)), (0, 1, 1, 1), (4, 5, 6, 7))
    assert words(one, Recycling()) == [[6]]


def test_what_is_hardly_ever_reached_is_not_offered() -> None:
    one, recycling = drafted(session(), (0,) + (1,) * 59, ROUND * 10), Recycling()
    (grown,) = recycling.offer(one)
    assert 1 < len(grown.nodes) < LONGEST
    reach = list(itertools.accumulate(grown.chances, lambda a, b: a * b))
    assert reach[-1] >= FAINT > reach[-1] * grown.chances[-1]
    assert recycling.offer(one) == []  # the likeliest way, and yet not a likely one


def test_nor_what_would_not_go_along() -> None:
    one = drafted(session(), (0,) + (1,) * 59, ROUND * 10)
    assert words(one, Recycling(), 0.6) == []
    assert words(one, Recycling(), 0.25) == [[6, 7]]  # reached with 0.5 and 0.3; the next would be with 0.18


def test_it_leaves_room_for_the_targets_last_token() -> None:
    assert words(drafted(session(max_tokens=4), (0, 1, 1, 1), (4, 5, 6, 7)), Recycling()) == [[6]]
    assert words(drafted(session(max_tokens=3), (0, 1, 1, 1), (4, 5, 6, 7)), Recycling()) == []


def test_it_is_believed_less_the_oftener_it_is_wrong() -> None:
    recycling = Recycling()
    fresh = drafted(session(), (0, 1, 1, 1), (4, 5, 6, 7))
    assert words(fresh, recycling, 0.05) == [[6, 7]]
    for _ in range(300):
        one = drafted(session(), (0, 1, 1, 1), (4, 5, 6, 7))
        for grown in recycling.offer(one):
            grown.learn(one.tree.root, grown.nodes, ())
    assert recycling.record.trust < 0.1
    assert words(drafted(session(), (0, 1, 1, 1), (4, 5, 6, 7)), recycling, 0.05) == []
