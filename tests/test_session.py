"""Both state machines, transition by transition. Whether the text is right is `test_exactness`'s; here: books, limits, errors."""

from collections.abc import Sequence
from typing import Any

import pytest
from paceline.protocol.cloud_session import CloudSession, Limits, Plan, Walk
from paceline.protocol.codec import encode
from paceline.protocol.edge_session import EdgeSession, Phase
from paceline.protocol.errors import Code, ProtocolError
from paceline.protocol.messages import (
    MAX_COMMIT,
    MAX_MESSAGE_BYTES,
    NODE_WINDOW,
    Commit,
    Draft,
    Error,
    Open,
    Opened,
)
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling

LIMITS = Limits(vocabulary=100, context=1000, nodes=50)
STOP = 99


def cloud(limits: Limits = LIMITS, **fields: Any) -> CloudSession:
    request = {"sid": 1, "prompt": (1, 2), "sampling": Sampling(), "max_tokens": 500, "stop_ids": (STOP,)} | fields
    return CloudSession(Open(**request), limits, "token")


def draft(first: int, parents: Sequence[int], tokens: Sequence[int], base: int = 0, **more: Any) -> Draft:
    return Draft(1, base, first, tuple(parents), tuple(tokens), **more)


def step(session: CloudSession, *tokens: int, width: int = 16, **more: Any) -> Commit:
    """A verification in which the target's choices are `tokens`, as far as the plan goes along with them."""
    plan = session.plan(width)
    accepted: list[int] = []
    for token in tokens:
        here = accepted[-1] if accepted else -1
        below = [i for i, t in enumerate(plan.tokens) if plan.parents[i] == here and t == token]
        if not below:
            return session.apply(plan, Walk(tuple(accepted), token, **more))
        accepted.append(below[0])
    raise AssertionError("the last of the tokens must not be in the plan")


def refused(code: Code) -> Any:
    return pytest.raises(ProtocolError, check=lambda e: e.code is code and e.sid == 1)


# ---- cloud: what is refused


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"prompt": ()}, Code.BAD_PROMPT, "empty"),
        ({"prompt": (1, 100)}, Code.BAD_TOKEN, "100"),
        ({"held": (100,)}, Code.BAD_TOKEN, "100"),
        ({"prompt": (1,) * 1000}, Code.CONTEXT, "1000"),
        ({"held": (1, 2, 3), "max_tokens": 2}, Code.BAD_MESSAGE, "max_tokens"),
        ({"held": (STOP, 3)}, Code.BAD_MESSAGE, "stop"),
        ({"rule": "other"}, Code.UNSUPPORTED, "other"),
    ],
)
def test_what_cannot_be_generated_is_refused(fields: dict[str, Any], code: Code, says: str) -> None:
    with refused(code) as e:
        cloud(**fields)
    assert says in str(e.value)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (draft(0, [0, 1], [5]), Code.BAD_MESSAGE),
        (draft(0, [0, 1], [5, 6], weights=b"\0"), Code.BAD_MESSAGE),
        (draft(0, [0, 1], [5, 100]), Code.BAD_TOKEN),
        (draft(0, [0, 2], [5, 6]), Code.BAD_PARENT),
        (draft(NODE_WINDOW + 1, [0], [5]), Code.BAD_PARENT),
        (draft(0, [0], [5], base=1), Code.BAD_BASE),
    ],
)
def test_a_refused_draft_leaves_nothing_behind(bad: Draft, code: Code) -> None:
    session = cloud()
    with refused(code):
        session.receive(bad)
    assert (len(session.tree), session.counters.drafted, session.acknowledged) == (0, 0, 0)
    session.receive(draft(0, [0, 1], [5, 6]))
    assert step(session, 5, 6, 7).accepted == 2


def test_nodes_beyond_the_limit_are_dropped_and_the_session_goes_on() -> None:
    session = cloud()
    session.receive(draft(0, [0] * 48, range(48)))
    with refused(Code.TREE_LIMIT) as e:
        session.receive(draft(48, [0, 0, 0, 1], [48, 49, 50, 51]))
    assert "2 nodes" in str(e.value) or "1 nodes" in str(e.value)
    assert len(session.tree) == 50
    commit = step(session, 48, 3, width=64)
    assert (commit.accepted, commit.held, commit.stale) == (1, 50, 2)


def test_an_acknowledgement_of_what_was_not_written_is_refused() -> None:
    session = cloud()
    step(session, 5)
    session.acknowledge(1)
    with refused(Code.BAD_BASE):
        session.acknowledge(2)


# ---- cloud: late, doubled, lost


def test_late_nodes_that_agree_keep_their_descendants() -> None:
    session = cloud()
    for token in (5, 6, 7):
        step(session, token)
    session.receive(draft(0, [0, 1, 1, 1, 1], [5, 6, 7, 8, 9]))  # a chain from the empty text; 5, 6, 7 are known by now
    assert step(session, 8, 9, 4).accepted == 2
    assert session.counters.stale == 0


def test_late_nodes_that_disagree_are_counted_with_their_descendants() -> None:
    session = cloud()
    step(session, 5)
    session.receive(draft(0, [0, 1, 0], [6, 7, 5]))
    commit = step(session, 1)
    assert (commit.held, commit.stale) == (0, 2)
    assert step(session, 1).stale == 0, "reported once"


def test_a_late_child_of_a_node_that_was_walked_through() -> None:
    session = cloud()
    session.receive(draft(0, [0], [5]))
    assert step(session, 5, 6).tokens == (5, 6)
    session.receive(draft(1, [1, 1], [6, 7]))  # below node 0; 6 is known by now, 7 comes next
    session.receive(draft(3, [3], [9]))  # below node 0 again, but there stands 6
    commit = step(session, 7, 8)
    assert (commit.accepted, commit.stale) == (1, 1)


def test_frames_that_come_twice_or_are_overtaken_or_lost() -> None:
    session = cloud()
    one, two, three = draft(0, [0, 1], [5, 6]), draft(2, [1], [7]), draft(3, [1], [8])
    session.receive(one)
    session.receive(one)
    session.receive(three)  # its parent, node 2, has not come
    session.receive(two)  # overtaken: its number is past
    assert (len(session.tree), session.counters.drafted) == (2, 3)
    commit = step(session, 5, 6, 7)
    assert (commit.tokens, commit.accepted, commit.stale) == ((5, 6, 7), 2, 1)


def test_the_same_node_under_two_numbers_is_one_node() -> None:
    session = cloud()
    session.receive(draft(0, [0], [5]))
    session.receive(draft(1, [0, 1], [5, 6]))
    assert len(session.tree) == 2
    assert step(session, 5, 6, 7).accepted == 2


def test_weights_decide_which_nodes_go_along() -> None:
    session = cloud()
    session.receive(draft(0, [0, 0, 1], [5, 6, 7], weights=bytes([32, 8, 8])))
    assert session.plan(1).tokens == (6,)
    assert session.plan(2).tokens == (6, 7)
    assert session.plan(9).tokens == (6, 7, 5)
    assert session.plan(9).parents == (-1, 0, -1)
    assert session.plan(0) == Plan(base=0, held=3)


# ---- cloud: where a text ends


def test_nothing_follows_a_stop_token() -> None:
    session = cloud()
    session.receive(draft(0, [0, 1, 1, 1], [5, STOP, 6, 7]))
    commit = step(session, 5, STOP, 6, 7, 8)
    assert (commit.tokens, commit.finish, commit.accepted) == ((5, STOP), "stop", 2)
    assert session.counters.accepted == 2
    assert session.committed == [5, STOP]


def test_a_stop_on_the_limit_is_a_stop_and_one_beyond_it_is_not() -> None:
    for limit, finish in ((4, "stop"), (3, "stop"), (2, "length")):
        session = cloud(max_tokens=limit)
        session.receive(draft(0, [0, 1, 1, 1], [10, 11, STOP, 20]))
        commit = (
            step(session, 10, 11, STOP)
            if limit == 3
            else step(session, 10, 11)
            if limit == 2
            else step(session, 10, 11, STOP, 20)
        )
        assert (commit.tokens, commit.finish) == ((10, 11, STOP)[:limit], finish)


def test_no_plan_reaches_beyond_the_limit_or_what_a_commit_may_hold() -> None:
    session = cloud(max_tokens=3)
    session.receive(draft(0, [0, 1, 1, 1], [5, 6, 7, 8]))
    assert session.plan(16).tokens == (5, 6)
    assert step(session, 5, 6, 7).finish == "length"
    long = cloud(Limits(100, 10_000, nodes=2000), max_tokens=5000)
    for i in range(10):
        long.receive(draft(100 * i, [0 if i == 0 else 1] + [1] * 99, [5] * 100))
    assert len(long.plan(2000).nodes) == MAX_COMMIT - 1
    assert len(step(long, *[5] * (MAX_COMMIT - 1), 6, width=2000).tokens) == MAX_COMMIT


def test_the_context_bounds_the_text() -> None:
    session = cloud(Limits(vocabulary=100, context=4), max_tokens=500)
    assert session.max_tokens == 2
    step(session, 5)
    assert step(session, 6).finish == "length"


def test_logprobs_are_cut_with_the_tokens() -> None:
    session = cloud(logprobs=0)
    session.receive(draft(0, [0, 1], [STOP, 6]))
    commit = step(session, STOP, 6, 7, logprobs=tuple(((t, -0.5),) for t in (STOP, 6, 7)))
    assert commit.logprobs == (((STOP, -0.5),),)


def test_a_cancelled_session_says_so() -> None:
    session = cloud()
    session.cancel()
    assert session.finish == "cancelled"
    done = cloud(held=(STOP,))
    done.cancel()
    assert done.finish == "stop"


def test_a_walk_that_is_no_path_is_our_own_mistake() -> None:
    session = cloud()
    session.receive(draft(0, [0, 0], [5, 6]))
    with pytest.raises(AssertionError, match="path"):
        session.apply(session.plan(2), Walk((0, 1), 7))
    plan = session.plan(2)
    step(session, 9)
    with pytest.raises(AssertionError, match="grew"):
        session.apply(plan, Walk((), 7))


# ---- cloud: after a cut


def test_a_session_kept_brings_the_edge_up_to_date_and_keeps_its_tree() -> None:
    session = cloud(logprobs=0)
    for token in (5, 6, 7):
        step(session, token, logprobs=(((token, -1.0),),))
    session.receive(draft(0, [0, 1], [8, 9], base=3))
    again = Open(2, (1, 2), Sampling(), 500, (STOP,), held=(5,), resume="token", logprobs=0)
    assert session.continues(again)
    (commit,) = session.resume(again)
    assert (commit.sid, commit.base, commit.tokens, commit.finish) == (2, 1, (6, 7), "")
    assert commit.logprobs == (((6, -1.0),), ((7, -1.0),))
    session.receive(Draft(2, 3, 0, (0, 1, 1), (8, 9, 10)))  # numbered anew: two of them are here already
    assert (len(session.tree), session.counters.stale) == (3, 0)
    assert step(session, 8, 9, 10, 11).accepted == 3


@pytest.mark.parametrize(
    "change", [{"prompt": (1, 3)}, {"sampling": Sampling(seed=1)}, {"max_tokens": 9}, {"held": (6,)}, {"held": (5, 6)}]
)
def test_another_request_does_not_continue_a_session(change: dict[str, Any]) -> None:
    session = cloud()
    step(session, 5)
    request = {"sid": 2, "prompt": (1, 2), "sampling": Sampling(), "max_tokens": 500, "stop_ids": (STOP,), "held": (5,)}
    assert session.continues(Open(**request))
    assert not session.continues(Open(**request | change))


def test_an_end_that_was_missed_is_told_again() -> None:
    session = cloud()
    step(session, 5)
    step(session, STOP)
    assert [(c.base, c.tokens, c.finish) for c in session.catch_up(1)] == [(1, (STOP,), "stop")]
    assert [(c.base, c.tokens, c.finish) for c in session.catch_up(2)] == [(2, (), "stop")]
    fresh = cloud(held=(5, STOP))
    assert (fresh.finish, fresh.catch_up(2)[0].finish) == ("stop", "stop")
    assert cloud(held=(5,) * 500).finish == "length"
    assert cloud(held=(5,)).catch_up(1) == []


def test_a_long_text_is_told_in_commits_of_the_allowed_length() -> None:
    session = cloud(Limits(100, 10_000), held=(5,) * 1100, max_tokens=1100)
    commits = session.catch_up(10)
    assert [len(c.tokens) for c in commits] == [512, 512, 66]
    assert [c.finish for c in commits] == ["", "", "length"]
    assert [c.base for c in commits] == [10, 522, 1034]


def test_a_session_taken_over_goes_on_at_its_position() -> None:
    session = cloud(held=(5, 6))
    assert session.position == 4
    assert session.sequence == [1, 2, 5, 6]
    assert [session.after(n) for n in range(5)] == [tuple(session.sequence[n:]) for n in range(5)]
    session.receive(draft(0, [0], [7], base=2))
    commit = step(session, 7, 8)
    assert (commit.base, commit.tokens) == (2, (7, 8))


# ---- memory


@pytest.mark.parametrize("acknowledges", [True, False])
def test_memory_of_both_ends_stays_flat_over_100_000_tokens(acknowledges: bool) -> None:
    limits = Limits(vocabulary=100, context=200_000)
    c = cloud(limits, max_tokens=100_000, sampling=Sampling())
    e = EdgeSession(GenerationRequest((1, 2), Sampling(), 100_000, (STOP,)))
    e.open(1)
    e.receive(Opened(1, 0, "token", 100_000))
    while e.phase is Phase.RUNNING:
        for parent in (e.tree.root, e.tree.next_id - 1):
            if acknowledges:
                e.tree.add(parent, 5, -0.1), e.tree.add(parent, 6, -1.0)
        for message in e.send(range(e.tree.next_id - 4, e.tree.next_id)) if acknowledges else ():
            c.receive(message)
        length = len(c.committed)
        e.receive(step(c, 5, 7) if acknowledges and length % 3 else step(c, 8))
    assert len(e.committed) == 100_000
    for tree in (e.tree, c.tree):
        assert len(tree._state) < 2.1 * NODE_WINDOW
    assert max(len(e._numbers), len(c.intake.nodes) + len(c.intake.written)) <= 2.1 * NODE_WINDOW


# ---- edge


def edge(**more: Any) -> EdgeSession:
    session = EdgeSession(GenerationRequest((1, 2), Sampling(), 100, (STOP,)), **more)
    session.open(1)
    session.receive(Opened(1, 0, "token", 100))
    return session


def test_an_edge_opens_runs_and_ends() -> None:
    e = EdgeSession(GenerationRequest((1, 2), Sampling(seed=3), 100, (STOP,), logprobs=2))
    assert e.phase is Phase.OPENING
    assert e.open(4) == Open(4, (1, 2), Sampling(seed=3), 100, (STOP,), logprobs=2)
    e.receive(Opened(4, 0, "token", 100))
    assert e.phase is Phase.RUNNING
    (event,) = e.receive(Commit(4, 0, (5, 6)))
    assert (event.tokens, e.committed, e.position) == ((5, 6), [5, 6], 4)
    assert e.ack().committed_len == 2
    (event,) = e.receive(Commit(4, 2, (STOP,), finish="stop"))
    assert (e.phase, e.finish) == (Phase.DONE, "stop")
    assert e.receive(Commit(4, 3, (7,))) == []
    assert e.committed == [5, 6, STOP]


def test_drafts_name_parents_by_number_and_the_text_by_length() -> None:
    e = edge()
    a = e.tree.add(e.tree.root, 5, -0.5)
    b = e.tree.add(a, 6, -20.0)
    c = e.tree.add(e.tree.root, 7, -0.03)
    (message,) = e.send([a, b, c])
    assert message == Draft(1, 0, 0, (0, 1, 0), (5, 6, 7), bytes([8, 255, 0]))
    assert e.sent(a)
    assert e.send([a, b, c]) == []
    (event,) = e.receive(Commit(1, 0, (5,)))
    assert event.walked == (a,)
    d = e.tree.add(b, 8)
    f = e.tree.add(e.tree.root, 9)
    assert e.send([c, d, f, e.tree.root]) == [Draft(1, 1, 3, (2, 0), (8, 9), b"\0\0")]


def test_long_drafts_are_split_below_a_kilobyte() -> None:
    e = edge(vocabulary_size=2**31)
    nodes = [e.tree.add(e.tree.root, 2**31 - 1 - i, -9.0) for i in range(300)]
    e.sid = 2**32 - 1
    drafts = e.send(nodes)
    assert sum(len(d.tokens) for d in drafts) == 300
    assert [d.first for d in drafts] == [sum(len(d.tokens) for d in drafts[:i]) for i in range(len(drafts))]
    assert max(len(encode(d)) for d in drafts) < MAX_MESSAGE_BYTES


def test_a_node_whose_parents_number_is_out_of_reach_is_not_sent() -> None:
    e = edge()
    a = e.tree.add(e.tree.root, 5)
    e.send([a])
    others = [e.tree.add(e.tree.root, 10 + i) for i in range(NODE_WINDOW)]
    e.send(others)
    b = e.tree.add(a, 6)
    c = e.tree.add(b, 7)
    assert e.send([b, c]) == []
    assert not e.sent(b)


def test_commits_that_come_twice_or_overlap_add_only_what_is_new() -> None:
    e = edge()
    e.receive(Commit(1, 0, (5, 6)))
    assert e.receive(Commit(1, 0, (5, 6))) == []
    (event,) = e.receive(Commit(1, 1, (6, 7)))
    assert event.tokens == (7,)
    assert e.receive(Commit(1, 0, (5,))) == []
    assert e.committed == [5, 6, 7]


@pytest.mark.parametrize(
    ("commit", "code"),
    [
        (Commit(1, 3, (7,)), Code.BAD_BASE),
        (Commit(1, 0, (5, 9)), Code.DIVERGED),
        (Commit(1, 1, (9, 9)), Code.DIVERGED),
        (Commit(1, 2, (7,) * 99), Code.BAD_MESSAGE),
        (Commit(1, 2, (100,)), Code.BAD_TOKEN),
    ],
)
def test_a_cloud_that_contradicts_itself_fails_the_session_and_the_text_stays(commit: Commit, code: Code) -> None:
    e = edge(vocabulary_size=100)
    e.receive(Commit(1, 0, (5, 6)))
    with refused(code):
        e.receive(commit)
    assert (e.phase, e.committed) == (Phase.FAILED, [5, 6])
    assert e.error is not None
    assert e.error.code is code
    assert e.open(2).held == (5, 6), "it can be opened again with what is held"


def test_tokens_before_the_session_is_open_or_an_opening_that_forgets_some() -> None:
    e = EdgeSession(GenerationRequest((1,), Sampling(), 10))
    e.open(1)
    with refused(Code.BAD_STATE):
        e.receive(Commit(1, 0, (5,)))
    e = edge()
    e.receive(Commit(1, 0, (5, 6)))
    e.open(1)
    with refused(Code.BAD_BASE):
        e.receive(Opened(1, 0, "", 100))


def test_after_a_reconnect_nothing_of_the_old_sid_counts() -> None:
    e = edge()
    a = e.tree.add(e.tree.root, 5)
    e.send([a])
    again = e.open(2)
    assert (again.sid, again.held, again.resume) == (2, (), "token")
    assert e.receive(Commit(1, 0, (5,), finish="stop")) == []
    assert e.receive(Error(Code.ENGINE, "gone", 1)) == []
    assert e.phase is Phase.OPENING
    e.receive(Opened(2, 0, "other", 100))
    assert [d.first for d in e.send([a])] == [0], "the tree is kept, its numbers begin anew"


def test_errors_end_the_session_but_for_harmless_ones() -> None:
    e = edge()
    e.receive(Error(Code.TREE_LIMIT, "3 nodes dropped", 1))
    e.receive(Error(Code.ENGINE, "of another session", 7))
    e.receive(Error(Code.OVERLOADED, "of the connection"))
    assert e.phase is Phase.RUNNING
    e.receive(Error(Code.ENGINE, "out of memory", 1, retry_after=2.0))
    assert e.phase is Phase.FAILED
    assert e.error is not None
    assert (e.error.code, e.error.retryable, e.error.retry_after) == (Code.ENGINE, True, 2.0)
    assert e.receive(Commit(1, 0, (5,))) == []


def test_a_cancelled_edge_takes_nothing_more() -> None:
    e = edge()
    e.receive(Commit(1, 0, (5,)))
    assert e.cancel().sid == 1
    assert e.receive(Commit(1, 1, (6,))) == []
    assert (e.phase, e.finish, e.committed) == (Phase.DONE, "cancelled", [5])
