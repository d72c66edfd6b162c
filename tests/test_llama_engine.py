"""The llama.cpp engine on the real model: bit for bit what one-by-one decoding gives, whatever trees it is fed."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from paceline.cloud.engine import Work
from paceline.cloud.engines import llamacpp
from paceline.cloud.engines.llamacpp import LlamaEngine
from paceline.protocol.cloud_session import Plan, Walk
from paceline.protocol.errors import EngineError
from paceline.protocol.sampling import Sampling
from plain_llama import PlainModel
from rig import shown

Rows = dict[int, npt.NDArray[np.float32]]  # absolute position of the chosen token -> the logits it was chosen from
GREEDY = Sampling()
CONTEXT = 192


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> Iterator[PlainModel]:
    model = PlainModel(smollm2_path)
    yield model
    model.close()


@pytest.fixture(scope="module")
def load(smollm2_path: Path) -> Iterator[Callable[..., LlamaEngine]]:
    """Engines by their settings, loaded once each."""
    made: dict[tuple[tuple[str, object], ...], LlamaEngine] = {}

    def get(**settings: object) -> LlamaEngine:
        key = tuple(sorted(settings.items()))
        if key not in made:
            made[key] = LlamaEngine(smollm2_path, **({"context": CONTEXT, "threads": 1} | settings))  # type: ignore[arg-type]
        return made[key]

    yield get
    for engine in made.values():
        engine.shut()


@pytest.fixture(scope="module")
def story(plain: PlainModel) -> tuple[list[int], list[int], Rows]:
    """A prompt of 24 tokens, the 60 that follow it greedily, and the logits of each of those."""
    prompt = [1, 4093, 198, *range(2000, 2021)]
    text, rows = plain.text(prompt, GREEDY, 60)
    return prompt, text, {len(prompt) + i: row for i, row in enumerate(rows)}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The logits that an engine's walks look at, by the position of the token chosen from them."""
    rows: Rows = {}

    def watch(work: Work, position: int, logits: Callable[[int], npt.NDArray[np.float32]]) -> Walk | EngineError:
        depth: dict[int, int] = {-1: 0}
        for i, parent in enumerate(work.plan.parents):
            depth[i] = depth[parent] + 1

        def look(i: int) -> npt.NDArray[np.float32]:
            rows[position + depth[i]] = logits(i).copy()
            return logits(i)

        return walk(work, position, look)

    walk = llamacpp.walk
    monkeypatch.setattr(llamacpp, "walk", watch)
    return rows


def plan(tokens: Sequence[int], parents: Sequence[int]) -> Plan:
    return Plan(tuple(range(len(tokens))), tuple(tokens), tuple(parents))


def chain(tokens: Sequence[int]) -> Plan:
    return plan(tokens, range(-1, len(tokens) - 1))


def step(engine: LlamaEngine, handle: int, sequence: list[int], tree: Plan = Plan(), s: Sampling = GREEDY) -> Walk:  # noqa: B008
    """One step of one session; `sequence` grows by what it commits."""
    work = Work(handle, tuple(sequence[engine.length(handle) :]), tree, s)
    (walk,) = engine.verify([work])
    assert isinstance(walk, Walk), walk
    sequence.extend([*(tree.tokens[i] for i in walk.accepted), walk.token])
    return walk


def equal(seen: Rows, expected: Rows) -> int:
    """How many rows were compared; every one of them has the same bits."""
    for position, row in seen.items():
        assert np.array_equal(row, expected[position]), f"position {position}"
    return len(seen)


def random_tree(rng: random.Random, right: Sequence[int], size: int) -> Plan:
    """Wrong tokens everywhere, and the right continuation somewhere: first in the batch or not, whole or in part."""
    tokens: list[int] = []
    parents: list[int] = []
    on_path, depth = -1, 0
    while len(tokens) < size:
        if rng.random() < 0.45 and depth < len(right):
            tokens.append(right[depth])
            parents.append(on_path)
            on_path, depth = len(tokens) - 1, depth + 1
        else:
            tokens.append(rng.randrange(300, 40000))
            parents.append(rng.choice([on_path, rng.randrange(-1, len(tokens) - 1) if len(tokens) > 1 else -1]))
    return plan(tokens, parents)


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_trees_have_the_bits_of_one_by_one_decoding(load, story, seen: Rows, seed: int) -> None:
    prompt, text, rows = story
    engine, rng, sequence = load(), random.Random(seed), [*prompt]
    handle = engine.open(prompt)
    accepted = 0
    while len(sequence) < len(prompt) + len(text) - 8:
        right = text[len(sequence) - len(prompt) :]
        accepted += len(step(engine, handle, sequence, random_tree(rng, right[:6], rng.randrange(0, 12))).accepted)
    engine.close(handle)
    assert sequence == (prompt + text)[: len(sequence)]
    assert equal(seen, rows) >= len(text) - 8
    assert accepted > 10


def test_a_side_branch_that_was_taken_runs_again_in_order(load, story, seen: Rows) -> None:
    prompt, text, rows = story
    engine, sequence = load(), [*prompt]
    handle = engine.open(prompt)
    walk = step(engine, handle, sequence, plan([5000, 6000, text[0], text[1]], [-1, 0, -1, 2]))
    assert walk.accepted == (2, 3)
    assert engine.length(handle) == len(prompt)  # their cells came after others: they do not stay
    step(engine, handle, sequence, chain(text[3:5]))
    assert sequence == prompt + text[:6]
    assert engine.length(handle) == len(sequence) - 1  # the likeliest chain does
    assert equal(seen, rows) == 6
    engine.close(handle)


def test_out_of_order_the_bits_differ(load, story, seen: Rows) -> None:
    """The negative control: the same trees with the ordering off."""
    prompt, text, rows = story
    engine = load(keep_order=False)
    handle, sequence = engine.open(prompt), [*prompt]
    while len(sequence) < len(prompt) + len(text) - 8 and sequence == (prompt + text)[: len(sequence)]:
        right = text[len(sequence) - len(prompt) :]
        step(engine, handle, sequence, plan([5000, 6000, *right[:2]], [-1, 0, -1, 2]))
    engine.close(handle)
    same = [np.array_equal(row, rows[position]) for position, row in seen.items() if position in rows]
    assert len(same) > 5
    assert not all(same)


def test_a_prompt_in_chunks_is_the_same_prompt(load, seen: Rows, plain: PlainModel) -> None:
    engine = load()
    prompt = [2, *range(3000, 3149)]
    handle = engine.open(prompt)
    for begin, end in ((0, 96), (96, 97), (97, 120)):
        work = Work(handle, tuple(prompt[begin:end]), Plan(), GREEDY, choose=False)
        assert engine.verify([work]) == [None]
        assert engine.length(handle) == end
    sequence = [*prompt]
    step(engine, handle, sequence)
    engine.close(handle)
    assert np.array_equal(seen[len(prompt)], plain.after(prompt)[-1])


def test_a_cached_prefix_is_reused_and_two_rollbacks_equal_a_fresh_prefill(
    load, story, seen: Rows, plain: PlainModel
) -> None:
    prompt, text, _ = story
    engine = load(slots=1)  # with room, a chat that shares less than half with an idle slot gets one of its own
    first = engine.open(prompt + text[:20])
    sequence = prompt + text[:20]
    step(engine, first, sequence, chain(text[20:24]))
    engine.close(first)
    for keep, tail in ((30, [700, 701, 702]), (20, [800, 801])):  # back, on, and back again
        tokens = sequence[:keep] + tail
        handle = engine.open(tokens)
        assert engine.length(handle) == keep
        seen.clear()
        sequence = [*tokens]
        step(engine, handle, sequence, plan([4, 5], [-1, -1]))
        assert np.array_equal(seen[len(tokens)], plain.after(tokens)[-1])
        engine.close(handle)
    same = engine.open(sequence)
    assert engine.length(same) == len(sequence) - 1  # the last token always runs: something is to be chosen after it
    engine.close(same)


def test_sessions_in_one_step_do_not_touch_each_other(load, seen: Rows, plain: PlainModel) -> None:
    engine = load(slots=3)
    prompts = [[1, 4093, 198, *range(n, n + 10 + i)] for i, n in enumerate((100, 9000, 20000))]
    texts = [plain.text(p, GREEDY, 10) for p in prompts]
    handles, sequences = [engine.open(p) for p in prompts], [[*p] for p in prompts]
    with pytest.raises(EngineError, match="all 3 sequences of this engine are in use"):
        engine.open(prompts[0])
    while len(sequences[0]) < len(prompts[0]) + 8:
        batch = []
        for handle, sequence, prompt, (text, _) in zip(handles, sequences, prompts, texts, strict=True):
            right = text[len(sequence) - len(prompt) :][:1]
            tree = plan([17, *right], [-1] * (1 + len(right)))
            batch.append(Work(handle, tuple(sequence[engine.length(handle) :]), tree, GREEDY))
        for work, walk, sequence in zip(batch, engine.verify(batch), sequences, strict=True):
            assert isinstance(walk, Walk)
            sequence.extend([*(work.plan.tokens[i] for i in walk.accepted), walk.token])
    for sequence, prompt, (text, _) in zip(sequences, prompts, texts, strict=True):
        assert sequence == (prompt + text)[: len(sequence)]
    engine.close(handles[1])
    handles[1] = engine.open(prompts[0])  # room again
    for handle in handles:
        engine.close(handle)


def test_a_full_context_ends_that_session_only(load, story) -> None:
    prompt, text, _ = story
    engine = load(context=40, slots=3)
    full, other = engine.open(prompt), engine.open(prompt)
    sequence = [*prompt]
    while len(sequence) <= 40:
        step(engine, full, sequence, chain(text[len(sequence) - len(prompt) :][: 40 - len(sequence)]))
    assert sequence == prompt + text[:17]
    rest = Work(full, tuple(sequence[engine.length(full) :]), Plan(), GREEDY)
    refused, walked = engine.verify([rest, Work(other, tuple(prompt), Plan(), GREEDY)])
    assert isinstance(refused, EngineError)
    assert "context of 40 tokens is full" in str(refused)
    assert walked == Walk((), text[0])
    engine.close(full)
    engine.close(other)
    again = engine.open(prompt)
    assert step(engine, again, [*prompt]).token == text[0]
    engine.close(again)


def test_seeded_steps_choose_by_position_not_by_shape(load, plain: PlainModel, story) -> None:
    prompt, _, _ = story
    s = Sampling(seed=7, temperature=0.9, top_k=50, top_p=0.95, min_p=0.01)
    text, _ = plain.text(prompt, s, 24)
    engine, sequence, rng = load(), [*prompt], random.Random(1)
    handle = engine.open(prompt)
    while len(sequence) < len(prompt) + 16:
        right = text[len(sequence) - len(prompt) :]
        step(engine, handle, sequence, random_tree(rng, right[:4], 6), s)
    engine.close(handle)
    assert sequence == (prompt + text)[: len(sequence)]


def test_many_steps_leave_no_cell_behind(load, story) -> None:
    """A context of 40 tokens through 70 steps with trees: one leaked cell in four steps would fill it."""
    prompt, text, _ = story
    engine = load(context=40, slots=3)
    for i in range(7):
        handle, sequence = engine.open(prompt), [*prompt]
        while len(sequence) < 35:
            step(engine, handle, sequence, plan([300 + i] * 3, range(-1, 2)))
        assert sequence == prompt + text[: len(sequence) - len(prompt)]
        engine.close(handle)


def test_the_cache_is_told_in_slots_that_sessions_hold(load) -> None:
    engine = load(context=40, slots=3)
    handles = [engine.open([1, 2]), engine.open([3, 4])]
    assert shown(engine) == {"usage_perc": 2 / 3, "used_blocks": 2, "total_blocks": 3, "block_tokens": 40}
    for handle in handles:
        engine.close(handle)
    assert shown(engine)["used_blocks"] == 0


@pytest.mark.parametrize(("name", "content", "said"), [
    ("none.gguf", None, "No such file"),
    ("text.gguf", b"hello, world", "not a GGUF file"),
    ("empty.gguf", b"", "not a GGUF file"),
    ("head.gguf", b"GGUF\x03\0\0\0", "cannot load this file; it is damaged"),
])  # fmt: skip
def test_what_is_no_model_is_refused(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(EngineError, match=said):
        LlamaEngine(tmp_path / name)


def test_a_model_cut_off_in_its_weights_is_refused(smollm2_path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with smollm2_path.open("rb") as file:
        cut.write_bytes(file.read(30_000_000))
    with pytest.raises(EngineError, match="damaged"):
        LlamaEngine(cut)


def test_costs_are_measured(load) -> None:
    engine = load()
    assert [rows for rows, _ in engine.step_cost] == list(llamacpp.PROBE_ROWS)
    assert all(seconds > 0 for _, seconds in engine.step_cost)
    assert 0 <= engine.free_width < 8
