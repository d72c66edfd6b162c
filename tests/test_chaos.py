"""A short campaign of every fault there is, and what campaigns found, each by itself. In virtual time."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from paceline.cloud.engines.toy import ToyEngine
from paceline.edge.agent import Agent
from paceline.edge.policies import policy
from paceline.edge.predictor import Predictor
from paceline.protocol.channel import Channel, ChannelClosed
from paceline.protocol.codec import decode_from_cloud, decode_from_edge, encode
from paceline.protocol.errors import Code, LinkError, PacelineError
from paceline.protocol.messages import Commit, Draft, Error, Hello, Open, Opened
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling
from paceline.scripts.chaos.answers import Question, Tally
from paceline.scripts.chaos.disks import filling
from paceline.scripts.chaos.guess import GuessingDraft
from paceline.scripts.chaos.kills import running
from paceline.scripts.chaos.pipe import NO_FAULTS, ByteFaults, HostileProxy
from paceline.scripts.chaos.rubble import breaking
from paceline.scripts.chaos.soak import Soak, sample, soak
from paceline.scripts.chaos.town import Plan, Verifier, campaign
from paceline.scripts.chaos.trend import trend
from paceline.scripts.chaos.wire import Rates
from paceline.scripts.lab.virtual import draft_runner, run


def test_a_short_campaign_alters_and_loses_nothing() -> None:
    town = campaign(Plan(answers=60, seed=1, rates=Rates(half_open=0.002, silence=0.002)))
    assert town.tally.answers == 60
    assert town.tally.whole, town.tally.reasons
    done = town.faults.done
    assert {fault for fault in done if done[fault]} >= {
        *("cut", "delay", "duplicate", "truncate", "swap", "silence", "half_open"),
        *("kill of a verifier", "drain of a verifier", "restart of an edge"),
        *("jump of an edge's clock", "jump of a verifier's clock"),
    }
    assert len(town.faults.cuts) > 8  # places of the protocol


def test_a_campaign_can_be_run_again() -> None:
    first, second = (campaign(Plan(answers=10, seed=5)) for _ in range(2))
    assert first.tally == second.tally
    assert first.faults.done == second.faults.done


def test_the_tally_notices() -> None:
    tally = Tally()
    tally.count([1, 2], [1, 2])
    assert tally.whole
    tally.count([1, 3], [1, 2])
    tally.count([1], [1, 2])
    tally.count([1], [1, 2], stopped=True)
    tally.lose("silence")
    assert (tally.answers, tally.altered, tally.lost) == (5, 2, 1)


# ---- real processes and bytes


def test_broken_bytes_alter_and_lose_nothing() -> None:
    """Kinds of break that nobody has to wait out, each many times as often as a network has it."""
    rates = replace(NO_FAULTS, reset=0.005, end=0.005, truncate=0.005, flip=0.005, duplicate=0.005, swap=0.005)
    faults, tally = breaking(20, seed=2, rates=rates, edges=6, longest=60)
    assert tally.answers >= 6
    assert tally.whole, tally.reasons
    assert sum(faults.values()) >= 20
    assert len([fault for fault in faults if faults[fault]]) > 3


def test_full_disks_and_killed_edges_alter_and_lose_nothing() -> None:
    faults, tally = filling(2, seed=4)
    assert tally.answers == 2
    assert tally.whole, tally.reasons
    assert faults["full disk"] >= 2


async def test_a_proxy_without_faults_carries_every_byte() -> None:
    """So that what the others see is what was done on purpose."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    faults = ByteFaults(Random(0), NO_FAULTS)
    async with HostileProxy(server.sockets[0].getsockname()[1], faults) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        sent = bytes(range(256)) * 400
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent
        writer.close()
    server.close()
    assert not sum(faults.done.values())


# ---- the soak


def test_a_level_series_is_flat_and_a_leak_is_not() -> None:
    rng, times = Random(1), [5.0 * i for i in range(720)]
    level = trend(times, [100 + rng.gauss(0, 2) for _ in times])
    assert level.flat()
    assert level.mean == pytest.approx(100, abs=1)
    leak = trend(times, [100 + rng.gauss(0, 2) + 3 * t / 3600 for t in times])
    assert not leak.flat()
    assert leak.change == pytest.approx(3, abs=0.5)
    assert not trend(times, [0.4 - 0.05 * t / 3600 + rng.gauss(0, 0.02) for t in times]).flat(0.02)
    with pytest.raises(ValueError, match="six"):
        trend(times[:5], times[:5])


def test_a_short_soak_answers_everything_and_reports() -> None:
    """Nothing is asserted of memory: so short a time is all warming up."""
    told: list[str] = []
    made = asyncio.run(soak(8.0, seed=1, edges=3, longest=60, tell=told.append))
    assert made.tally.answers > 0
    assert made.tally.whole, made.tally.reasons
    said = "\n".join(made.lines())
    assert "MiB an hour, noise" in said
    assert "0 altered, 0 lost" in said
    assert len(told) == len(made.samples) > 6
    assert all(s.verifier.own > 2**20 and s.edge.own > 2**20 for s in made.samples)


def test_a_process_that_dies_in_the_soak_is_said() -> None:
    async def main() -> None:
        edge = await asyncio.create_subprocess_exec("true")
        await edge.wait()
        with pytest.raises(PacelineError, match="is gone after"):
            async with running(1) as [verifier]:
                await sample(Soak(), 10.0, verifier, edge, None, print)

    asyncio.run(main())


# ---- what campaigns found


class Meddler:
    """A channel between an edge and a verifier on which a test changes what passes."""

    def __init__(self, inner: Channel) -> None:
        self.inner = inner
        self.down: list[bytes] = []  # to be received next

    async def send(self, frame: bytes) -> None:
        await self.inner.send(frame)

    async def receive(self) -> bytes | str:
        return self.down.pop(0) if self.down else await self.inner.receive()

    async def close(self, reason: str = "") -> None:
        await self.inner.close(reason)


class SendsTwice(Meddler):
    async def send(self, frame: bytes) -> None:
        await self.inner.send(frame)
        if isinstance(decode_from_edge(frame), Open):
            await self.inner.send(frame)


class CutsOpenShort(Meddler):
    done = False

    async def send(self, frame: bytes) -> None:
        if isinstance(decode_from_edge(frame), Open) and not CutsOpenShort.done:
            CutsOpenShort.done = True
            frame = frame[:-3]
        await self.inner.send(frame)


class SaysFull(Meddler):
    """Every draft is answered by tree_limit."""

    async def send(self, frame: bytes) -> None:
        await self.inner.send(frame)
        if isinstance(message := decode_from_edge(frame), Draft):
            self.down.append(encode(Error(Code.TREE_LIMIT, "full", message.sid)))


class LosesEveryThird(Meddler):
    """A commit in three is lost without a cut, so that the next one leaves a gap."""

    seen = 0

    async def receive(self) -> bytes | str:
        frame = await self.inner.receive()
        while isinstance(message := decode_from_cloud(frame), Commit) and not message.finish:
            LosesEveryThird.seen += 1
            if LosesEveryThird.seen % 3:
                break
            frame = await self.inner.receive()
        return frame


QUESTION = Question((1, 2, 3), Sampling(seed=5, temperature=1.0), 40)


async def asked(kind: type[Meddler], question: Question = QUESTION) -> tuple[list[int], list[int]]:
    """What comes through such a channel, and what is right."""
    target = ToyEngine()
    verifier = Verifier(target)
    edge = agent(verifier, kind, target)
    got: list[int] = []
    async with asyncio.timeout(300), edge:
        async for event in edge.generate(question):
            got.extend(event.tokens)
    await verifier.kill()
    return got, question.answer(target)


def agent(verifier: Verifier, kind: type[Meddler], target: ToyEngine) -> Agent:
    async def connect() -> Channel:
        return kind(verifier.connect())

    return Agent(
        connect,
        target.vocabulary,
        policy("stream"),
        GuessingDraft(target),
        Predictor(),
        draft_runner(0.02, 0.002),
        clock=asyncio.get_running_loop().time,
        random=Random(0),
    )


@pytest.mark.parametrize("kind", [Meddler, SendsTwice, CutsOpenShort, SaysFull, LosesEveryThird])
def test_an_answer_survives(kind: type[Meddler]) -> None:
    got, right = run(asked(kind))
    assert got == right


def test_an_answer_that_runs_ends_when_the_agent_is_closed() -> None:
    async def main() -> None:
        target = ToyEngine()
        verifier = Verifier(target)
        edge = agent(verifier, Meddler, target)
        async with edge:
            events = edge.generate(GenerationRequest((1, 2), Sampling(), 2000))
            await anext(events)
        with pytest.raises(LinkError, match="closed"):
            async for _ in events:
                pass
        await verifier.kill()

    run(main())


def test_an_agent_ends_even_when_it_is_told_to_in_the_middle_of_a_greeting() -> None:
    """Cancellation that arrives together with the answer was swallowed, and the link lived on."""

    class Greeting(Meddler):
        async def receive(self) -> bytes | str:
            frame = await self.inner.receive()
            if not cancelled:  # the frame is here, and so is the end
                cancelled.append(link.cancel())
            return frame

    cancelled: list[bool] = []

    async def main() -> None:
        nonlocal link
        verifier = Verifier(ToyEngine())
        edge = agent(verifier, Greeting, verifier.target)
        link = asyncio.create_task(edge.link.run())
        done, _ = await asyncio.wait([link], timeout=60)
        assert done
        await verifier.kill()

    link: asyncio.Task[None]
    run(main())


def test_a_generation_goes_on_from_what_another_process_held() -> None:
    async def main(held: Sequence[int]) -> list[int]:
        verifier = Verifier(ToyEngine())
        edge = agent(verifier, Meddler, verifier.target)
        got: list[int] = []
        async with edge:
            async for event in edge.generate(QUESTION, held=held):
                got.extend(event.tokens)
        await verifier.kill()
        return got

    right = QUESTION.answer(ToyEngine())
    for count in (0, 1, 17, len(right)):
        assert run(main(right[:count])) == right[count:]


# ---- who is gone is gone


def test_nothing_of_a_gone_edge_is_kept_in_the_engine() -> None:
    """100 edges vanish in the middle of an answer: within a second none has a sequence or a place in the steps."""

    async def main() -> None:
        verifier = Verifier(ToyEngine())
        for _ in range(100):
            channel = verifier.connect()
            own = verifier.target.vocabulary
            await channel.send(encode(Hello((1,), own.name, own.size, own.fingerprint)))
            await channel.send(encode(Open(1, (1, 2, 3), Sampling(), 4000)))
            seen: list[object] = []
            while sum(isinstance(m, Commit) for m in seen) < 3:
                seen.append(decode_from_cloud(await channel.receive()))
            assert any(isinstance(m, Opened) for m in seen)
            assert (len(verifier.scheduler), len(verifier.target._sequences)) == (1, 1)
            await channel.close()
            begin = asyncio.get_running_loop().time()
            while len(verifier.scheduler) or verifier.target._sequences:
                await asyncio.sleep(0.001)
                assert asyncio.get_running_loop().time() - begin < 1.0
            with pytest.raises(ChannelClosed):
                await channel.send(b"")
        await verifier.kill()

    run(main())
