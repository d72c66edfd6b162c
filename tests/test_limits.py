"""What a verifier grants: places, queues, tokens a minute, frames a second, and what happens to who asks for more."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from paceline.cloud.connection import FRAMES_A_TURN, Connection, House
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.limits import Admission, Allowance, Bounds, Bucket
from paceline.cloud.scheduler import ACK_WINDOW, Scheduler
from paceline.protocol.channel import ChannelClosed
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.errors import Code
from paceline.protocol.messages import Ack, Commit, Error, Hello, Message, Open, Opened, Ping, Pong, Welcome
from paceline.protocol.sampling import Sampling
from paceline.scripts.lab.virtual import MemoryChannel, run, run_engine

FLOOR = 0.03


class Edge:
    """One end of a connection to `place`, with a key of its own where it is named."""

    def __init__(self, place: "Place", key: str = "", allowance: Allowance | None = None) -> None:
        self.channel, far = MemoryChannel.pair()
        house, own = place.house, place.house.vocabulary
        self.serving = asyncio.ensure_future(Connection(far, house, house.owner(key, allowance)).serve())
        self.seen: list[Message] = []
        self._reading = asyncio.ensure_future(self._read())
        self.send(Hello((1,), own.name, own.size, own.fingerprint))

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.channel.other._in.put_nowait(encode(message))

    def open(self, sid: int, tokens: int = 50, prompt: tuple[int, ...] = (1, 2, 3)) -> None:
        self.send(Open(sid, prompt, Sampling(), tokens))

    def of(self, kind: type[Message], sid: int | None = None) -> list[Any]:
        return [m for m in self.seen if isinstance(m, kind) and (sid is None or getattr(m, "sid", None) == sid)]

    def tokens(self, sid: int) -> int:
        return sum(len(m.tokens) for m in self.of(Commit, sid))

    async def _read(self) -> None:
        try:
            while True:
                self.seen.append(decode_from_cloud(await self.channel.receive()))
        except ChannelClosed:
            pass


class Place:
    def __init__(self, bounds: Bounds, **more: Any) -> None:
        clock = asyncio.get_running_loop().time
        self.engine = ToyEngine()
        scheduler = Scheduler(self.engine, run_engine, clock, floor=FLOOR)
        own = self.engine
        self.house = House(scheduler, own.name, own.vocabulary, own.context, clock=clock, bounds=bounds, **more)
        self.stepping = asyncio.ensure_future(scheduler.run())


def at(bounds: Bounds, talk: Callable[[Place], Coroutine[Any, Any, None]], **more: Any) -> None:
    async def main() -> None:
        place = Place(bounds, **more)
        await talk(place)
        place.stepping.cancel()

    run(main())


# ---- places and the queue


def test_who_finds_no_place_waits_and_who_finds_no_queue_is_told_when_to_come() -> None:
    async def talk(place: Place) -> None:
        edge = Edge(place)
        for sid in range(1, 5):
            edge.open(sid, 20)
        await asyncio.sleep(5 * FLOOR)
        assert [len(edge.of(Opened, sid)) for sid in range(1, 5)] == [1, 1, 1, 0]
        assert edge.tokens(2) <= edge.tokens(1) <= edge.tokens(2) + 1, "the first may begin a step earlier"
        assert edge.tokens(2) > 0 == edge.tokens(3)
        [error] = edge.of(Error)
        assert (error.sid, error.code, error.retryable) == (4, Code.OVERLOADED, True)
        assert 0.5 <= error.retry_after <= 60
        assert len(place.engine._sequences) == 2  # the queue costs the engine nothing
        await asyncio.sleep(40 * FLOOR)
        assert edge.tokens(3) == 20

    at(Bounds(slots=2, queue=1), talk)


def test_of_those_who_wait_the_owner_with_the_fewest_running_is_next() -> None:
    async def talk(place: Place) -> None:
        greedy, modest = Edge(place, "greedy"), Edge(place, "modest")
        for sid in range(1, 7):
            greedy.open(sid, 20)
        await asyncio.sleep(2 * FLOOR)
        modest.open(1, 20)
        await asyncio.sleep(22 * FLOOR)  # two places are free again
        assert modest.tokens(1) > 0
        assert greedy.tokens(4) == 0

    at(Bounds(slots=2, queue=10), talk)


def test_one_that_waits_may_go_and_leaves_nothing() -> None:
    async def talk(place: Place) -> None:
        edge, other = Edge(place), Edge(place)
        edge.open(1, 20)
        await asyncio.sleep(FLOOR)
        other.open(1, 20)
        await asyncio.sleep(FLOOR)
        assert len(place.house.admission.waiting) == 1
        await other.channel.close()
        await asyncio.sleep(FLOOR)
        assert not place.house.admission.waiting
        await asyncio.sleep(30 * FLOOR)
        assert edge.tokens(1) == 20
        assert not place.engine._sequences

    at(Bounds(slots=1), talk)


def test_the_queue_goes_elsewhere_when_a_verifier_drains() -> None:
    async def talk(place: Place) -> None:
        edge = Edge(place)
        edge.open(1, 20)
        edge.open(2, 20)
        await asyncio.sleep(FLOOR)
        place.house.drain(5.0)
        await asyncio.sleep(30 * FLOOR)
        assert edge.tokens(1) == 20
        assert edge.tokens(2) == 0
        [error] = edge.of(Error)
        assert (error.sid, error.code) == (2, Code.OVERLOADED)

    at(Bounds(slots=1), talk)


def test_refused_load_leaves_nothing() -> None:
    """10,000 opens beyond the queue: not a session, a waiting one or an owner more."""

    async def talk(place: Place) -> None:
        edge = Edge(place)
        edge.open(1, 4000)
        await asyncio.sleep(FLOOR)
        for sid in range(2, 10_002):
            edge.open(sid)
            if sid % 100 == 0:
                await asyncio.sleep(FLOOR)
        await asyncio.sleep(10)
        assert len(edge.of(Error)) == 10_000
        house = place.house
        assert (len(house.admission.waiting), len(house.waiting), len(house.seated), len(house.owners)) == (0, 0, 1, 0)

    at(Bounds(slots=1, queue=0), talk)


# ---- what a key may do


def test_a_key_has_so_many_sessions_over_all_its_connections() -> None:
    async def talk(place: Place) -> None:
        one, two = (Edge(place, "laptop", Allowance(sessions=2)) for _ in range(2))
        one.open(1, 20)
        two.open(1, 20)
        await asyncio.sleep(2 * FLOOR)
        two.open(2, 20)
        Edge(place, "pi").open(1)
        await asyncio.sleep(2 * FLOOR)
        [error] = two.of(Error)
        assert (error.sid, error.code, error.retry_after) == (2, Code.SESSION_LIMIT, 1.0)
        await asyncio.sleep(25 * FLOOR)
        two.open(3, 20)
        await asyncio.sleep(25 * FLOOR)
        assert two.tokens(3) == 20

    at(Bounds(), talk)


def test_tokens_a_minute_slow_what_runs_and_refuse_what_is_new() -> None:
    async def talk(place: Place) -> None:
        edge, free = Edge(place, "laptop", Allowance(tokens_a_minute=60)), Edge(place, "pi")
        edge.open(1, 100)
        free.open(1, 100)
        await asyncio.sleep(10)
        assert free.tokens(1) == 100
        assert 60 <= edge.tokens(1) <= 60 + 10 + 1  # what was saved up, and one a second
        edge.open(2, 5)
        await asyncio.sleep(0.1)
        [error] = edge.of(Error)
        assert (error.sid, error.code, error.retryable) == (2, Code.RATE_LIMIT, True)
        assert error.retry_after is not None
        await asyncio.sleep(60)
        assert edge.tokens(1) == 100

    at(Bounds(), talk)


def test_a_key_may_have_less_context_than_the_model() -> None:
    async def talk(place: Place) -> None:
        edge = Edge(place, "laptop", Allowance(context=10))
        edge.open(1, 50)
        edge.open(2, 50, prompt=tuple([1] * 10))
        await asyncio.sleep(1)
        [welcome] = edge.of(Welcome)
        assert welcome.context == 10
        assert edge.tokens(1) == 7
        [error] = edge.of(Error)
        assert (error.sid, error.code) == (2, Code.CONTEXT)

    at(Bounds(), talk)


def test_a_changed_allowance_holds_from_then_on_and_what_runs_still_counts() -> None:
    async def talk(place: Place) -> None:
        one = Edge(place, "laptop", Allowance(sessions=5))
        one.open(1)
        await asyncio.sleep(FLOOR)
        two = Edge(place, "laptop", Allowance(sessions=1))
        two.open(1)
        await asyncio.sleep(FLOOR)
        assert [e.code for e in two.of(Error)] == [Code.SESSION_LIMIT]

    at(Bounds(), talk)


# ---- frames and silence


def test_frames_are_read_no_faster_than_agreed_and_none_is_lost() -> None:
    async def talk(place: Place) -> None:
        edge = Edge(place)
        for i in range(500):
            edge.send(Ping(float(i)))
        await asyncio.sleep(1.0)
        assert 140 <= len(edge.of(Pong)) <= 151  # 50 saved up, 100 a second
        await asyncio.sleep(4.0)
        assert [p.time for p in edge.of(Pong)] == [float(i) for i in range(500)]

    at(Bounds(messages_a_second=100), talk)


def test_an_edge_that_sends_much_at_once_takes_turns_with_the_others() -> None:
    async def talk(place: Place) -> None:
        loud, quiet = Edge(place), Edge(place)
        await asyncio.sleep(FLOOR)
        loud.send(*(Ping(0.0) for _ in range(1000)))
        quiet.send(Ping(0.0))
        while not quiet.of(Pong):  # noqa: ASYNC110 - turn by turn
            await asyncio.sleep(0)
        assert loud.channel.other._in.qsize() > 1000 - 10 * FRAMES_A_TURN, "the rest has not been read yet"

    at(Bounds(), talk)


def test_a_connection_without_frames_ends() -> None:
    async def talk(place: Place) -> None:
        edge = Edge(place)
        await asyncio.sleep(9)
        assert place.house.connections == 1
        edge.send(Ping(0.0))
        await asyncio.sleep(9)
        assert place.house.connections == 1
        await asyncio.sleep(2)
        assert place.house.connections == 0

    at(Bounds(idle_seconds=10), talk)


def test_a_session_whose_edge_acknowledges_nothing_gives_its_place_to_others() -> None:
    async def talk(place: Place) -> None:
        edge = Edge(place)
        edge.open(1, 2000)
        edge.open(2, 2000)
        for i in range(60):
            edge.send(Ping(float(i)), Ack(2, edge.tokens(2)))
            await asyncio.sleep(1)
        [error] = edge.of(Error)
        assert (error.sid, error.code, error.retryable) == (1, Code.IDLE, True)
        assert edge.tokens(1) == ACK_WINDOW
        assert edge.tokens(2) > 1000
        assert len(place.house.waiting) == 1  # it may still be resumed

    at(Bounds(idle_seconds=10), talk)


# ---- resumed, and by whom


def test_a_session_is_taken_over_from_a_link_that_only_looks_alive() -> None:
    async def talk(place: Place) -> None:
        old, new, stranger = Edge(place, "laptop"), Edge(place, "laptop"), Edge(place, "pi")
        old.open(1, 200)
        await asyncio.sleep(10 * FLOOR)
        [opened] = old.of(Opened)
        stranger.send(Open(1, (1, 2, 3), Sampling(), 200, resume=opened.resume))
        await asyncio.sleep(2 * FLOOR)
        assert len(place.house.scheduler) == 2  # a stranger's is another one
        assert stranger.of(Opened)[0].committed_len == 0
        new.send(Open(1, (1, 2, 3), Sampling(), 200, held=(), resume=opened.resume))
        await asyncio.sleep(2 * FLOOR)
        assert new.of(Opened)[0].committed_len >= 10
        assert len(place.house.scheduler) == 2
        before = old.tokens(1)
        await asyncio.sleep(10 * FLOOR)
        assert old.tokens(1) == before
        assert new.tokens(1) > 20

    at(Bounds(), talk)


# ---- the parts


def test_a_bucket_fills_up_and_no_further() -> None:
    now = 0.0
    bucket = Bucket(rate=2.0, burst=10.0, clock=lambda: now)
    bucket.take(10)
    assert bucket.wait() == 0
    bucket.take(5)
    assert bucket.wait() == 2.5
    now = 2.5
    assert bucket.wait() == 0
    now = 1000.0
    bucket.take(12)
    assert bucket.wait() == 1.0
    now = 900.0  # a clock that went back
    assert bucket.wait() == 1.0


@pytest.mark.parametrize(("slots", "queue"), [(1, 0), (4, 100)])
def test_the_time_to_come_back_is_bounded(slots: int, queue: int) -> None:
    async def main() -> None:
        scheduler = Scheduler(ToyEngine(), run_engine, lambda: 0.0)
        admission = Admission(scheduler, Bounds(slots=slots, queue=queue), lambda: 0.0)
        assert 0.5 <= admission.retry_after() <= 60

    run(main())
