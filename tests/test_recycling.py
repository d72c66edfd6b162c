"""What is offered again of what the edge drafted elsewhere: where, how far, and how far it is believed."""

import math
from random import Random

import pytest
from paceline.cloud.backup import LONGEST
from paceline.cloud.recycling import FAINT, GOES_ON, LEADS, LEAST, MOST, NODE, Recycling
from paceline.cloud.selection import NOWHERE, Part, choose
from paceline.protocol.cloud_session import CloudSession, Limits, Plan, Walk
from paceline.protocol.messages import Draft, Open
from paceline.protocol.sampling import Sampling

FREE = [1.0] * 100  # seconds of a step, however many nodes it takes along
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


def part_of(one: CloudSession, recycling: Recycling, least: float = FAINT) -> Part:
    """What a step takes along that could take more."""
    part = Part(one, least=math.log(least))
    assert choose([part], FREE, 1.0, recycling) == -math.inf, "nothing was left out"
    return part


def words(one: CloudSession, recycling: Recycling, least: float = FAINT) -> list[list[int]]:
    return [chain.tokens for chain in part_of(one, recycling, least).chains]


def places(part: Part) -> list[list[int]]:
    """Of what is offered again, in the plan that was made."""
    return [list(chain) for chain in part.recycled]


def test_what_was_drafted_for_another_word_is_offered_where_it_fits() -> None:
    assert part_of(session(), Recycling()).plan() == Plan(base=0)  # nothing was drafted yet
    one = drafted(session(), (0, 1, 1, 1, 3), (4, 5, 6, 7, 8))
    part = part_of(one, Recycling())
    assert part.plan() == Plan((NOWHERE,) * 3, (6, 7, 8), (-1, 0, -1), base=2, held=0)
    assert places(part) == [[0, 1], [2]]
    assert part.promised == 0.0  # the edge has not said a word
    commit = one.apply(part.plan(), Walk((0, 1), 9))
    assert (commit.tokens, commit.accepted, commit.held) == ((6, 7, 9), 2, 0)
    assert one.tree.token(one.tree.root) == 9


def test_it_goes_on_where_the_likeliest_chain_ends_and_nowhere_else() -> None:
    one = drafted(session(), (0, 1, 1, 1, 3), (4, 5, 6, 7, 8))  # ends with 9, 5
    for number, (back, token, weight) in enumerate([(0, 8, 1), (1, 5, 1), (0, 10, 40), (1, 11, 0)], 5):
        one.receive(Draft(1, 2, number, (back,), (token,), bytes([weight])))
    part = part_of(one, Recycling(), 0.15)
    plan = part.plan()
    assert plan.tokens == (8, 5, 6, 7, 8, 10, 11)  # depth first: after 8, 5 the words that followed 5 before
    assert [node >= 0 for node in plan.nodes] == [True, True, False, False, False, True, True]
    assert plan.parents == (-1, 0, 1, 2, 1, -1, 5)
    assert places(part) == [[2, 3], [4]]


def test_nothing_goes_on_after_a_word_that_ends_the_text() -> None:
    one = drafted(session(stop_ids=(7,)), (0, 1, 1, 1), (4, 5, 6, 7))
    assert words(one, Recycling()) == [[6]]
    assert words(drafted(session(stop_ids=(6,)), (0, 1, 1, 1), (4, 5, 6, 7)), Recycling()) == []


def test_what_is_hardly_ever_reached_is_not_offered() -> None:
    [chain] = words(drafted(session(), (0,) + (1,) * 59, ROUND * 10), Recycling())
    reach = [LEADS[0] * GOES_ON**i for i in range(len(chain) + 1)]
    assert 1 < len(chain) < LONGEST
    assert reach[-2] >= FAINT > reach[-1]
    assert part_of(drafted(session(), (0,) + (1,) * 59, ROUND * 10), Recycling(), 0.51).plan().nodes == ()


def test_nor_what_would_bring_less_than_its_own_time_costs() -> None:
    one = drafted(session(), (0,) + (1,) * 59, ROUND * 10)
    assert words(one, Recycling(), 0.25) == [[6, 7]]  # reached with 0.5 and 0.3; the next would be with 0.18
    recycling = Recycling()
    assert recycling.least(1.0, 0.03) == FAINT
    assert recycling.least(300.0, 0.03) == pytest.approx(300.0 * NODE / 0.03)


def test_it_leaves_room_for_the_targets_last_token() -> None:
    assert words(drafted(session(max_tokens=4), (0, 1, 1, 1), (4, 5, 6, 7)), Recycling()) == [[6]]
    assert words(drafted(session(max_tokens=3), (0, 1, 1, 1), (4, 5, 6, 7)), Recycling()) == []


def test_it_is_believed_less_the_oftener_it_is_wrong() -> None:
    recycling = Recycling()
    fresh = drafted(session(), (0, 1, 1, 1), (4, 5, 6, 7))
    assert words(fresh, recycling, 0.05) == [[6, 7]]
    part = part_of(fresh, recycling)
    parents = part.plan().parents
    for _ in range(500):
        recycling.learn(part.recycled, parents, ())
    assert recycling.chances[0] < 0.05
    assert words(drafted(session(), (0, 1, 1, 1), (4, 5, 6, 7)), recycling, 0.05) == []
    for _ in range(50_000):
        recycling.learn(part.recycled, parents, ())
    assert min(recycling.chances) > 0  # a logarithm is taken of them


def test_each_place_is_believed_as_often_as_it_was_right() -> None:
    recycling, random = Recycling(), Random(0)
    for _ in range(
        3000
    ):  # the nearest place is right every second time, the next never; what follows four times in five
        first, second = random.random() < 0.5, random.random() < 0.8
        recycling.learn([[0, 1], [2]], (-1, 0, -1), [0, 1][: first + (first and second)])
    assert recycling.chances[0] == pytest.approx(0.5, abs=0.08)
    assert recycling.chances[1] == pytest.approx(LEAST)
    assert recycling.chances[2] <= recycling.chances[1]  # of the nearest first, whatever was learnt
    assert recycling.goes_on == pytest.approx(0.8, abs=0.08)
    for _ in range(3000):
        recycling.learn([[0, 1]], (-1, 0), (0, 1))
    assert recycling.chances[0] == recycling.goes_on == MOST


def test_what_nobody_asked_teaches_nothing() -> None:
    recycling = Recycling()
    before = recycling.chances
    recycling.learn([[1], []], (-1, 0), ())  # the target left the path before it
    assert recycling.chances == before
    recycling.learn([[1], []], (-1, 0), (0,))
    assert recycling.chances[0] < before[0]
    assert recycling.chances[1:] == before[1:]
