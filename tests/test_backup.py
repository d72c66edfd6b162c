"""What the verifier drafts by itself: where it goes on, how far, and that it never changes the text."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from paceline.cloud.backup import LONGEST, Ngram, TopUp
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.scheduler import Scheduler, Seat
from paceline.protocol.cloud_session import CloudSession, Limits
from paceline.protocol.messages import Commit, Draft, Open
from paceline.protocol.sampling import History, Sampling, choose

T = TypeVar("T")


class Oracle:
    """Follows with the toy target's own choice, or another token every `wrong`-th time."""

    def __init__(self, engine: ToyEngine, seconds: float, wrong: int = 0) -> None:
        self.seconds, self._engine, self._wrong, self.asked = seconds, engine, wrong, 0

    def follow(self, tokens: Sequence[int], sampling: Sampling, history: History | None) -> tuple[int, float] | None:
        self.asked += 1
        token = choose(self._engine.logits(tokens), sampling, len(tokens))
        off = bool(self._wrong) and self.asked % self._wrong == 0
        return (token + off) % self._engine.vocabulary.size, 0.8


def session(max_tokens: int = 40) -> CloudSession:
    return CloudSession(
        Open(sid=1, prompt=(1, 2, 3), sampling=Sampling(), max_tokens=max_tokens), Limits(12, 4096), "t"
    )


def written(top_up: TopUp | None, tokens: int = 40) -> tuple[list[int], int]:
    """The text of a session without an edge, and how many steps it took."""
    commits: list[Commit] = []

    async def run_at_once(work: Callable[[], T]) -> T:
        return work()

    async def run() -> list[int]:
        loop = asyncio.get_running_loop()
        scheduler = Scheduler(ToyEngine(), run_at_once, loop.time, floor=0.001, top_up=top_up)
        one, finished = session(tokens), asyncio.Event()

        def on_commit(commit: Commit) -> None:
            commits.append(commit)
            if commit.finish:
                finished.set()

        scheduler.add(Seat(one, on_commit, lambda e: pytest.fail(str(e))))
        task = asyncio.create_task(scheduler.run())
        await finished.wait()
        task.cancel()
        return one.committed

    return asyncio.run(run()), len(commits)


@pytest.mark.parametrize("wrong", [0, 2, 3])
def test_the_text_is_the_targets_own_in_fewer_steps(wrong: int) -> None:
    plain, steps = written(None)
    text, fewer = written(TopUp(Oracle(ToyEngine(), 1e-5, wrong), 4))
    assert text == plain
    assert fewer < steps
    assert written(TopUp(Ngram()))[0] == plain


def test_it_goes_on_from_the_likeliest_chain_the_edge_has_sent() -> None:
    one = session()
    one.receive(Draft(1, 0, 0, (0, 1, 0), (7, 8, 9), bytes((2, 2, 40))))
    top_up = TopUp(Oracle(ToyEngine(), 0.001), 2)
    stub = top_up.look(one, 8)
    assert stub.tokens == (1, 2, 3, 7, 8)
    drafted = top_up.draft(stub, 0.03, ())
    one.receive(Draft(1, 0, 3, (2,), (drafted[0][0],)))  # meanwhile the edge sends the same
    added = top_up.put(one, stub, drafted)
    assert len(added) == 1
    assert one.tree.token(one.tree.parent(added[0])) == drafted[0][0]


def test_it_stops_where_another_token_does_not_pay() -> None:
    one = session()
    cheap, dear = TopUp(Oracle(ToyEngine(), 0.0001)), TopUp(Oracle(ToyEngine(), 0.02))
    far, near = (len(t.draft(t.look(one, 8), 0.03, ())) for t in (cheap, dear))
    assert near < far <= LONGEST
    assert TopUp(Oracle(ToyEngine(), 1.0)).draft(dear.look(one, 8), 0.03, ()) == []


def test_it_leaves_room_for_the_targets_last_token() -> None:
    top_up = TopUp(Oracle(ToyEngine(), 0.0001), 8)
    assert len(top_up.draft(top_up.look(session(3), 8), 0.03, ())) == 2


def test_ngrams_follow_the_longest_agreement() -> None:
    found = Ngram().follow([5, 1, 2, 3, 9, 4, 1, 2, 7, 1, 2, 3], Sampling(), None)
    assert found is not None
    assert found[0] == 9
    assert 0 < found[1] < 1
    assert Ngram().follow([1, 2, 3], Sampling(), None) is None


def test_its_own_acceptance_is_learned() -> None:
    top_up = TopUp(Oracle(ToyEngine(), 0.001))
    for _ in range(300):
        top_up.learn(0, 4)
    assert top_up.acceptance < 0.05
    for _ in range(300):
        top_up.learn(4, 4)
    assert top_up.acceptance > 0.75
    assert math.isfinite(top_up.acceptance)
