"""Drawn siblings in both ends' books: what is refused, that they stay together and in order, late, doubled and resumed."""

from collections.abc import Sequence
from typing import Any

import pytest
from paceline.cloud.backup import Ngram, TopUp
from paceline.protocol.cloud_session import CloudSession, Limits, Plan, Walk
from paceline.protocol.codec import decode_from_edge, encode
from paceline.protocol.edge_session import EdgeSession
from paceline.protocol.errors import Code, ProtocolError
from paceline.protocol.messages import MAX_MESSAGE_BYTES, MAX_PROPOSALS, Draft, Open, Opened
from paceline.protocol.proposal import MAX_PROPOSAL, Draw, Proposal, draws
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling

LIMITS = Limits(vocabulary=100, context=1000, nodes=6)
WARM = Sampling(temperature=1.0)


def cloud(rule: str = "rejection", **more: Any) -> CloudSession:
    return CloudSession(Open(1, (1, 2), WARM, 500, rule=rule, **more), LIMITS, "token")


def edge() -> EdgeSession:
    session = EdgeSession(GenerationRequest((1, 2), WARM, 500), rule="rejection", vocabulary_size=100)
    session.open(1)
    session.receive(Opened(1, 0, "token", 500))
    return session


def draft(first: int, parents: Sequence[int], tokens: Sequence[int], *proposals: Proposal, base: int = 0) -> Draft:
    return Draft(1, base, first, tuple(parents), tuple(tokens), bytes(range(len(tokens), 0, -1)), proposals)


def family(session: EdgeSession, parent: int, tokens: Sequence[int], chances: Sequence[float]) -> list[int]:
    nodes = [session.tree.add(parent, t, c) for t, c in zip(tokens, chances, strict=True)]
    session.drew(nodes, (*tokens, 98), bytes([5] * len(tokens) + [1]))
    return nodes


PAIR = Proposal(2, (5, 6, 7), b"\x03\x02\x01")


@pytest.mark.parametrize(
    ("bad", "code", "says"),
    [
        (draft(0, (0, 0), (5, 6), Proposal(2, (5, 6), b"\x01")), Code.BAD_PROPOSAL, "2 tokens and 1 counts"),
        (draft(0, (0, 0), (5, 6), Proposal(2, (5, 6), b"\x01\x00")), Code.BAD_PROPOSAL, "a count is 0"),
        (draft(0, (0, 0), (5, 6), Proposal(2, (5, 6, 5), b"\x01\x02\x01")), Code.BAD_PROPOSAL, "stands there twice"),
        (draft(0, (0, 0), (5, 5), PAIR), Code.BAD_PROPOSAL, "drawn twice"),
        (draft(0, (0, 0), (5, 8), PAIR), Code.BAD_PROPOSAL, "not among"),
        (draft(0, (0, 0), (5, 6), Proposal(2, (5, 6, 100), b"\x01\x01\x01")), Code.BAD_TOKEN, "100"),
        (draft(0, (0, 1), (5, 6), PAIR), Code.BAD_PROPOSAL, "several parents"),
        (draft(0, (0, 1, 1), (4, 5, 6), Proposal(1), PAIR), Code.BAD_PROPOSAL, "several parents, from node 1"),
        (draft(0, (0, 0, 0), (5, 6, 7), PAIR), Code.BAD_PROPOSAL, "other than 3 nodes"),
        (draft(0, (0, 0), (5, 6), PAIR, Proposal(1)), Code.BAD_PROPOSAL, "other than 2 nodes"),
    ],
)
def test_proposals_that_cannot_be_are_refused_and_leave_nothing_behind(bad: Draft, code: Code, says: str) -> None:
    session = cloud()
    with pytest.raises(ProtocolError, match=says, check=lambda e: e.code is code and e.sid == 1):
        session.receive(bad)
    assert len(session.tree) == 0
    session.receive(draft(0, (0, 0), (5, 6), PAIR))
    assert session.plan(9).draws == tuple(draws((5, 6), PAIR))


def test_a_coupled_session_takes_no_proposals() -> None:
    with pytest.raises(ProtocolError, match="not 'rejection'", check=lambda e: e.code is Code.BAD_PROPOSAL):
        cloud("coupled").receive(draft(0, (0, 0), (5, 6), PAIR))


def test_a_plan_holds_the_first_of_a_family_in_the_order_of_drawing_whatever_their_weights() -> None:
    session = cloud()
    session.receive(draft(0, (0, 0, 0), (5, 6, 7), Proposal(3, (5, 6, 7), b"\x01\x02\x03")))  # the last weighs most
    for width in range(4):
        plan = session.plan(width)
        assert plan.tokens == (5, 6, 7)[:width]
        assert [d.before for d in plan.drawn_below(-1)] == [(), (5,), (5, 6)][:width]
    session.receive(draft(3, (0, 4), (9, 8), Proposal(2)))  # picked ones come after the draws, however likely
    assert session.plan(3).tokens == (5, 6, 7)
    assert session.plan(5).draws[-1] is None


def test_nodes_picked_under_the_rule_need_no_proposal() -> None:
    session = cloud()
    session.receive(draft(0, (0, 1), (5, 6)))
    assert session.plan(9).draws == ()


def test_what_finds_no_room_is_the_end_of_a_family() -> None:
    session = cloud()
    session.receive(draft(0, range(5), range(10, 15)))
    with pytest.raises(ProtocolError, check=lambda e: e.code is Code.TREE_LIMIT):
        session.receive(draft(5, (1, 2), (5, 6), PAIR))
    assert [session.tree.token(n) for n in session.intake.draws] == [5]


def test_late_draws_that_agree_keep_their_descendants_as_draws() -> None:
    session = cloud()
    session.apply(Plan(), Walk((), 6))
    session.receive(draft(0, (0, 0, 1), (5, 6, 7), PAIR, Proposal(1, (7, 8), b"\x01\x09")))
    assert session.plan(9).draws == (Draw(7, Proposal(1, (7, 8), b"\x01\x09")),)
    assert session.counters.stale == 1


def test_a_second_family_for_a_place_is_stale_and_the_same_one_again_is_not() -> None:
    session = cloud()
    session.receive(draft(0, (0, 0), (5, 6), PAIR))
    session.receive(draft(2, (0,), (7,), Proposal(1, (7, 8), b"\x01\x01")))
    assert (len(session.tree), session.counters.stale) == (2, 1)
    session.resume(Open(2, (1, 2), WARM, 500, rule="rejection"))
    session.receive(draft(0, (0, 0, 1), (5, 6, 9), PAIR, Proposal(1)))
    assert (len(session.tree), session.counters.stale) == (3, 1)
    assert session.plan(9).drawn_below(-1) == draws((5, 6), PAIR)


def test_what_the_cloud_drafts_itself_gives_way_to_draws() -> None:
    session = CloudSession(Open(1, (1, 2, 3, 1, 2), WARM, 500, rule="rejection"), LIMITS, "token")
    top_up = TopUp(Ngram(), 2)
    (stub,) = top_up.look(session, 8)
    drafted = top_up.draft(stub, 0.03, ())
    assert [t for t, *_ in drafted] == [3, 1]
    session.receive(draft(0, (0, 0), (5, 6), PAIR))  # meanwhile
    assert top_up.put(session, stub, drafted) is None
    assert session.plan(9).drawn_below(-1) == draws((5, 6), PAIR)


def test_memory_of_draws_follows_the_tree() -> None:
    session = cloud()
    for i in range(400):
        session.receive(draft(2 * i, (0, 0), (5, 6), PAIR, base=i))
        session.apply(Plan(), Walk((), 9))
    assert len(session.intake.draws) < 200
    assert len(session.intake._ceiling) < 200


# ---- the edge


def test_what_was_drawn_together_is_sent_together_once_and_again_after_a_cut() -> None:
    session = edge()
    first = family(session, session.tree.root, (5, 6), (-0.1, -2.0))
    below = family(session, first[1], (7,), (-0.3,))
    (message,) = session.send([first[1], below[0]])
    assert (message.tokens, message.parents) == ((5, 6, 7), (0, 0, 1))
    assert message.proposals == (Proposal(2, (5, 6, 98), b"\x05\x05\x01"), Proposal(1, (7, 98), b"\x05\x01"))
    assert decode_from_edge(encode(message)) == message
    assert session.send([first[0]]) == []
    held = cloud()
    held.receive(message)
    opened = session.open(2)
    session.receive(Opened(2, 0, "token", 500))
    held.resume(opened)
    for again in session.send([*first, *below]):
        held.receive(again)
    assert (len(held.tree), held.counters.stale) == (3, 0)


def test_messages_of_draws_stay_below_a_kilobyte() -> None:
    session = edge()
    parent, nodes = session.tree.root, list[int]()
    for _ in range(60):
        tokens = range(MAX_PROPOSAL - 1)
        children = [session.tree.add(parent, t, -0.1 - t) for t in tokens[:5]]
        session.drew(children, (*tokens, 98), bytes([8] * MAX_PROPOSAL))
        nodes += children
        parent = children[0]
    messages = session.send(nodes)
    assert [t for m in messages for t in m.tokens] == [*range(5)] * 60
    assert all(len(encode(m)) <= MAX_MESSAGE_BYTES for m in messages)
    assert all(
        len(m.proposals) <= MAX_PROPOSALS and sum(p.nodes for p in m.proposals) == len(m.tokens) for m in messages
    )


def test_many_small_families_keep_to_the_proposals_a_message_may_hold() -> None:
    session = edge()
    parent, nodes = session.tree.root, list[int]()
    for _ in range(80):
        [parent] = family(session, parent, (5,), (-0.1,))
        nodes.append(parent)
    messages = session.send(nodes)
    assert sum(len(m.tokens) for m in messages) == 80
    assert all(decode_from_edge(encode(m)) == m for m in messages)
