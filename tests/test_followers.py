"""What the edge drafted after which token: found near its place, let go of in time."""

from random import Random

from paceline.protocol.cloud_session import CloudSession, Limits
from paceline.protocol.followers import MOST, RECENT, Followers
from paceline.protocol.messages import REJECTION, Draft, Open
from paceline.protocol.sampling import Sampling


def test_the_nearest_place_goes_first_and_of_equals_the_likeliest() -> None:
    found = Followers()
    found.note(0, (3, 7), 10, -0.5)
    found.note(1, (3, 7), 11, -0.1)
    found.note(2, (9, 7), 12, -0.1)
    found.note(3, (4, 7), 10, -2.0)
    assert found.likely(3, 7) == [11, 10, 12]
    assert found.likely(9, 7) == [12, 10, 11]
    assert found.likely(3, 8) == []
    assert [found.chain(at, 7, 1) for at in (3, 9)] == [[11], [12]]
    assert found.chain(3, 8, 1) == []
    found.note(4, (3, 7), 9, -0.1)  # as likely as 11
    assert found.chain(3, 7, 1) == found.likely(3, 7)[:1] == [9]
    assert found.place(2) == (10, 12)


def test_the_likeliest_is_the_first_of_all_wherever_it_stands() -> None:
    random = Random(0)
    for _ in range(200):
        found = Followers()
        for number in range(random.randrange(1, 20)):
            found.note(number, (random.randrange(12), 7), random.randrange(9), random.choice((-0.1, -0.5, -2.0)))
        for at in range(-1, 14):
            assert found.chain(at, 7, 1) == found.likely(at, 7)[:1]


def test_what_follows_nothing_known_is_not_noted() -> None:
    found = Followers()
    found.note(5, None, 1, -0.1)
    assert not found
    assert found.place(5) is None


def test_it_stays_small_whatever_is_sent() -> None:
    found = Followers()
    for number in range(10 * MOST):  # one chain far ahead of a text that never grows
        found.note(number, found.place(number - 1) or (number - 1, number % 97), number * 7 % (5 * MOST), -0.1)
        found.let_go(0)
    assert len(found) <= 2 * MOST
    assert len(found._places) <= 2 * MOST
    for number in range(100):
        found.note(number, (number, 1), number, -0.1)
    assert len(found._after[1]) <= RECENT


def session(rule: str = "coupled") -> CloudSession:
    opened = Open(sid=1, prompt=(1, 2), sampling=Sampling(), max_tokens=40, rule=rule)
    return CloudSession(opened, Limits(100, 4096), "t")


def test_nodes_are_noted_that_the_tree_dropped_or_never_took() -> None:
    s = session()
    s.receive(Draft(sid=1, base_committed_len=0, first=0, parents=(0, 1), tokens=(20, 21)))
    s.committed += [30, 31, 32]  # the target went another way
    s.tree.advance([30, 31, 32])
    s.receive(Draft(sid=1, base_committed_len=0, first=2, parents=(1, 0), tokens=(22, 30)))  # too late
    assert len(s.tree) == 0
    followers = s.intake.followers
    assert followers.likely(0, 20) == [21]
    assert followers.likely(5, 21) == [22]
    assert followers.likely(0, -1) == [20, 30]  # after the prompt


def test_an_edge_that_counts_anew_gets_no_parents_of_before() -> None:
    s = session()
    s.receive(Draft(sid=1, base_committed_len=0, first=0, parents=(0, 1), tokens=(20, 21)))
    s.intake.number_anew()
    s.receive(Draft(sid=1, base_committed_len=0, first=0, parents=(0,), tokens=(25,)))
    assert s.intake.followers.place(0) == (0, 25)
    assert s.intake.followers.place(1) is None


def test_draws_are_not_noted() -> None:
    s = session(REJECTION)
    s.receive(Draft(sid=1, base_committed_len=0, first=0, parents=(0, 1), tokens=(20, 21)))
    assert not s.intake.followers
