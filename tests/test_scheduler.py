"""What goes into a step: everybody in turn, prompts in chunks, nodes where they pay; and an engine that fails."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from paceline.cloud.backup import Ngram, Record, TopUp
from paceline.cloud.engine import Work
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.scheduler import Scheduler, Seat
from paceline.protocol.cloud_session import CloudSession, Limits, Walk
from paceline.protocol.cost import Patience
from paceline.protocol.errors import Code, EngineError, ProtocolError
from paceline.protocol.messages import Commit, Draft, Open
from paceline.protocol.sampling import Sampling
from paceline.scripts.lab.virtual import run, run_engine
from rig import FLOOR, plain

T = TypeVar("T")
LIMITS = Limits(vocabulary=12, context=4096)


class Recorder(ToyEngine):
    """The toy target, remembering what each step was asked to do."""

    def __init__(self, **settings: int) -> None:
        super().__init__()
        self.steps: list[list[Work]] = []
        for name, value in settings.items():
            setattr(self, name, value)

    def verify(self, batch: Sequence[Work]) -> list[Walk | EngineError | None]:
        self.steps.append(list(batch))
        return super().verify(batch)


class Room:
    """A scheduler in virtual time with sessions in it."""

    def __init__(
        self,
        engine: ToyEngine,
        floor: float = FLOOR,
        width: int | None = None,
        clock: Callable[[], float] | None = None,
        top_ups: Sequence[TopUp] = (),
    ) -> None:
        self.engine = engine
        clock = clock or asyncio.get_running_loop().time
        self.scheduler = Scheduler(engine, run_engine, clock, width=width, floor=floor, top_ups=top_ups)
        self.stepping = asyncio.create_task(self.scheduler.run())
        self.commits: dict[int, list[Commit]] = {}
        self.errors: list[ProtocolError] = []

    def enter(self, sid: int, prompt: Sequence[int] = (1, 2), max_tokens: int = 40) -> Seat:
        opened = Open(sid=sid, prompt=tuple(prompt), sampling=Sampling(), max_tokens=max_tokens)
        log = self.commits.setdefault(sid, [])
        seat = Seat(CloudSession(opened, LIMITS, "token"), log.append, self.errors.append)
        self.scheduler.add(seat)
        return seat

    def text(self, sid: int) -> list[int]:
        return [t for c in self.commits[sid] for t in c.tokens]


def test_everybody_gets_a_token_in_every_step() -> None:
    async def main() -> None:
        room = Room(Recorder())
        for sid in range(5):
            room.enter(sid, (sid, 2))
        await asyncio.sleep(10 * FLOOR + 0.01)
        assert {len(room.text(sid)) for sid in range(5)} == {10}
        await asyncio.sleep(2)
        for sid in range(5):
            assert room.text(sid) == plain(ToyEngine(), (sid, 2), Sampling(), 40)
        assert not room.engine._sequences

    run(main())


def test_a_long_prompt_is_read_in_chunks_while_the_others_go_on() -> None:
    async def main() -> None:
        engine = Recorder(chunk=50)
        room = Room(engine)
        room.enter(1, max_tokens=400)
        await asyncio.sleep(5 * FLOOR)
        room.enter(2, [n % 12 for n in range(1030)], 5)
        before = len(engine.steps)
        await asyncio.sleep((1030 // 50 + 2) * FLOOR)
        assert room.commits[2]
        reading = engine.steps[before:]
        assert len(reading) >= 1030 // 50
        assert all(sum(len(w.tokens) for w in step if len(w.tokens) > 1) <= 50 for step in reading)
        assert all(any(w.choose for w in step) for step in reading)  # the other one had a token in each of them
        assert len(room.text(1)) >= before + 1030 // 50
        await asyncio.sleep(1)
        assert room.text(2) == plain(ToyEngine(), [n % 12 for n in range(1030)], Sampling(), 5)

    run(main())


def test_when_chunks_are_short_sessions_take_turns_at_reading() -> None:
    async def main() -> None:
        engine = Recorder(chunk=20)
        room = Room(engine)
        for sid in (1, 2, 3):
            room.enter(sid, [sid] * 200, 1)
        await asyncio.sleep(15 * FLOOR + 0.01)
        read = Counter(w.handle for step in engine.steps for w in step for _ in w.tokens)
        assert len(read) == 3
        assert max(read.values()) - min(read.values()) <= 40
        await asyncio.sleep(2)
        assert all(room.text(sid) == plain(ToyEngine(), [sid] * 200, Sampling(), 1) for sid in (1, 2, 3))

    run(main())


def drafted(seat: Seat, tokens: Sequence[int], weight: int) -> None:
    """A chain below the root, each node taken with log-probability -weight / 16."""
    base = len(seat.session.committed)
    n = len(tokens)
    seat.session.receive(
        Draft(
            sid=seat.session.sid,
            base_committed_len=base,
            first=seat.session.intake.next_number,
            parents=(0, *[1] * (n - 1)),
            tokens=tuple(tokens),
            weights=bytes([weight] * n),
        )
    )


def test_width_goes_to_the_likeliest_nodes_of_all_sessions() -> None:
    async def main() -> None:
        engine = Recorder()
        room = Room(engine, width=10)
        sure, unsure = room.enter(1, (1, 2)), room.enter(2, (3, 4))
        drafted(sure, plain(ToyEngine(), (1, 2), Sampling(), 8), 1)
        drafted(unsure, [5] * 8, 40)
        await asyncio.sleep(FLOOR / 2)
        nodes = {w.handle: len(w.plan.nodes) for w in engine.steps[0]}
        assert nodes == {sure.handle: 8, unsure.handle: 2}
        await asyncio.sleep(FLOOR)
        assert room.commits[1][0].accepted == 8
        assert len(room.text(1)) == 9

    run(main())


def test_where_rows_cost_only_nodes_that_pay_go_along() -> None:
    """A row more costs as much as a step: a node must be all but certain. With free rows, all go."""

    async def main(more: float) -> int:
        engine = Recorder()
        engine.step_cost = [(1, 0.01), (2, 0.01 + more), (4, 0.01 + 3 * more), (8, 0.01 + 7 * more)]
        room = Room(engine, floor=0.0)
        drafted(room.enter(1), [5] * 8, 12)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        return len(engine.steps[0][0].plan.nodes)

    assert run(main(0.01)) == 0
    assert run(main(0.0)) == 8


class Priced(Recorder):
    """Takes its time: a prompt's rows, of which no logits are read, take a tenth of the others'."""

    step_cost = ((1, 0.031), (2, 0.055), (4, 0.103), (8, 0.2))

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def verify(self, batch: Sequence[Work]) -> list[Walk | EngineError | None]:
        read = sum(1 + len(w.plan.nodes) for w in batch if w.choose)
        unread = sum(len(w.tokens) for w in batch) - sum(w.choose for w in batch)
        self.now += 0.007 + 0.024 * read + 0.0024 * unread
        return super().verify(batch)


def test_prompts_do_not_make_nodes_look_cheap() -> None:
    """A node would gain 0.69 of a step and take 0.77 of one. Prompts whose rows are cheap have been read in one step each."""

    async def main() -> int:
        engine = Priced()
        room = Room(engine, floor=0.0, clock=lambda: engine.now)
        for sid in range(12):
            room.enter(sid, [n % 12 for n in range(40 + 10 * sid)], 8)
            await asyncio.sleep(1)
            assert room.commits[sid][-1].finish
        drafted(room.enter(99), [5], 6)
        await asyncio.sleep(1)
        return room.commits[99][0].verified

    assert run(main()) == 0


def test_a_backup_that_does_not_pay_leaves_the_telling_beside_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "pays", lambda self, rate: False)

    async def main(*top_ups: TopUp) -> list[int]:
        told: list[int] = []

        class Watched(Recorder):
            def length(self, handle: int) -> int:  # asked as a step is planned
                told.append(len(room.commits[1]))
                return super().length(handle)

        room = Room(Watched(), top_ups=top_ups)
        room.enter(1)
        await asyncio.sleep(1)
        return told

    without = run(main())
    assert len(without) > 5
    assert run(main(TopUp(Ngram()))) == without


def test_a_step_is_paced_to_the_floor() -> None:
    async def main() -> None:
        room = Room(Recorder(), floor=0.2)
        room.enter(1)
        await asyncio.sleep(2.01)
        assert len(room.text(1)) == 10
        assert room.commits[1][0].step == pytest.approx(0.2)

    run(main())


class Fragile(Recorder):
    """Fails where told to: on a session, on a whole step, or at the door."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_handle = 0
        self.fail_step = False
        self.full = False

    def open(self, tokens: Sequence[int]) -> int:
        if self.full:
            raise EngineError("all sequences of this engine are in use")
        return super().open(tokens)

    def verify(self, batch: Sequence[Work]) -> list[Walk | EngineError | None]:
        if self.fail_step:
            self.fail_step = False
            raise MemoryError
        out = super().verify(batch)
        return [EngineError("damaged") if w.handle == self.fail_handle else o for w, o in zip(batch, out, strict=True)]


def test_an_engine_error_ends_only_its_session() -> None:
    async def main() -> None:
        engine = Fragile()
        room = Room(engine)
        bad, _ = room.enter(1), room.enter(2)
        await asyncio.sleep(3 * FLOOR + 0.01)
        assert bad.handle is not None
        engine.fail_handle = bad.handle
        await asyncio.sleep(5)
        assert [(e.code, e.sid) for e in room.errors] == [(Code.ENGINE, 1)]
        assert room.text(2) == plain(ToyEngine(), (1, 2), Sampling(), 40)
        assert not engine._sequences
        assert not room.stepping.done()

    run(main())


def test_an_engine_that_raises_ends_the_sessions_of_that_step_and_serves_on() -> None:
    async def main() -> None:
        engine = Fragile()
        room = Room(engine)
        room.enter(1)
        await asyncio.sleep(2 * FLOOR)
        engine.fail_step = True
        await asyncio.sleep(2 * FLOOR)
        assert [(e.code, e.retryable) for e in room.errors] == [(Code.ENGINE, True)]
        room.enter(2)
        await asyncio.sleep(5)
        assert room.text(2) == plain(ToyEngine(), (1, 2), Sampling(), 40)

    run(main())


def test_a_full_engine_says_when_to_come_back() -> None:
    async def main() -> None:
        engine = Fragile()
        engine.full = True
        room = Room(engine)
        room.enter(1)
        await asyncio.sleep(0.1)
        (error,) = room.errors
        assert (error.code, error.retryable, error.retry_after) == (Code.OVERLOADED, True, 1.0)
        assert len(room.scheduler) == 0

    run(main())


def test_who_leaves_during_a_step_gets_nothing_more_and_frees_its_sequence() -> None:
    async def main() -> None:
        room = Room(Recorder())
        seat = room.enter(1)
        await asyncio.sleep(2.5 * FLOOR)
        had = len(room.text(1))
        room.scheduler.remove(seat)
        await asyncio.sleep(1)
        assert len(room.text(1)) == had
        assert not room.engine._sequences
        assert room.scheduler.idle.is_set()

    run(main())


def test_a_commit_is_told_while_the_next_step_runs_and_the_last_one_at_once() -> None:
    async def main() -> None:
        engine, order = Recorder(), list[str]()
        loop = asyncio.get_running_loop()

        def start(work: Callable[[], T]) -> asyncio.Future[T]:
            """As the engine's thread: the work is under way before anybody awaits it."""
            order.append("step")
            return asyncio.ensure_future(run_engine(work))

        scheduler = Scheduler(engine, start, loop.time, floor=FLOOR)
        opened = Open(sid=1, prompt=(1, 2), sampling=Sampling(), max_tokens=3)
        seat = Seat(CloudSession(opened, LIMITS, "token"), lambda c: order.append(c.finish or "commit"), pytest.fail)
        scheduler.add(seat)
        stepping = asyncio.create_task(scheduler.run())
        await asyncio.sleep(3.5 * FLOOR)
        assert order == ["step", "step", "commit", "step", "commit", "length"]
        assert scheduler.idle.is_set()
        await asyncio.sleep(0)
        assert not engine._sequences
        stepping.cancel()

    run(main())


def test_figures_add_up() -> None:
    async def main() -> None:
        room = Room(Recorder())
        room.enter(1), room.enter(2)
        await asyncio.sleep(5)
        f = room.scheduler.figures
        assert (f.tokens, f.steps, f.session_steps) == (80, 40, 80)
        assert f.step_seconds == pytest.approx(40 * FLOOR)

    run(main())


def test_a_sleeper_that_is_woken_a_hair_early_does_not_spin() -> None:
    """Patience that ends within the resolution of the clock has ended, or virtual time would stand still."""

    async def main() -> int:
        room = Room(Recorder())
        seat = room.enter(1)
        seat.session.patience = Patience(longest=0.2, response=0.1)
        assert seat.session.waiting
        await asyncio.sleep(0.05)
        assert not room.text(1)
        seat.missed = asyncio.get_running_loop().time() + 5e-10 - 0.1
        room.scheduler.wake()
        await asyncio.sleep(FLOOR + 0.01)
        return len(room.text(1))

    assert run(main()) >= 1
