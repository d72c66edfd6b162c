"""What the verifier drafts by itself: where it goes on, how far, and that it never changes the text."""

import asyncio
import gc
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from paceline.cloud.backup import BUSHY, LONGEST, LOOKED_AT, TRIAL, Follower, Grown, Ngram, Record, Stub, TopUp, Whole
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.scheduler import Scheduler, Seat
from paceline.protocol.cloud_session import CloudSession, Limits
from paceline.protocol.messages import Commit, Draft, Open
from paceline.protocol.sampling import History, Sampling, choose
from paceline.quant.ngrams import counted

T = TypeVar("T")


class Oracle:
    """Follows with the toy target's own choice, or another token every `wrong`-th time."""

    def __init__(self, engine: ToyEngine, seconds: float, wrong: int = 0) -> None:
        self.seconds, self._engine, self._wrong, self.asked = seconds, engine, wrong, 0

    def begin(self, prompt: Sequence[int], sampling: Sampling, history: History | None) -> Follower:
        return Whole(self.follow, prompt, sampling, history)

    def follow(self, tokens: Sequence[int], sampling: Sampling, history: History | None) -> tuple[int, float] | None:
        self.asked += 1
        token = choose(self._engine.logits(tokens), sampling, len(tokens))
        off = bool(self._wrong) and self.asked % self._wrong == 0
        return (token + off) % self._engine.vocabulary.size, 0.8


def session(max_tokens: int = 40) -> CloudSession:
    return CloudSession(
        Open(sid=1, prompt=(1, 2, 3), sampling=Sampling(), max_tokens=max_tokens), Limits(12, 4096), "t"
    )


def written(*top_ups: TopUp) -> tuple[list[int], int]:
    """The text of a session without an edge, and how many steps it took."""
    text, commits = commits_of(top_ups)
    return text, len(commits)


def commits_of(
    top_ups: Sequence[TopUp], width: int | None = None, recycles: bool = True, sent: Sequence[int] = ()
) -> tuple[list[int], list[Commit]]:
    """Text and commits of a session whose edge has sent the chain `sent`, and nothing more."""
    commits: list[Commit] = []

    async def run_at_once(work: Callable[[], T]) -> T:
        return work()

    async def run() -> list[int]:
        loop = asyncio.get_running_loop()
        scheduler = Scheduler(
            ToyEngine(), run_at_once, loop.time, floor=0.001, width=width, top_ups=top_ups, recycles=recycles
        )
        one, finished = session(), asyncio.Event()
        if sent:
            one.receive(Draft(1, 0, 0, (0, *[1] * (len(sent) - 1)), tuple(sent)))

        def on_commit(commit: Commit) -> None:
            commits.append(commit)
            if commit.finish:
                finished.set()

        scheduler.add(Seat(one, on_commit, lambda e: pytest.fail(str(e))))
        task = asyncio.create_task(scheduler.run())
        await finished.wait()
        task.cancel()
        return one.committed

    return asyncio.run(run()), commits


@pytest.mark.parametrize("wrong", [0, 2, 3])
def test_the_text_is_the_targets_own_in_fewer_steps(wrong: int) -> None:
    plain, steps = written()
    text, fewer = written(TopUp(Oracle(ToyEngine(), 1e-5, wrong), 4))
    assert text == plain
    assert fewer < steps
    assert written(TopUp(Ngram()))[0] == plain
    assert written(TopUp(Oracle(ToyEngine(), 1e-5, wrong), 4), TopUp(Ngram()))[0] == plain


@pytest.mark.parametrize("width", [0, 1, 2, 5])
def test_a_step_is_a_hit_by_what_an_edge_sent_alone(width: int) -> None:
    """Even where more was drafted than the step can take along, so that the text's end is a node of before."""
    plain = written()[0]
    text, commits = commits_of([TopUp(Oracle(ToyEngine(), 1e-5), 4)], width)
    assert text == plain
    assert all(commit.held == 0 for commit in commits)


def test_it_goes_on_from_the_likeliest_chain_the_edge_has_sent() -> None:
    one = session()
    one.receive(Draft(1, 0, 0, (0, 1, 0), (7, 8, 9), bytes((2, 2, 40))))
    top_up = TopUp(Oracle(ToyEngine(), 0.001), 2)
    [stub] = top_up.look(one, 8)
    assert stub.path == (7, 8)
    drafted = top_up.draft(stub, 0.03, ())
    one.receive(Draft(1, 0, 3, (2,), (drafted[0][0],)))  # meanwhile the edge sends the same
    added = top_up.put(one, stub, drafted)
    assert added is not None
    assert len(added.nodes) == 1
    assert added.parents == (one.tree.parent(added.nodes[0]),)
    assert one.tree.token(added.parents[0]) == drafted[0][0]
    assert top_up.put(one, stub, drafted) is None


def test_it_stops_where_another_token_does_not_pay() -> None:
    one = session()
    cheap, dear = TopUp(Oracle(ToyEngine(), 0.0001)), TopUp(Oracle(ToyEngine(), 0.02))
    far, near = (len(t.draft(t.look(one, 8)[0], 0.03, ())) for t in (cheap, dear))
    assert near < far <= LONGEST
    assert TopUp(Oracle(ToyEngine(), 1.0)).draft(dear.look(one, 8)[0], 0.03, ()) == []


def test_it_leaves_room_for_the_targets_last_token() -> None:
    top_up = TopUp(Oracle(ToyEngine(), 0.0001), 8)
    assert len(top_up.draft(top_up.look(session(3), 8)[0], 0.03, ())) == 2


KNOWN = counted([[1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 6], [9, 3, 4, 6, 3, 5, 7]], "v")


def test_several_ideas_for_a_place_make_a_tree() -> None:
    one, top_up = session(), TopUp(Ngram(KNOWN))  # its text is 1, 2, 3
    [stub] = top_up.look(one, 8)
    drafted = top_up.draft(stub, 0.03, ())
    assert all(place < at for at, (_, _, place) in enumerate(drafted)), "parents come first"
    assert {token for token, _, place in drafted if place < 0} >= {4, 5}
    one.receive(Draft(1, 0, 0, (0,), (5,), bytes((9,))))  # meanwhile the edge sends one of them
    grown = top_up.put(one, stub, drafted)
    assert grown is not None
    assert len(grown.nodes) == len(drafted) - 1
    tree, root = one.tree, one.tree.root
    assert [tree.parent(node) for node in grown.nodes] == list(grown.parents)
    paths = {tuple(tree.token(n) for n in tree.path(node)) for node in grown.nodes}
    assert {(4,), (4, 6), (5, 7)} <= paths
    assert len({(tree.parent(n), tree.token(n)) for n in grown.nodes}) == len(grown.nodes)
    before = top_up.record.trust
    grown.learn(root, grown.nodes, [])
    assert top_up.record.trust < before
    assert top_up.draft(stub, 0.03, (4,))[0][0] != 4  # a token that ends the text is none


def test_a_tree_is_no_larger_than_it_may_be() -> None:
    one = session()
    for most in (1, 2, 3):
        top_up = TopUp(Ngram(KNOWN), most)
        assert len(top_up.draft(top_up.look(one, 8)[0], 0.03, ())) == most
    top_up = TopUp(Ngram(counted([[*range(8)] * 40], "v")))
    assert len(top_up.draft(top_up.look(session(400), 8)[0], 0.03, ())) <= BUSHY


def test_a_tree_leaves_room_for_the_targets_last_token() -> None:
    top_up = TopUp(Ngram(KNOWN))
    [stub] = top_up.look(session(3), 8)
    drafted = top_up.draft(stub, 0.03, ())
    depth = [1]
    for _, _, place in drafted[1:]:
        depth.append(1 if place < 0 else depth[place] + 1)
    assert max(depth) == 2


def test_many_sessions_are_thought_about_by_turns() -> None:
    """Where thinking takes long, no step is kept waiting for it."""
    now, asked = 0.0, list[int]()

    class Slow(Ngram):
        def begin(self, prompt: Sequence[int], sampling: Sampling, history: History | None) -> Follower:
            return Thinking(prompt[0])

    class Thinking:
        def __init__(self, first: int) -> None:
            self._first = first

        def extend(self, tokens: Sequence[int]) -> None: ...

        def after(self, path: Sequence[int]) -> Sequence[tuple[int, float]]:
            nonlocal now
            now += 0.002
            asked.append(self._first)
            return []

    async def run_at_once(work: Callable[[], T]) -> T:
        return work()

    async def steps() -> None:
        scheduler = Scheduler(ToyEngine(), run_at_once, lambda: now, floor=0.03, top_ups=[TopUp(Slow())])
        commits, enough = list[Commit](), asyncio.Event()

        def on_commit(commit: Commit) -> None:
            commits.append(commit)
            if len(commits) == 8:  # two steps of four sessions
                enough.set()

        for first in range(4):
            opened = Open(sid=first, prompt=(first, 2, 3), sampling=Sampling(), max_tokens=9)
            one = CloudSession(opened, Limits(12, 4096), "t")
            scheduler.add(Seat(one, on_commit, lambda e: pytest.fail(str(e))))
        task = asyncio.create_task(scheduler.run())
        await enough.wait()
        task.cancel()

    asyncio.run(steps())
    assert asked[:4] == [0, 1, 1, 2]  # 3 ms a step are two of them; the next step begins with the next session


def test_thinking_goes_on_while_it_brings_more_than_the_wait_costs() -> None:
    record = Record()
    for _ in range(500):
        record.thought(0.001)
        record.learn([True], [0.5])  # a thousand tokens a second
    assert record.pays(900)
    assert not record.pays(1100)  # a crowd that would wait for it gets more in that time
    assert record.pays(900)  # and is smaller again
    assert [record.pays(1100) for _ in range(2 * TRIAL)].count(True) > TRIAL  # tried, and nobody came to do it
    record.thought(0.001)
    assert not any(record.pays(1100) for _ in range(TRIAL))
    assert record.pays(1100)
    for _ in range(500):
        record.thought(0.001)  # it brings nothing any more
    assert not record.pays(20)
    free = Record()
    for _ in range(500):
        free.thought(0.0)
    assert free.pays(1e9)  # where it takes no time


def test_ngrams_follow_the_longest_agreement() -> None:
    text = Ngram().begin([5, 1, 2, 3, 9, 4, 1, 2, 7, 1, 2, 3], Sampling(), None)
    assert [token for token, _ in text.after(())] == [9]
    assert 0 < text.after(())[0][1] < 1
    assert [token for token, _ in text.after((9, 4, 1, 2))] == [7]  # the latest of those that agree so far
    text.extend([8])
    assert [token for token, _ in text.after((1, 2, 3))] == [8]
    assert Ngram().begin([1, 2, 3], Sampling(), None).after(()) == []


def test_the_beginning_of_a_long_prompt_is_not_looked_at() -> None:
    far = [*range(100, 100 + LOOKED_AT)]
    assert Ngram().begin([1, 2, 3, *far], Sampling(), None).after((1, 2)) == []
    assert Ngram().begin([*far[2:], 1, 2, 3], Sampling(), None).after((1, 2))[0][0] == 3


def test_a_follower_hears_of_every_token_once() -> None:
    heard = list[int]()

    class Heard(Whole):
        def extend(self, tokens: Sequence[int]) -> None:
            heard.extend(tokens)
            super().extend(tokens)

    class Listening(Oracle):
        def begin(self, prompt: Sequence[int], sampling: Sampling, history: History | None) -> Follower:
            return Heard(self.follow, prompt, sampling, history)

    text, _ = written(TopUp(Listening(ToyEngine(), 1e-5, 3), 4))
    assert heard == text[: len(heard)]
    assert len(heard) > len(text) / 2
    top_up = TopUp(Listening(ToyEngine(), 1e-5))
    top_up.look(session(), 8)
    gc.collect()
    assert len(top_up._texts) == 0  # a session that is gone takes what was known of it along


def test_a_backup_without_cost_goes_on_from_the_text_too() -> None:
    one = session()
    one.receive(Draft(1, 0, 0, (0, 1), (7, 8), bytes((2, 2))))
    assert [s.path for s in TopUp(Ngram()).look(one, 8)] == [(7, 8), ()]
    assert [s.path for s in TopUp(Oracle(ToyEngine(), 0.001)).look(one, 8)] == [(7, 8)]


def test_more_sessions_in_a_step_make_its_drafting_dearer() -> None:
    top_up, one = TopUp(Oracle(ToyEngine(), 0.001)), session()
    alone, among = (len(top_up.draft(top_up.look(one, 8)[0], 0.03, (), n)) for n in (1, 16))
    assert among < alone


def test_its_own_acceptance_is_learned() -> None:
    record = Record()
    for _ in range(300):
        record.learn([False] * 4, [0.8] * 4)
    assert record.acceptance < 0.05
    assert record.trust < 0.1
    for _ in range(300):
        record.learn([True] * 4, [0.8] * 4)
    assert record.acceptance > 0.75
    assert record.trust == 1
    assert math.isfinite(record.acceptance)


def test_what_nobody_asked_teaches_nothing() -> None:
    record = Record()
    before = record.acceptance
    grown = Grown(record, (5, 6), (6, 7), (0.8, 0.8))
    grown.learn(2, [5, 6, 7], [])  # the target left the path before it
    assert record.acceptance == before
    grown.learn(2, [5, 6, 7], [5, 6])
    assert record.acceptance != before


class Broken(Oracle):
    def follow(self, tokens: Sequence[int], sampling: Sampling, history: History | None) -> tuple[int, float] | None:
        raise RuntimeError("no memory")


def test_a_backup_that_fails_ends_itself_and_not_the_session() -> None:
    assert written(TopUp(Broken(ToyEngine(), 0.001)))[0] == written()[0]


def test_what_would_not_be_verified_is_not_drafted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    said, look = list[float](), TopUp.look

    def looks(top_up: TopUp, one: CloudSession, width: int, least: float = 0.0) -> list[Stub]:
        said.append(least)
        return look(top_up, one, width, least)

    monkeypatch.setattr(TopUp, "look", looks)
    plain, _ = commits_of([])
    chain = [plain[0], *((t + 1) % ToyEngine().vocabulary.size for t in plain[1:4])]  # all but the first are wrong
    for width in (64, 1):
        said.clear()
        text, _ = commits_of([TopUp(Oracle(ToyEngine(), 1e-5, 2), 4)], width, recycles=False, sent=chain)
        assert text == plain
        assert said[0] == 0.0  # nothing was left out yet
        assert (max(said) > 0.1) == (width == 1)


def test_a_chain_whose_first_word_is_wrong_saves_steps_all_the_same() -> None:
    plain, commits = commits_of([])
    chain = [(plain[0] + 1) % ToyEngine().vocabulary.size, *plain[1:12]]
    text, recycled = commits_of([], sent=chain)
    text_without, without = commits_of([], recycles=False, sent=chain)
    assert text == text_without == plain
    assert len(recycled) < len(without) == len(commits)
    assert sum(commit.held > 0 for commit in recycled) == 1  # the chain itself; what was offered again is no hit
