"""Sessions as vLLM's requests: real edges, connections, mailbox and drafter; vLLM's step loop over the toy target."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from paceline.cloud.connection import Connection, House
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.scheduler import ACK_WINDOW, Seat
from paceline.cloud.vllm.drafter import Drafter
from paceline.cloud.vllm.mailbox import VARIABLE, Mailbox
from paceline.cloud.vllm.params import demand
from paceline.cloud.vllm.requests import Output, Requests
from paceline.protocol.channel import Channel
from paceline.protocol.cloud_session import CloudSession, Limits
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.errors import Code, ProtocolError
from paceline.protocol.messages import UNSEEDED, Commit, Error, Hello, Open, Welcome
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling, choose
from paceline.scripts.lab.virtual import MemoryChannel, run
from rig import FLOOR, Verifier, agent_of, answer, plain
from toy_draft import ToyDraft

WIDTH, SLOTS = 4, 6
LIMITS = Limits(vocabulary=12, context=4096)


@dataclass(eq=False)
class Row:
    """A request in vLLM's batch."""

    tokens: list[int]
    left: int
    stops: frozenset[int]
    logprobs: bool
    draft: list[int] = field(default_factory=list)
    out: list[int] = field(default_factory=list)  # not picked up yet; vLLM merges what nobody has
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, tokens: list[int]) -> None:
        """As many of a step's tokens as belong to the text."""
        for token in tokens:
            self.tokens.append(token)
            self.out.append(token)
            self.left -= 1
            if token in self.stops:
                self.left = 0
            if not self.left:
                return


class Steps:
    """What vLLM does: one step over all requests, in which drafts are verified and new ones asked for.

    Outputs are handed out every `lag` steps. Keeps its own counts, for the figures to be held against.
    """

    def __init__(self, drafter: Drafter, lag: int = 1) -> None:
        self.rows: list[Row] = []
        self.target, self.drafter, self.lag = ToyEngine(), drafter, lag
        self.steps = self.session_steps = self.drafted = self.accepted = self.hits = 0
        self.fail = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(FLOOR)
            rows = list(self.rows)
            sampled = [self._verify(row) for row in rows]
            self._propose(rows, sampled)
            self.steps += bool(rows)
            for row in rows:
                if self.steps % self.lag == 0 or not row.left:
                    row.ready.set()

    def _verify(self, row: Row) -> list[int]:
        tokens: list[int] = []
        draft, row.draft = row.draft, []
        for token in [*draft, None]:
            sequence = [*row.tokens, *tokens]
            tokens.append(choose(self.target.logits(sequence), Sampling(), len(sequence), None))
            if tokens[-1] != token:
                break
        before = len(row.tokens)
        row.take(tokens)
        self.session_steps += 1
        self.hits += len(draft) > 0
        self.drafted += len(draft)
        self.accepted += min(len(tokens) - 1, len(row.tokens) - before)
        return tokens

    def _propose(self, rows: list[Row], sampled: list[list[int]]) -> None:
        table = np.zeros((len(rows), LIMITS.context), np.int32)
        for line, row in zip(table, rows, strict=True):
            line[: len(row.tokens)] = row.tokens
        lengths = np.array([len(row.tokens) for row in rows], np.int32)
        for row, draft in zip(rows, self.drafter.propose(sampled, lengths, table, slot_mappings=None), strict=True):
            row.draft = draft
        self.rows = [row for row in self.rows if row.left]

    async def generate(self, session: CloudSession, name: str) -> AsyncGenerator[Output, None]:
        left = session.max_tokens - len(session.committed)
        row = Row(session.sequence, left, session.stop_ids, session.logprobs is not None)
        self.rows.append(row)
        try:
            while row.left or row.out:
                await row.ready.wait()
                if self.fail:
                    raise RuntimeError("the engine is dead")
                row.ready.clear()
                tokens, row.out = row.out, []
                told = [{12: SimpleNamespace(logprob=-3.0), t: SimpleNamespace(logprob=-0.5)} for t in tokens]
                yield SimpleNamespace(token_ids=tokens, logprobs=told if row.logprobs else None)
        finally:
            if row in self.rows:
                self.rows.remove(row)


class VllmVerifier(Verifier):
    """As `rig.Verifier`, with vLLM in the engine's place."""

    def __init__(self, lag: int = 1) -> None:
        path = Mailbox.create(SLOTS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, str(path))
            config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=WIDTH))
            self.vllm = Steps(Drafter(config), lag)
        self.mailbox = Mailbox(path)
        path.unlink()
        loop = asyncio.get_running_loop()
        self.engine = self.vllm.target
        self.requests = Requests(self.vllm.generate, self.mailbox, loop.time, WIDTH)
        self.house = House(
            self.requests, "toy", self.engine.vocabulary, 4096, clock=loop.time, traits=(UNSEEDED,), demand=demand
        )
        self.stepping = loop.create_task(self.vllm.run())
        self.ends: list[MemoryChannel] = []
        self.serving: list[asyncio.Task[None]] = []
        self.down = False

    def enter(
        self, prompt: tuple[int, ...], max_tokens: int, **more: object
    ) -> tuple[Seat, list[Commit], list[ProtocolError]]:
        commits: list[Commit] = []
        errors: list[ProtocolError] = []
        opened = Open(sid=1, prompt=prompt, sampling=Sampling(), max_tokens=max_tokens)
        seat = Seat(CloudSession(opened, LIMITS, "token"), commits.append, errors.append, **more)  # type: ignore[arg-type]
        self.requests.add(seat)
        return seat, commits, errors

    def nothing_is_left(self) -> bool:
        free = sorted(self.requests._free) == list(range(SLOTS))
        return free and not len(self.requests) and not self.vllm.rows and self.requests.idle.is_set()


def text_of(commits: list[Commit]) -> list[int]:
    return [token for commit in commits for token in commit.tokens]


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("noise", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("rtt", [0.0, 0.08])
def test_the_text_is_the_plain_one_and_every_figure_is_vllms_own(noise: float, rtt: float, lag: int) -> None:
    async def main() -> None:
        verifier = VllmVerifier(lag)
        async with agent_of(verifier, ToyDraft(verifier.engine, noise), rtt=rtt) as agent:
            texts = await asyncio.gather(*(answer(agent, (sid, 2), Sampling(), 150) for sid in range(4)))
        for sid, text in enumerate(texts):
            assert text == plain(ToyEngine(), (sid, 2), Sampling(), 150)
        vllm, figures = verifier.vllm, verifier.requests.figures
        assert (figures.session_steps, figures.tokens) == (vllm.session_steps, 600)
        assert (figures.verified, figures.accepted) == (vllm.drafted, vllm.accepted)
        assert figures.hits >= vllm.hits
        if noise < 100:
            assert vllm.accepted > 100
        await asyncio.sleep(1)
        assert verifier.nothing_is_left()

    run(main())


def test_without_drafts_vllm_decodes_plainly() -> None:
    async def main() -> None:
        verifier = VllmVerifier()
        async with agent_of(verifier) as agent:
            assert await answer(agent, (1, 2), Sampling(), 60) == plain(ToyEngine(), (1, 2), Sampling(), 60)
        assert (verifier.vllm.drafted, verifier.requests.figures.hits) == (0, 0)

    run(main())


def test_a_stop_token_ends_the_text_at_both_ends() -> None:
    async def main() -> None:
        verifier = VllmVerifier()
        text = plain(ToyEngine(), (1, 2), Sampling(), 60)
        stop = text[30]
        expected = plain(ToyEngine(), (1, 2), Sampling(), 60, (stop,))
        async with agent_of(verifier, ToyDraft(verifier.engine)) as agent:
            assert await answer(agent, (1, 2), Sampling(), 60, stop_ids=(stop,)) == expected
        await asyncio.sleep(1)
        assert verifier.nothing_is_left()

    run(main())


def test_a_text_goes_on_after_a_cut() -> None:
    async def main() -> None:
        verifier = VllmVerifier()
        async with agent_of(verifier, ToyDraft(verifier.engine, 1.0)) as agent:
            answering = asyncio.create_task(answer(agent, (1, 2), Sampling(), 200))
            while verifier.requests.figures.tokens < 80:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(FLOOR)
            await verifier.cut()
            await asyncio.sleep(0)
            assert await answering == plain(ToyEngine(), (1, 2), Sampling(), 200)
        assert verifier.requests.figures.tokens == 200, "nothing was written twice"

    run(main())


def test_an_edge_that_leaves_takes_its_request_along() -> None:
    async def main() -> None:
        verifier = VllmVerifier()
        async with agent_of(verifier) as agent:
            events = agent.generate(GenerationRequest((1, 2), Sampling(), 500))
            await anext(events)
            assert len(verifier.vllm.rows) == 1
            await events.aclose()
            await asyncio.sleep(1)
            assert verifier.nothing_is_left()

    run(main())


def test_nobody_writes_on_for_an_edge_that_acknowledges_nothing() -> None:
    async def main() -> None:
        verifier = VllmVerifier()
        seat, commits, _ = verifier.enter((1, 2), 600)
        await asyncio.sleep(2 * ACK_WINDOW * FLOOR)
        assert len(text_of(commits)) == ACK_WINDOW
        assert not verifier.vllm.rows, "the request was given up"
        seat.session.acknowledge(ACK_WINDOW)
        verifier.requests.wake()
        await asyncio.sleep(200 * FLOOR)
        assert text_of(commits) == plain(ToyEngine(), (1, 2), Sampling(), 600)
        assert commits[-1].finish == "length"
        assert verifier.nothing_is_left()

    run(main())


def test_who_has_used_up_what_he_may_waits() -> None:
    async def main() -> None:
        verifier, until = VllmVerifier(), 5.0
        clock = asyncio.get_running_loop().time
        _, commits, _ = verifier.enter((1, 2), 20, pause=lambda: max(until - clock(), 0.0) if clock() > 0.2 else 0.0)
        await asyncio.sleep(4.5)
        assert 0 < len(text_of(commits)) < 20
        assert not verifier.vllm.rows
        await asyncio.sleep(2)
        assert text_of(commits) == plain(ToyEngine(), (1, 2), Sampling(), 20)

    run(main())


def test_when_vllm_fails_the_session_is_told_and_may_be_resumed() -> None:
    async def main() -> None:
        verifier = VllmVerifier()
        _, commits, errors = verifier.enter((1, 2), 100)
        await asyncio.sleep(10 * FLOOR)
        verifier.vllm.fail = True
        await asyncio.sleep(1)
        assert [e.code for e in errors] == [Code.ENGINE]
        assert errors[0].retryable
        assert commits
        assert verifier.nothing_is_left()

    run(main())


def test_a_request_that_ends_with_nothing_is_a_failure_not_a_loop() -> None:
    async def main() -> None:
        async def nothing(session: CloudSession, name: str) -> AsyncGenerator[Output, None]:
            for output in ():
                yield output

        verifier = VllmVerifier()
        verifier.requests._generate = nothing
        _, _, errors = verifier.enter((1, 2), 100)
        await asyncio.sleep(0.1)
        assert [e.code for e in errors] == [Code.ENGINE]
        assert "shutting down" in str(errors[0])

    run(main())


def test_the_edge_is_told_what_this_verifier_does_not_do() -> None:
    async def main() -> None:
        verifier = VllmVerifier()
        mine, other = MemoryChannel.pair()
        serving = asyncio.create_task(Connection(other, verifier.house).serve())
        own = verifier.engine.vocabulary
        hello = Hello(versions=(1,), vocabulary="", vocabulary_size=own.size, fingerprint=own.fingerprint)
        await mine.send(encode(hello))
        welcome = decode_from_cloud(await mine.receive())
        assert isinstance(welcome, Welcome)
        assert (welcome.features, welcome.width) == ((UNSEEDED,), WIDTH)
        await mine.send(encode(Open(sid=1, prompt=(1,), sampling=Sampling(temperature=1, min_p=0.1), max_tokens=5)))
        refused = decode_from_cloud(await mine.receive())
        assert isinstance(refused, Error)
        assert (refused.code, refused.sid) == (Code.UNSUPPORTED, 1)
        await mine.send(encode(Open(sid=2, prompt=(1, 2), sampling=Sampling(), max_tokens=5, grammar="{}")))
        refused = decode_from_cloud(await mine.receive())
        assert isinstance(refused, Error)
        assert refused.code is Code.UNSUPPORTED
        await mine.send(encode(Open(sid=3, prompt=(1, 2), sampling=Sampling(), max_tokens=3, logprobs=1)))
        text, logprobs = await _rest(mine)
        assert text == plain(ToyEngine(), (1, 2), Sampling(), 3)
        assert logprobs == [((token, -0.5), (token, -0.5)) for token in text]
        await mine.close()
        await serving

    run(main())


async def _rest(channel: Channel) -> tuple[list[int], list[object]]:
    text: list[int] = []
    logprobs: list[object] = []
    while True:
        message = decode_from_cloud(await channel.receive())
        if isinstance(message, Commit):
            text += message.tokens
            logprobs += message.logprobs
            if message.finish:
                return text, logprobs


@pytest.fixture(autouse=True)
def _no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.iterdir())
