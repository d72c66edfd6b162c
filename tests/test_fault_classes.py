"""Faults that users of such systems report, each as a test; in virtual time. Those that another module tests stand there."""

import asyncio
from collections.abc import Callable, Sequence
from random import Random

import pytest
from paceline.cloud.engines.toy import ToyEngine, toy_tokens
from paceline.edge.agent import Agent
from paceline.edge.delay import DelayedChannel
from paceline.edge.generation import Generation
from paceline.edge.policies import policy
from paceline.edge.predictor import Predictor
from paceline.protocol.channel import Channel, ChannelClosed
from paceline.protocol.codec import decode_from_cloud, decode_from_edge
from paceline.protocol.errors import Code, ProtocolError
from paceline.protocol.messages import Commit, Draft
from paceline.protocol.sampling import Sampling
from paceline.protocol.vocabulary import Vocabulary
from paceline.scripts.lab.load import Setting, load
from paceline.scripts.lab.virtual import draft_runner, run
from rig import FLOOR, Verifier, answer, plain
from toy_draft import ToyDraft

PROMPT = [1, 2, 3, 4]
SEEDED = Sampling(seed=3, temperature=0.9)


def agent_with(
    verifier: Verifier,
    draft: ToyDraft | None,
    name: str = "stream",
    *,
    vocabulary: Vocabulary | None = None,
    wrap: Callable[[Channel], Channel] = lambda channel: channel,
    first: float = 0.005,
) -> Agent:
    async def connect() -> Channel:
        return wrap(DelayedChannel(await verifier.connect(), 0.05))

    return Agent(
        connect,
        vocabulary or verifier.engine.vocabulary,
        policy(name),
        draft,
        Predictor(),
        draft_runner(first, 0.0005),
        clock=asyncio.get_running_loop().time,
        random=Random(0),
    )


# ---- 1: two tokenizers


def test_another_tokenizer_is_refused_at_connect_and_both_are_named() -> None:
    """Not a word is decoded: never a draft that is silently right 0 % of the time."""

    async def main() -> tuple[ProtocolError, int]:
        verifier = Verifier()
        other = Vocabulary.of("another tokenizer", [t.upper() for t in toy_tokens(12)])
        async with agent_with(verifier, ToyDraft(ToyEngine()), vocabulary=other) as agent:
            with pytest.raises(ProtocolError) as refused:
                await answer(agent, PROMPT, Sampling(), 20)
        return refused.value, verifier.scheduler.figures.tokens

    error, tokens = run(main())
    assert error.code is Code.VOCABULARY
    assert "'another tokenizer' (12 tokens)" in error.message
    assert "'toy' (12 tokens)" in error.message
    assert tokens == 0


# ---- 2: one tokenizer, padded differently


class PaddedToy(ToyEngine):
    """Its vocabulary as a file with `padding` more rows would give it."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.vocabulary = Vocabulary.of("padded", [*toy_tokens(12), *(f"[PAD{12 + i}]" for i in range(padding))])


@pytest.mark.parametrize(("ours", "theirs"), [(0, 4), (4, 0), (3, 500)])
def test_a_vocabulary_that_is_only_padded_differently_works_to_the_end(ours: int, theirs: int) -> None:
    async def main() -> tuple[list[int], int]:
        verifier, made = Verifier(PaddedToy(theirs)), list[Generation]()
        draft = ToyDraft(PaddedToy(ours))
        async with agent_with(verifier, draft, vocabulary=draft.vocabulary) as agent:
            text = await answer(agent, PROMPT, SEEDED, 120, report=made.append)
        return text, made[0].figures.accepted

    text, accepted = run(main())
    assert text == plain(ToyEngine(), PROMPT, SEEDED, 120)
    assert accepted > 40


def test_a_padding_id_that_a_peer_offers_is_refused() -> None:
    async def main() -> Code:
        verifier = Verifier(PaddedToy(4))
        async with agent_with(verifier, None, "ar") as agent:
            with pytest.raises(ProtocolError) as refused:
                await answer(agent, [1, 13], Sampling(), 5)
        return refused.value.code

    assert run(main()) is Code.BAD_TOKEN


# ---- 10 and 18: drafting stays as good as it was


def test_the_last_answers_are_drafted_as_well_as_the_first() -> None:
    """Long prompts and short ones, 24 answers by one agent: as many hits at the end, and the draft holds nothing."""

    async def main() -> tuple[list[float], int]:
        verifier, shares = Verifier(), list[float]()
        draft = ToyDraft(ToyEngine(), 1.0, room=2)
        async with agent_with(verifier, draft) as agent:
            for part in range(4):
                f, rng = verifier.scheduler.figures, Random(1)
                hits, steps = f.hits, f.session_steps
                for i in range(6):
                    prompt = rng.choices(range(12), k=300 if i % 4 == 0 else 9)
                    sampling = Sampling(seed=100 * part + i, temperature=0.8)
                    await answer(agent, prompt, sampling, 60)
                shares.append((f.hits - hits) / (f.session_steps - steps))
            await asyncio.sleep(1)
        return shares, len(draft.open_handles)

    shares, held = run(main())
    assert held == 0
    assert min(shares) > 0.3
    assert shares[-1] > 0.9 * shares[1]  # the first part is still learning


# ---- 16: who closes what is silent


class IdleProxy:
    """A proxy that closes a connection on which nothing has passed for `seconds` one way, as reverse proxies do."""

    def __init__(self, inner: Channel, seconds: float, closed: list[float]) -> None:
        self._inner, self._seconds, self._closed = inner, seconds, closed

    async def send(self, frame: bytes) -> None:
        await self._inner.send(frame)

    async def receive(self) -> bytes | str:
        try:
            async with asyncio.timeout(self._seconds):
                return await self._inner.receive()
        except TimeoutError:
            self._closed.append(asyncio.get_running_loop().time())
            await self._inner.close()
            raise ChannelClosed("idle for too long") from None

    async def close(self, reason: str = "") -> None:
        await self._inner.close(reason)


def test_an_idle_link_is_never_silent_for_as_long_as_proxies_wait() -> None:
    """An hour without a question, behind a proxy less patient than any: the link is still the first one."""

    async def main() -> tuple[list[float], list[int], int]:
        verifier, closed = Verifier(), list[float]()
        async with agent_with(verifier, None, "ar", wrap=lambda c: IdleProxy(c, 20.0, closed)) as agent:
            await asyncio.sleep(3600)
            return closed, await answer(agent, PROMPT, SEEDED, 30), len(verifier.ends)

    closed, text, connections = run(main())
    assert (closed, connections) == ([], 1)
    assert text == plain(ToyEngine(), PROMPT, SEEDED, 30)


def test_a_proxy_that_closes_all_the_same_costs_no_answer() -> None:
    async def main() -> tuple[int, list[list[int]]]:
        verifier, closed, texts = Verifier(), list[float](), list[list[int]]()
        async with agent_with(verifier, None, "ar", wrap=lambda c: IdleProxy(c, 0.6, closed)) as agent:
            for seed in range(5):
                await asyncio.sleep(60)
                texts.append(await answer(agent, PROMPT, Sampling(seed=seed, temperature=1.0), 200))
        return len(closed), texts

    closings, texts = run(main())
    assert closings > 5
    for seed, text in enumerate(texts):
        assert text == plain(ToyEngine(), PROMPT, Sampling(seed=seed, temperature=1.0), 200)


def test_pings_come_well_under_the_thirty_seconds_of_the_least_patient() -> None:
    from paceline.cloud.server import PING_SECONDS as of_the_cloud
    from paceline.edge.api.completions import QUIET_SECONDS as of_a_stream
    from paceline.edge.link import PING_SECONDS as of_the_edge

    assert max(of_the_cloud, of_a_stream, of_the_edge) < 30


# ---- 17: never slower than plain decoding


@pytest.mark.parametrize(("noise", "first", "rtt"), [(100.0, 0.005, 0.05), (100.0, 0.2, 0.05), (1.0, 0.5, 0.3)])
def test_a_draft_that_does_not_pay_costs_nothing(noise: float, first: float, rtt: float) -> None:
    """Always wrong, far too slow, or too far away: as fast as without it, but for one step in fifty."""

    async def seconds(name: str) -> float:
        verifier, loop = Verifier(), asyncio.get_running_loop()
        draft = ToyDraft(ToyEngine(), noise) if name != "ar" else None
        async with agent_with(verifier, draft, name, wrap=lambda c: DelayedChannel(c, rtt), first=first) as agent:
            await answer(agent, PROMPT, SEEDED, 50)
            begin = loop.time()
            assert len(await answer(agent, PROMPT, SEEDED, 300)) == 300
            return loop.time() - begin

    assert run(seconds("stream")) <= 1.02 * run(seconds("ar")) + FLOOR


@pytest.mark.parametrize("sessions", [1, 16])
def test_a_verifier_under_load_is_no_slower_for_what_is_drafted_in_vain(sessions: int) -> None:
    """All nodes of all sessions are wrong: each still gets its token in every step."""
    made = load(Setting(sessions, seconds=3.0, agree=0.0, width=64))
    assert made.least >= 0.98 / 0.03


# ---- 19: what was drafted in advance is only a beginning


class Spying(DelayedChannel):
    """Notes how many nodes go up in each message, and what is committed."""

    def __init__(self, inner: Channel, seen: list[Draft | Commit]) -> None:
        super().__init__(inner, 0.0)
        self._seen = seen

    async def send(self, frame: bytes) -> None:
        if isinstance(message := decode_from_edge(frame), Draft):
            self._seen.append(message)
        await super().send(frame)

    async def receive(self) -> bytes | str:
        frame = await super().receive()
        if isinstance(message := decode_from_cloud(frame), Commit):
            self._seen.append(message)
        return frame


def test_a_round_that_was_drafted_in_part_is_completed_before_it_leaves() -> None:
    """`ssd` with a draft too slow to prepare whole outcomes: every round's chain has its full length all the same."""

    async def main() -> list[Draft | Commit]:
        verifier, seen = Verifier(), list[Draft | Commit]()
        draft = ToyDraft(ToyEngine())
        async with agent_with(verifier, draft, "ssd", wrap=lambda c: Spying(c, seen), first=0.02) as agent:
            assert await answer(agent, PROMPT, Sampling(), 150) == plain(ToyEngine(), PROMPT, Sampling(), 150)
        return seen

    seen = run(main())
    length = policy("ssd").rounds
    rounds = [len(m.tokens) for m in seen if isinstance(m, Draft)]
    assert rounds[:-2] == [length] * (len(rounds) - 2)
    assert len(rounds) > 10


def test_a_tree_that_is_held_in_part_is_grown_deeper_not_anew() -> None:
    """`stream`: after a commit the subtree that agrees goes on from where it ended; no node is sent twice."""

    async def main() -> list[Draft | Commit]:
        verifier, seen = Verifier(), list[Draft | Commit]()
        async with agent_with(verifier, ToyDraft(ToyEngine(), 1.0), wrap=lambda c: Spying(c, seen)) as agent:
            await answer(agent, PROMPT, SEEDED, 150)
        return seen

    tree = _replayed(run(main()))
    assert len(tree) == len(set(tree)) > 100


def _replayed(seen: Sequence[Draft | Commit]) -> list[tuple[int, ...]]:
    """The whole sequence of tokens that each node stands for, in the order of sending."""
    text: list[int] = []
    nodes: dict[int, tuple[int, ...]] = {}
    found = []
    for message in seen:
        if isinstance(message, Commit):
            text[message.base :] = message.tokens
            continue
        base = tuple(text[: message.base_committed_len])
        for i, (parent, token) in enumerate(zip(message.parents, message.tokens, strict=True)):
            number = message.first + i
            above = base if parent == 0 else nodes[number - parent]
            nodes[number] = (*above, token)
            found.append(nodes[number])
    return found
