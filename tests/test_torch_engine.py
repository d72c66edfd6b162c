"""The torch engine as the scheduler sees it: chunks, trees, many sessions, shared prefixes, pressure, faults."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from paceline.cloud.engine import Work, walk
from paceline.cloud.engines.torch import TorchEngine
from paceline.cloud.kv import page_bytes
from paceline.cloud.model import Rows
from paceline.cloud.torch_target import Options, bring_up
from paceline.cloud.witness import free_width, measure_step_cost, row_logits
from paceline.kernels.layout import PAGE, Layout
from paceline.protocol.cloud_session import Plan, Walk
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.errors import EngineError
from paceline.protocol.messages import Commit, Hello, Open
from paceline.protocol.sampling import History, Sampling
from paceline.scripts.lab.virtual import run
from rig import Verifier, shown
from small_models import write_folder
from trees import generate, random_plan

GREEDY = Sampling()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), "llama3")


Make = Callable[..., TorchEngine]


@pytest.fixture
def make(folder: Path) -> Make:
    def make(pages: int = 64, **options: object) -> TorchEngine:
        engine = bring_up(folder, Options(device="cpu", free_width=0, cache_bytes=2**22, **options))  # type: ignore[arg-type]
        bytes_a_page = page_bytes(engine.decoder.config, torch.float32)
        small = Options(device="cpu", free_width=0, cache_bytes=bytes_a_page * (pages + 1), **options)  # type: ignore[arg-type]
        return bring_up(folder, small)

    return make


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(150), k=count)


def step(engine: TorchEngine, handle: int, tokens: list[int], plan: Plan | None = None, **more: object) -> Walk:
    work = Work(handle, tuple(tokens), plan or Plan(), more.pop("sampling", GREEDY), **more)  # type: ignore[arg-type]
    result = engine.verify([work])[0]
    assert isinstance(result, Walk), result
    return result


# ---- steps


def test_a_prompt_in_chunks_gives_what_one_chunk_gives(make: Make) -> None:
    engine, text = make(exact=True), words(1, 200)
    whole = step(engine, engine.open(()), text)
    handle = engine.open(())
    for first in range(0, 180, 45):
        work = Work(handle, tuple(text[first : first + 45]), Plan(), GREEDY, choose=False)
        assert engine.verify([work]) == [None]
        assert engine.length(handle) == first + 45
    assert step(engine, handle, text[180:]) == whole


def test_prompts_chunks_and_trees_go_together_in_one_step(make: Make) -> None:
    engine = make(exact=True)
    texts = [words(i, 30 + 40 * i) for i in range(4)]
    alone = [step(engine, engine.open(()), t) for t in texts]
    handles = [engine.open(()) for _ in texts]
    works = [
        Work(h, tuple(t), Plan(), GREEDY, choose=i != 2) for i, (h, t) in enumerate(zip(handles, texts, strict=True))
    ]
    rng = random.Random(0)
    works[1] = Work(handles[1], tuple(texts[1]), random_plan(rng, 9, 150), GREEDY)
    results = engine.verify(works)
    assert results[2] is None
    assert [r.token for r in (results[0], results[3])] == [alone[0].token, alone[3].token]  # type: ignore[union-attr]
    assert engine.timing.rows == sum(map(len, texts)) + 9


@pytest.mark.parametrize("exact", [False, True])
def test_walks_are_those_of_the_shared_host_code(make: Make, exact: bool) -> None:
    """The walk on the device against `engine.walk` with NumPy's choices, over the same logits."""
    engine = make(exact=exact)
    rng = random.Random(8)
    for seed in range(12):
        text = words(seed, 40)
        sampling = Sampling(
            seed=seed, temperature=(seed % 3) * 0.6, top_k=(seed % 2) * 30, repetition_penalty=1 + seed % 2
        )
        history = History(text[:30], text[30:])
        truth = [step(engine, engine.open(()), text, sampling=sampling, history=history).token]
        plan = random_plan(rng, 12, 150, truth)
        rows = row_logits(engine, [(text, plan)], [0]).numpy()
        work = Work(engine.open(()), tuple(text), plan, sampling, history, logprobs=3)
        theirs = walk(work, len(text), lambda i, rows=rows: rows[i + 1])  # type: ignore[misc]
        ours = engine.verify([work])[0]
        assert isinstance(ours, Walk)
        assert isinstance(theirs, Walk)
        assert (ours.accepted, ours.token) == (theirs.accepted, theirs.token)
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert [t for t, _ in a] == [t for t, _ in b]
            np.testing.assert_allclose([p for _, p in a], [p for _, p in b], atol=2e-4)


def test_two_children_with_one_token_are_walked_once(make: Make) -> None:
    engine, text = make(), words(3, 10)
    token = step(engine, engine.open(()), text).token
    assert step(engine, engine.open(()), text, Plan((0, 1), (token, token), (-1, -1))).accepted == (0,)


def test_speculation_over_a_pages_end_leaves_the_cache_as_a_fresh_prefill(make: Make) -> None:
    engine, text = make(exact=True), words(4, PAGE - 3)
    plain = generate(engine, text, GREEDY, 30)
    handle = engine.open(())
    sequence = list(text)
    rng = random.Random(3)
    while len(sequence) < len(text) + 25:
        plan = random_plan(rng, 10, 150, plain[len(sequence) - len(text) :])
        result = step(engine, handle, sequence[engine.length(handle) :], plan)
        sequence += [*(plan.tokens[i] for i in result.accepted), result.token]
    assert sequence[len(text) :] == plain[: len(sequence) - len(text)]
    fresh = engine.open(())
    step(engine, fresh, sequence[:-1])
    ours, theirs = engine.cache.held(handle), engine.cache.held(fresh)
    for n in range(len(sequence) - 1):
        a, b = (h.pages[n // PAGE] * PAGE + n % PAGE for h in (ours, theirs))
        assert torch.equal(engine.cache.keys[:, :, a], engine.cache.keys[:, :, b])
        assert torch.equal(engine.cache.values[:, :, a], engine.cache.values[:, :, b])


def test_two_rollbacks_in_a_row_leave_what_a_fresh_prefill_leaves(make: Make) -> None:
    """Wrong trees in step after step, over a page's end, and back to a prefix twice: each time the same bits as from nothing."""
    engine, text = make(exact=True), words(4, PAGE - 2)
    handle, sequence = engine.open(()), list(text)
    plain = generate(engine, text, GREEDY, 8)
    for i in range(8):
        wrong = [(t + 1) % 150 for t in plain[i : i + 4]]
        plan = Plan(tuple(range(len(wrong))), tuple(wrong), tuple(range(-1, len(wrong) - 1)))
        result = step(engine, handle, sequence[engine.length(handle) :], plan)
        assert result.accepted == ()
        sequence.append(result.token)
    assert sequence[len(text) :] == plain
    engine.close(handle)
    for keep, tail in ((PAGE + 3, [7, 8, 9]), (PAGE - 5, [10, 11])):  # back, on, and back again
        tokens = sequence[:keep] + tail
        again, fresh = engine.open(tokens), make(exact=True)
        ours = row_logits(engine, [(tokens, Plan())], [0])
        assert torch.equal(ours, row_logits(fresh, [(tokens, Plan())], [0]))
        assert step(engine, again, tokens[engine.length(again) :]) == step(fresh, fresh.open(()), tokens)
        engine.close(again)


def test_padding_rows_of_the_vocabulary_are_never_chosen(make: Make) -> None:
    engine = make()
    assert engine.vocabulary.size == 150
    assert row_logits(engine, [(words(1, 5), Plan())], [0]).shape == (1, 150)


def test_pages_of_gone_edges_are_free_within_a_second(make: Make) -> None:
    """100 edges vanish in the middle of an answer, in virtual time: no sequence and no page stays in use."""
    engine = make(exact=True)

    async def main() -> list[float]:
        verifier, waits, clock = Verifier(engine), list[float](), asyncio.get_running_loop().time
        own = engine.vocabulary
        for i in range(100):
            channel = await verifier.connect()
            await channel.send(encode(Hello((1,), own.name, own.size, own.fingerprint)))
            await channel.send(encode(Open(1, tuple(words(i, 70)), GREEDY, 200)))
            while not isinstance(decode_from_cloud(await channel.receive()), Commit):
                pass
            assert engine.cache.pages.in_use >= 2
            await channel.close()
            begin = clock()
            while engine.cache.pages.in_use or len(verifier.scheduler):
                await asyncio.sleep(0.001)
                assert clock() - begin < 1.0
            waits.append(clock() - begin)
        await verifier.stop()
        return waits

    assert len(run(main())) == 100


def test_the_cache_is_told_in_pages_that_sessions_hold(make: Make) -> None:
    engine = make(pages=8)
    assert shown(engine) == {"usage_perc": 0, "used_blocks": 0, "total_blocks": 8, "block_tokens": PAGE}
    text = words(8, PAGE + 5)
    handles = [engine.open(()), engine.open(())]
    engine.verify([Work(h, tuple(text), Plan(), GREEDY) for h in handles])
    assert shown(engine)["used_blocks"] == 3, "the page that both begin with is counted once"
    assert shown(engine)["usage_perc"] == 3 / 8
    for handle in handles:
        engine.close(handle)
    assert shown(engine)["used_blocks"] == 0, "what is kept for prefixes is free"


# ---- shared prefixes


def test_a_prefix_is_stored_once_and_reused(make: Make) -> None:
    engine, system = make(), words(5, 3 * PAGE)
    first = engine.open(system)
    a = step(engine, first, system)
    before = engine.cache.pages.in_use
    second = engine.open([*system, 1, 2])
    assert engine.length(second) == 3 * PAGE
    step(engine, second, [1, 2])
    assert engine.cache.pages.in_use == before + 1
    third = engine.open(system)
    assert engine.length(third) == 2 * PAGE, "the last token is always computed: a choice comes after it"
    assert step(engine, third, system[2 * PAGE :]).token == a.token


def test_two_sessions_that_prefill_the_same_prompt_at_once_store_it_once(make: Make) -> None:
    engine, system = make(), words(6, 2 * PAGE)
    handles = [engine.open(system) for _ in range(4)]
    engine.verify([Work(h, tuple(system), Plan(), GREEDY) for h in handles])
    assert engine.cache.pages.in_use == 2
    for handle in handles:
        engine.close(handle)
    assert engine.cache.pages.in_use == 0
    assert engine.length(engine.open([*system, 7])) == 2 * PAGE, "it stays until room is needed"


def test_a_shared_page_is_never_written(make: Make) -> None:
    engine, system = make(exact=True), words(7, 2 * PAGE)
    handle = engine.open(system)
    step(engine, handle, system)
    pages = engine.cache.held(handle).pages[:2]
    kept = engine.cache.keys[:, :, pages[0] * PAGE : pages[0] * PAGE + PAGE].clone()
    rng = random.Random(1)
    others = [engine.open([*system, i]) for i in range(5)]
    for _ in range(4):
        engine.verify([Work(h, (i,), random_plan(rng, 7, 150), GREEDY) for i, h in enumerate(others)])
    assert torch.equal(kept, engine.cache.keys[:, :, pages[0] * PAGE : pages[0] * PAGE + PAGE])


# ---- pressure


def test_idle_sessions_give_way_and_are_rebuilt_from_their_tokens(make: Make) -> None:
    engine = make(pages=6, exact=True)
    texts = [words(i, 3 * PAGE + 5) for i in range(3)]
    plain = [generate(make(exact=True), t, GREEDY, 6) for t in texts]
    handles = [engine.open(t) for t in texts]
    written: list[list[int]] = [[], [], []]
    for _ in range(6):
        for handle, text, out in zip(handles, texts, written, strict=True):
            sequence = [*text, *out]
            out.append(step(engine, handle, sequence[engine.length(handle) :]).token)
    assert written == plain
    assert engine.cache.pages.in_use <= 6


def test_a_session_that_finds_no_room_ends_and_the_others_go_on(make: Make) -> None:
    engine = make(pages=4)
    small, large = words(1, 20), words(2, 4 * PAGE)
    handles = [engine.open(()), engine.open(())]
    results = engine.verify(
        [Work(handles[0], tuple(small), Plan(), GREEDY), Work(handles[1], tuple(large), Plan(), GREEDY)]
    )
    assert isinstance(results[0], Walk)
    assert isinstance(results[1], EngineError)
    assert "no memory is left" in str(results[1])
    engine.close(handles[1])
    assert step(engine, handles[0], [results[0].token])
    assert engine.cache.pages.in_use == 1


def test_nodes_are_left_out_where_only_they_do_not_fit(make: Make) -> None:
    engine = make(pages=1)
    text = words(1, PAGE - 2)
    token = step(engine, engine.open(()), text).token
    engine = make(pages=1)
    chain = Plan((0, 1, 2), (token, 1, 2), (-1, 0, 1))
    assert step(engine, engine.open(()), text, chain) == Walk((), token)


def test_text_beyond_the_context_ends_the_session_with_a_reason(make: Make) -> None:
    engine = make(context=100)
    handle = engine.open(())
    step(engine, handle, words(1, 100))
    error = engine.verify([Work(handle, (1,), Plan(), GREEDY)])[0]
    assert isinstance(error, EngineError)
    assert "101 tokens" in str(error)


def test_no_more_sequences_than_allowed(make: Make) -> None:
    engine = make(sequences=2)
    first = engine.open(())
    engine.open(())
    with pytest.raises(EngineError, match="all 2 sequences"):
        engine.open(())
    engine.close(first)
    engine.open(())


def test_memory_stays_flat_over_many_sessions(make: Make) -> None:
    engine = make(pages=12)
    rng = random.Random(2)
    for i in range(40):
        generate(engine, words(i, 100), Sampling(seed=i, temperature=1.0), 6, rng, nodes=5)
    assert engine.cache.pages.in_use == 0
    assert engine.cache.pages.available == 12
    held, digests = engine.cache.pages._digest, engine.cache.pages._index
    assert len(held) == len(digests) <= 12


# ---- faults


def test_nan_ends_that_session_alone_and_is_not_shared(make: Make) -> None:
    engine = make(exact=True)
    engine.decoder.weights.embedding[149] = torch.nan
    good, bad = words(1, PAGE + 9), [149, *words(2, PAGE + 9)]
    good = [t for t in good if t != 149]
    expected = step(engine, engine.open(()), good)
    handles = [engine.open(()), engine.open(())]
    works = [Work(handles[0], tuple(good), Plan(), GREEDY), Work(handles[1], tuple(bad), Plan(), GREEDY)]
    results = engine.verify(works)
    assert results[0] == expected
    assert isinstance(results[1], EngineError)
    assert "not finite" in str(results[1])
    assert engine.length(engine.open(bad)) == 0, "what it computed is not handed to others"


def test_out_of_memory_ends_the_session_whose_share_is_too_large(make: Make) -> None:
    engine = make()

    def run(rows: Rows, layout: Layout) -> torch.Tensor:
        if layout.rows > 60:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more lines")
        return engine.eager(rows, layout)

    engine.run = run
    handles = [engine.open(()) for _ in range(4)]
    sizes = (10, 30, 80, 40)
    results = engine.verify([Work(h, tuple(words(n, n)), Plan(), GREEDY) for h, n in zip(handles, sizes, strict=True)])
    assert [type(r) for r in results] == [Walk, Walk, EngineError, Walk]
    assert "too little memory for a step of 80 rows" in str(results[2])
    assert [engine.length(h) for h in handles] == [10, 30, 0, 40]


def test_other_failures_are_not_swallowed(make: Make) -> None:
    engine = make()

    def run(rows: Rows, layout: Layout) -> torch.Tensor:
        raise RuntimeError("a fault of ours")

    engine.run = run
    with pytest.raises(RuntimeError, match="a fault of ours"):
        engine.verify([Work(engine.open(()), (1,), Plan(), GREEDY)])


# ---- free width


def test_free_width_follows_the_cost_of_rows(make: Make) -> None:
    """With a clock that charges 1 s a step and 3 % of it a row beyond the first, four rows are within 10 %."""
    engine = make()
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.5 * (1 + 0.03 * (engine.timing.rows - 1)) if engine.timing.rows else 0.0
        return now

    assert free_width(measure_step_cost(engine, clock)) == 3
    assert engine.cache.pages.in_use == 0
