"""The agent with everything around it, in virtual time: what goes wrong on the way never shows in the text."""

import asyncio
from collections.abc import Sequence
from random import Random

import pytest
from paceline.cloud.engine import Work
from paceline.cloud.engines.toy import ToyEngine
from paceline.edge.generation import Generation
from paceline.protocol.channel import Channel
from paceline.protocol.cloud_session import Walk
from paceline.protocol.codec import encode
from paceline.protocol.errors import Code, EngineError, LinkError, ProtocolError
from paceline.protocol.messages import Goaway
from paceline.protocol.ngrams import Ngrams
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling
from paceline.quant.ngrams import counted
from paceline.scripts.lab.virtual import run
from rig import FLOOR, Verifier, agent_of, answer, plain
from toy_draft import ToyDraft

SEEDED = Sampling(seed=5, temperature=0.8)
EVERYTHING = Sampling(
    seed=11, temperature=1.1, top_k=9, top_p=0.95, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3,
    frequency_penalty=0.2, logit_bias=((3, 1.5),),
)  # fmt: skip
PROMPT = (1, 2, 3, 4)


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED, EVERYTHING], ids=["greedy", "seeded", "everything"])
@pytest.mark.parametrize(("noise", "rtt"), [(0.0, 0.05), (1.0, 0.0), (1.0, 0.3), (30.0, 0.05)])
def test_the_text_is_the_targets_own(sampling: Sampling, noise: float, rtt: float) -> None:
    async def main() -> tuple[list[int], Generation]:
        verifier = Verifier()
        made: list[Generation] = []
        async with agent_of(verifier, ToyDraft(ToyEngine(), noise), rtt=rtt) as agent:
            tokens = await answer(agent, PROMPT, sampling, 80, report=made.append)
        return tokens, made[0]

    tokens, generation = run(main())
    assert tokens == plain(ToyEngine(), PROMPT, sampling, 80)
    assert generation.session.finish == "length"
    f = generation.figures
    if noise < 2 and noise * rtt < 0.1:  # across 300 ms a draft that errs now and then is not much use
        assert f.accepted > 5
        assert f.steps < 80
    assert f.steps + f.accepted == 80  # a token for each step, and one for each node accepted


def test_a_perfect_draft_hides_the_round_trip() -> None:
    """Virtual time: figures are exact. Plainly, a token costs a step; here a step eats several."""

    async def main(drafted: bool) -> float:
        verifier, loop = Verifier(), asyncio.get_running_loop()
        async with agent_of(verifier, ToyDraft(ToyEngine()) if drafted else None, rtt=0.1) as agent:
            await answer(agent, PROMPT, Sampling(), 1)
            begin = loop.time()
            await answer(agent, PROMPT, Sampling(), 100)
            return loop.time() - begin

    assert run(main(False)) == pytest.approx(100 * FLOOR + 0.1, abs=FLOOR)
    assert run(main(True)) < 0.6 * 100 * FLOOR


@pytest.mark.parametrize("rtt", [0.0, 0.05])
def test_a_text_that_repeats_itself_is_sent_ahead_where_no_row_is_worth_its_time(rtt: float) -> None:
    """A draft ten times slower than its verifier has next to nothing to say in time; the text's own repeats cost no row."""

    async def main(name: str) -> tuple[list[int], Generation]:
        draft, made = ToyDraft(ToyEngine()), list[Generation]()
        draft.step_cost = [(1, 10 * FLOOR), (2, 11 * FLOOR)]
        async with agent_of(Verifier(), draft, rtt=rtt, name=name, row=10 * FLOOR) as agent:
            tokens = await answer(agent, PROMPT, Sampling(), 200, report=made.append)
        return tokens, made[0]

    with_repeats, without = run(main("stream")), run(main("stream:repeats=0"))
    assert with_repeats[0] == without[0] == plain(ToyEngine(), PROMPT, Sampling(), 200)
    assert without[1].figures.accepted < 10
    assert with_repeats[1].figures.accepted > 100
    assert with_repeats[1].figures.rows < 10


def test_what_the_target_is_known_to_write_is_sent_ahead_too() -> None:
    others = [[*p, *plain(ToyEngine(), p, SEEDED, 400)] for p in ((5, 6, 7), (9, 8, 2), (4, 4, 1))]
    table = counted(others, ToyEngine().vocabulary.fingerprint)

    async def main(known: Ngrams | None) -> tuple[list[int], Generation]:
        draft, made = ToyDraft(ToyEngine()), list[Generation]()
        draft.step_cost = [(1, 10 * FLOOR), (2, 11 * FLOOR)]
        async with agent_of(Verifier(), draft, rtt=0.0, row=10 * FLOOR, ngrams=known) as agent:
            tokens = await answer(agent, PROMPT, SEEDED, 200, report=made.append)
        return tokens, made[0]

    without, known = run(main(None)), run(main(table))
    assert known[0] == without[0] == plain(ToyEngine(), PROMPT, SEEDED, 200)
    assert known[1].figures.accepted > 1.3 * without[1].figures.accepted


@pytest.mark.parametrize("seed", range(4))
def test_cuts_in_the_middle_lose_nothing(seed: int) -> None:
    """Cut at random moments: before the answer, between frames, while nodes are on their way."""

    async def main() -> tuple[list[int], list[int]]:
        verifier, rng = Verifier(), Random(seed)

        async def cut() -> None:
            for _ in range(8):
                await asyncio.sleep(rng.expovariate(3.0))
                await verifier.cut()

        cutting = asyncio.create_task(cut())
        async with agent_of(verifier, ToyDraft(ToyEngine(), 1.0), rtt=0.08) as agent:
            tokens = await answer(agent, PROMPT, SEEDED, 150)
            counts = [len(verifier.scheduler), len(agent._generations), len(agent._waiting)]
        cutting.cancel()
        return tokens, counts

    tokens, counts = run(main())
    assert tokens == plain(ToyEngine(), PROMPT, SEEDED, 150)
    assert counts == [0, 0, 0]


def test_a_session_is_resumed_with_what_the_cloud_held() -> None:
    async def main() -> tuple[list[int], int, int]:
        verifier = Verifier()
        async with agent_of(verifier, ToyDraft(ToyEngine()), rtt=0.02) as agent:
            task = asyncio.create_task(answer(agent, PROMPT, SEEDED, 120))
            await asyncio.sleep(0.5)
            await verifier.cut()
            await asyncio.sleep(0.001)
            waiting = len(verifier.house.waiting)
            return await task, waiting, len(verifier.house.waiting)

    tokens, waiting, left = run(main())
    assert tokens == plain(ToyEngine(), PROMPT, SEEDED, 120)
    assert (waiting, left) == (1, 0)


@pytest.mark.parametrize("session_ttl", [0.0, 60.0])
def test_another_verifier_takes_over(session_ttl: float) -> None:
    """The first verifier ends in mid-answer; one that has never heard of the session goes on with it."""

    async def main() -> tuple[list[int], float]:
        first, second = Verifier(session_ttl=session_ttl), Verifier(session_ttl=session_ttl)
        agent = agent_of(first, ToyDraft(ToyEngine(), 1.0))
        async with agent:
            task = asyncio.create_task(answer(agent, PROMPT, SEEDED, 120))
            await asyncio.sleep(0.7)
            assert not task.done()
            await first.stop()
            first.connect = second.connect  # type: ignore[method-assign]  # the name resolves to another machine now
            tokens = await task
        return tokens, second.scheduler.figures.steps

    tokens, steps = run(main())
    assert tokens == plain(ToyEngine(), PROMPT, SEEDED, 120)
    assert steps > 0


def test_goaway_moves_on_and_does_not_spin() -> None:
    """A verifier that sends everybody away is left and come back to, with a pause that grows."""

    async def main() -> tuple[list[int], int, float]:
        verifier, loop = Verifier(), asyncio.get_running_loop()
        connects = 0
        inner = verifier.connect

        async def connect() -> Channel:
            nonlocal connects
            connects += 1
            channel = await inner()
            if loop.time() < 20:
                end = verifier.ends[-1]
                loop.call_later(0.06, lambda: asyncio.ensure_future(end.send(encode(Goaway(reason="maintenance")))))
            return channel

        verifier.connect = connect  # type: ignore[method-assign]
        async with agent_of(verifier, ToyDraft(ToyEngine(), 1.0)) as agent:
            tokens = await answer(agent, PROMPT, SEEDED, 400)
        return tokens, connects, loop.time()

    tokens, connects, _ = run(main())
    assert tokens == plain(ToyEngine(), PROMPT, SEEDED, 400)
    assert 2 < connects < 40


def test_a_dead_cloud_is_reported_to_everybody_who_waits() -> None:
    async def main() -> None:
        verifier = Verifier()
        async with agent_of(verifier, ToyDraft(ToyEngine(), 1.0), attempts=3) as agent:
            tasks = [asyncio.create_task(answer(agent, [1, n], SEEDED, 300)) for n in range(3)]
            await asyncio.sleep(0.5)
            await verifier.stop()
            for task in tasks:
                with pytest.raises(LinkError, match="nobody listens"):
                    await task
            with pytest.raises(LinkError, match="nobody listens"):
                await answer(agent, PROMPT, SEEDED, 3)

    run(main())


def test_leaving_early_frees_the_session_at_both_ends() -> None:
    async def main() -> None:
        verifier, draft = Verifier(), ToyDraft(ToyEngine())
        async with agent_of(verifier, draft) as agent:
            events = agent.generate(GenerationRequest(PROMPT, SEEDED, 1000))
            async for _ in events:
                break
            await events.aclose()
            await asyncio.sleep(0.2)
            assert len(verifier.scheduler) == 0
            assert not verifier.house.waiting
            assert not verifier.engine._sequences  # type: ignore[attr-defined]
            assert not draft.open_handles
            steps = verifier.scheduler.figures.steps
            await asyncio.sleep(5)
            assert verifier.scheduler.figures.steps == steps

    run(main())


def test_several_generations_at_once_share_the_draft() -> None:
    async def main() -> tuple[list[list[int]], ToyDraft]:
        verifier, draft = Verifier(), ToyDraft(ToyEngine(), 0.5, room=3)
        async with agent_of(verifier, draft) as agent:
            prompts = [[1 + n, 2] for n in range(5)]  # two more than the draft has room for: decoded plainly
            texts = await asyncio.gather(*(answer(agent, p, SEEDED, 60 + 5 * i) for i, p in enumerate(prompts)))
            await asyncio.sleep(0.1)
        return list(texts), draft

    texts, draft = run(main())
    assert texts == [plain(ToyEngine(), [1 + n, 2], SEEDED, 60 + 5 * n) for n in range(5)]
    assert draft.opened == 3
    assert not draft.open_handles


class Crowded(ToyEngine):
    """Room for two sequences."""

    def open(self, tokens: Sequence[int]) -> int:
        if len(self._sequences) >= 2:
            raise EngineError("all 2 sequences of this engine are in use")
        return super().open(tokens)


def test_an_overloaded_verifier_is_asked_again() -> None:
    async def main() -> list[list[int]]:
        verifier = Verifier(Crowded())
        async with agent_of(verifier, ToyDraft(ToyEngine(), 0.5)) as agent:
            return list(await asyncio.gather(*(answer(agent, [n, 2], SEEDED, 40) for n in range(4))))

    assert run(main()) == [plain(ToyEngine(), [n, 2], SEEDED, 40) for n in range(4)]


def test_who_leaves_while_waiting_to_ask_again_is_gone() -> None:
    async def main() -> None:
        verifier = Verifier(Crowded())
        async with agent_of(verifier, ToyDraft(ToyEngine(), 0.5)) as agent:
            busy = [asyncio.create_task(answer(agent, [n, 2], SEEDED, 200)) for n in range(2)]
            await asyncio.sleep(0.2)
            refused = asyncio.create_task(answer(agent, [7, 2], SEEDED, 500))
            await asyncio.sleep(0.3)  # refused by now, and to be asked for again
            refused.cancel()
            await asyncio.gather(*busy)
            await asyncio.sleep(0.5)
            steps = verifier.scheduler.figures.steps
            await asyncio.sleep(10)
            assert verifier.scheduler.figures.steps == steps, "the cloud writes for somebody who is gone"
            assert not agent._generations

    run(main())


def test_who_waits_to_ask_again_hears_of_a_dead_cloud() -> None:
    async def main() -> None:
        verifier = Verifier(Crowded())
        async with agent_of(verifier, ToyDraft(ToyEngine(), 0.5), attempts=1) as agent:
            busy = [asyncio.create_task(answer(agent, [n, 2], SEEDED, 900)) for n in range(2)]
            await asyncio.sleep(0.2)
            refused = asyncio.create_task(answer(agent, [7, 2], SEEDED, 500))
            await asyncio.sleep(0.3)
            await verifier.stop()
            for task in [*busy, refused]:
                with pytest.raises(LinkError):
                    await asyncio.wait_for(task, 60)

    run(main())


def test_a_refusal_is_raised_where_the_answer_was_asked_for() -> None:
    async def main() -> None:
        verifier = Verifier(ToyEngine(context=64))
        async with agent_of(verifier, ToyDraft(ToyEngine())) as agent:
            for prompt, code in (([], Code.BAD_PROMPT), ([1] * 64, Code.CONTEXT), ([99], Code.BAD_TOKEN)):
                with pytest.raises(ProtocolError) as caught:
                    await answer(agent, prompt, SEEDED, 5)
                assert caught.value.code is code
            assert await answer(agent, PROMPT, SEEDED, 5) == plain(ToyEngine(), PROMPT, SEEDED, 5)

    run(main())


def test_the_context_ends_a_text_that_would_outgrow_it() -> None:
    async def main() -> tuple[list[int], str]:
        made: list[Generation] = []
        async with agent_of(Verifier(ToyEngine(context=64)), ToyDraft(ToyEngine())) as agent:
            tokens = await answer(agent, PROMPT, SEEDED, 500, report=made.append)
        return tokens, made[0].session.finish

    assert run(main()) == (plain(ToyEngine(), PROMPT, SEEDED, 60), "length")


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_nothing_comes_after_a_stop_token(noise: float) -> None:
    text = plain(ToyEngine(), PROMPT, SEEDED, 400)
    stop = max(set(text), key=text.index)  # the token that comes up last
    expected = text[: text.index(stop) + 1]
    assert len(expected) > 5

    async def main() -> tuple[list[int], str]:
        made: list[Generation] = []
        async with agent_of(Verifier(), ToyDraft(ToyEngine(), noise)) as agent:
            tokens = await answer(agent, PROMPT, SEEDED, 400, stop_ids=(stop,), report=made.append)
        return tokens, made[0].session.finish

    assert run(main()) == (expected, "stop")


def test_a_draft_that_finds_no_room_for_a_while_comes_back() -> None:
    async def main() -> tuple[list[int], int]:
        draft, made = ToyDraft(ToyEngine()), list[Generation]()
        async with agent_of(Verifier(), draft) as agent:
            draft.fail_next = 10
            tokens = await answer(agent, PROMPT, SEEDED, 100, report=made.append)
        return tokens, made[0].figures.accepted

    tokens, accepted = run(main())
    assert tokens == plain(ToyEngine(), PROMPT, SEEDED, 100)
    assert accepted > 30


@pytest.mark.parametrize("to_the_end", [True, False])
def test_an_agent_that_ends_gives_its_drafts_room_back(to_the_end: bool) -> None:
    async def main() -> int:
        draft = ToyDraft(ToyEngine())
        async with agent_of(Verifier(), draft) as agent:
            generation = agent.generate(GenerationRequest(PROMPT, SEEDED, 30))
            async for _ in generation:
                if not to_the_end:
                    break
            held = len(draft.open_handles)
        await generation.aclose()
        assert to_the_end or held
        return len(draft.open_handles)

    assert run(main()) == 0


class Broken(ToyEngine):
    """Fails once in the middle of an answer."""

    broken = False

    def verify(self, batch: Sequence[Work]) -> list[Walk | EngineError | None]:
        if not self.broken and any(self.length(w.handle) > 20 for w in batch):
            self.broken = True
            raise RuntimeError("out of memory")
        return super().verify(batch)


def test_an_engine_that_fails_once_costs_a_pause() -> None:
    async def main() -> list[int]:
        async with agent_of(Verifier(Broken()), ToyDraft(ToyEngine(), 1.0)) as agent:
            return await answer(agent, PROMPT, SEEDED, 60)

    assert run(main()) == plain(ToyEngine(), PROMPT, SEEDED, 60)


def test_two_runs_in_virtual_time_are_the_same_run() -> None:
    async def main() -> tuple[float, int, int]:
        async with agent_of(Verifier(), ToyDraft(ToyEngine(), 1.0)) as agent:
            made: list[Generation] = []
            await answer(agent, PROMPT, SEEDED, 100, report=made.append)
            return asyncio.get_running_loop().time(), made[0].figures.steps, agent.link.traffic.up

    assert run(main()) == run(main())


def test_the_uplink_keeps_to_its_budget() -> None:
    async def main() -> tuple[int, int]:
        async with agent_of(Verifier(), ToyDraft(ToyEngine(), 0.3)) as agent:
            await answer(agent, PROMPT, SEEDED, 300)
            return agent.link.traffic.up, agent.link.traffic.largest

    up, largest = run(main())
    assert up / 300 < 150
    assert largest < 1024


def test_a_fault_in_the_link_leaves_nobody_waiting() -> None:
    async def main() -> None:
        verifier = Verifier()

        async def connect() -> Channel:
            raise RuntimeError("a bug")

        verifier.connect = connect  # type: ignore[method-assign]
        agent = agent_of(verifier, ToyDraft(ToyEngine()))
        await agent.__aenter__()
        with pytest.raises(LinkError, match="a bug"):
            await asyncio.wait_for(answer(agent, PROMPT, SEEDED, 5), 60)
        with pytest.raises(RuntimeError, match="a bug"):
            await agent.__aexit__(None, None, None)

    run(main())
