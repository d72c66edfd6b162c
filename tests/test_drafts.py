"""The drafts on a real model: a tree grown in batches holds what fresh prefills of its paths give, and nothing leaks.

Rows in other batches round differently in llama.cpp's context (its V is in half precision), so confidences are compared,
not bits.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from paceline.edge.candidates import candidates
from paceline.edge.draft import Candidates, Choice, Row
from paceline.edge.drafts import llama_room
from paceline.edge.drafts.llama_room import FIRST_SEQUENCES, Room
from paceline.edge.drafts.llamacpp import LlamaDraft
from paceline.kernels.llama import MAX_SEQUENCES, Model
from paceline.protocol.errors import EngineError
from paceline.protocol.sampling import Sampling
from paceline.protocol.tree import State, Tree
from paceline.protocol.vocabulary import Vocabulary
from plain_llama import PlainModel

if TYPE_CHECKING:
    from paceline.edge.drafts.onnx import OnnxDraft

AnyDraft: TypeAlias = "LlamaDraft | OnnxDraft"
GREEDY = Sampling()


class Plain(Protocol):
    """The model alone, as slow and obvious as can be."""

    def after(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]: ...
    def close(self) -> None: ...


PROMPT = [1, 4093, 198, *range(2000, 2021)]


@pytest.fixture(scope="module")
def vocabulary(smollm2_path: Path) -> Vocabulary:
    model = Model(smollm2_path, vocabulary_only=True)
    found = Vocabulary.of(model.name, model.tokens())
    model.close()
    return found


@pytest.fixture(scope="module", params=["llamacpp", "onnx"])
def path(request: pytest.FixtureRequest) -> Path:
    """The default draft as a file of each kind."""
    if request.param == "onnx":
        pytest.importorskip("onnxruntime")
        return Path(request.getfixturevalue("smollm2_onnx_path"))
    return Path(request.getfixturevalue("smollm2_draft_path"))


@pytest.fixture(scope="module")
def load(path: Path, vocabulary: Vocabulary) -> Iterator[Callable[..., AnyDraft]]:
    made: list[AnyDraft] = []

    def get(cells: int = 1024) -> AnyDraft:
        made.append(opened(path, vocabulary, cells))
        return made[-1]

    yield get
    for draft in made:
        draft.shut()


def opened(path: Path, vocabulary: Vocabulary, cells: int = 1024) -> AnyDraft:
    if path.suffix == ".onnx":
        from paceline.edge.drafts.onnx import OnnxDraft

        return OnnxDraft(path, vocabulary, cells=cells, threads=1)
    return LlamaDraft(path, vocabulary, cells=cells, threads=1)


@pytest.fixture(scope="module")
def draft(load: Callable[..., AnyDraft]) -> AnyDraft:
    return load()


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[Plain]:
    model = PlainModel(path) if path.suffix == ".gguf" else _plain_onnx(path)
    yield model
    model.close()


def _plain_onnx(path: Path) -> Plain:
    from plain_onnx import PlainOnnx

    return PlainOnnx(path)


def whole(draft: AnyDraft) -> AnyDraft:
    """With all the room it may have, as llama.cpp's begins small."""
    if isinstance(draft, LlamaDraft):
        draft._room.grow([])
    return draft


def leftovers(draft: AnyDraft) -> int:
    """What is neither free nor part of a generation's text, once all generations are closed: sequence ids, or cells."""
    if isinstance(draft, LlamaDraft):
        branches = sum(len(g.paths) + len(g.placed) for g in draft._generations.values())
        return branches + draft._room.context.sequences - len(draft._room.free) - len(draft._generations)
    branches = sum(len(g.branches) + len(g.placed) for g in draft._generations.values())
    trunks = sum(len(g.trunk) for g in draft._generations.values())
    return branches + draft._cache.cells - len(draft._free) - trunks


class Grower:
    """A tree and the draft's handle for it, driven as the agent drives them."""

    def __init__(self, draft: AnyDraft, prompt: Sequence[int], sampling: Sampling = GREEDY) -> None:
        self.draft, self.text, self.choice = draft, [*prompt], Choice(sampling)
        self.handle = draft.open(prompt)
        self.tree = Tree(prompt[-1], len(prompt) - 1)
        self.found: dict[int, Candidates] = {}
        self.frontier = {self.tree.root}

    def row(self, node: int) -> Row:
        root = node == self.tree.root
        parent = -1 if root else self.tree.parent(node)
        return Row(self.handle, node, parent, self.tree.token(node), self.tree.position(node), self.choice)

    def run(self, nodes: Sequence[int], fan_out: int = 3) -> list[Candidates | None]:
        found = list(self.draft.extend([self.row(n) for n in nodes]).found)
        for node, candidate in zip(nodes, found, strict=True):
            self.frontier.discard(node)
            if candidate is not None:
                self.found[node] = candidate
                for token, confidence in zip(candidate.tokens[:fan_out], candidate.confidence, strict=False):
                    child = self.tree.add(node, int(token), float(np.log(max(confidence, 1e-9))))
                    self.frontier.add(child)
        return found

    def grow(self, batches: int, width: int, rng: random.Random) -> None:
        for _ in range(batches):
            self.run(rng.sample(sorted(self.frontier), min(width, len(self.frontier))))

    def fill(self, batches: int) -> None:
        for _ in range(batches):
            self.run(sorted(self.frontier)[-16:])

    def commit(self, tokens: Sequence[int]) -> None:
        walked = self.tree.advance(tokens)
        self.text.extend(tokens)
        self.found = {n: c for n, c in self.found.items() if self.tree.state(n) is State.LIVE}
        self.frontier = {n for n in self.frontier if self.tree.state(n) is State.LIVE}
        if self.tree.root not in self.found:
            self.frontier.add(self.tree.root)
        self.draft.commit(self.handle, tokens, walked, frozenset(self.found))

    def path(self, node: int) -> list[int]:
        return [*self.text, *(self.tree.token(n) for n in self.tree.path(node))]

    def close(self) -> None:
        self.draft.close(self.handle)


def same(found: Candidates, tokens: Sequence[int], plain: Plain) -> None:
    """`found` is what a fresh prefill of `tokens` gives, but for the last digits."""
    row = plain.after(tokens)[-1]
    fresh = candidates(row, len(tokens), Choice(GREEDY))
    assert found.tokens[0] == fresh.tokens[0] or fresh.confidence[0] - fresh.confidence[1] < 0.02
    at = {int(t): float(c) for t, c in zip(found.tokens, found.confidence, strict=True)}
    for token, confidence in zip(fresh.tokens[:4], fresh.confidence[:4], strict=True):
        assert at.get(int(token), 0.0) == pytest.approx(float(confidence), abs=0.06)


def test_a_tree_holds_what_fresh_prefills_of_its_paths_give(draft: AnyDraft, plain: Plain) -> None:
    grower = Grower(draft, PROMPT)
    grower.grow(5, 4, random.Random(0))
    assert len(grower.found) > 12
    assert max(len(grower.tree.path(n)) for n in grower.found) >= 3
    for node in random.Random(1).sample(sorted(grower.found), 8):
        same(grower.found[node], grower.path(node), plain)
    grower.close()


@pytest.mark.parametrize("seed", range(2))
def test_after_every_new_root_the_tree_still_holds(draft: AnyDraft, plain: Plain, seed: int) -> None:
    """Along the tree, off the tree, by its second choice, several tokens at once; each time it grows on."""
    rng, grower = random.Random(seed), Grower(draft, PROMPT)
    for turn in range(6):
        grower.grow(3, 4, rng)
        node, tokens = grower.tree.root, []
        for _ in range(rng.randrange(0, 3)):
            if not grower.tree.children(node):
                break
            node = rng.choice(grower.tree.children(node)[:2])
            tokens.append(grower.tree.token(node))
        if turn % 2 or not tokens:
            tokens.append(rng.randrange(300, 20000))
        grower.commit(tokens)
    grower.grow(3, 4, rng)
    if grower.tree.root not in grower.found:
        grower.run([grower.tree.root])
    for node in {grower.tree.root, *rng.sample(sorted(grower.found), 4)}:
        same(grower.found[node], grower.path(node), plain)
    grower.close()


def test_the_next_turn_finds_its_prefix(load: Callable[..., AnyDraft], plain: Plain) -> None:
    draft = load()
    first = Grower(draft, PROMPT)
    first.run([first.tree.root])
    first.commit([500, 501, 502])
    first.run([first.tree.root])
    first.close()
    second = Grower(draft, [*PROMPT, 500, 501, 502, 600, 601])
    done = draft.extend([second.row(second.tree.root)])
    assert done.ran == 2  # 600 and 601
    found = done.found[0]
    assert found is not None
    same(found, second.text, plain)
    second.close()
    third = Grower(draft, PROMPT[:10])  # back to before what is cached
    done = draft.extend([third.row(third.tree.root)])
    assert done.ran == 1
    assert done.found[0] is not None
    same(done.found[0], third.text, plain)
    third.close()


def test_generations_share_a_batch_and_nothing_else(draft: AnyDraft, plain: Plain) -> None:
    growers = [Grower(draft, [1, 4093, 198, *range(n, n + 12)]) for n in (100, 9000)]
    for grower in growers:
        grower.run([grower.tree.root])
    for _ in range(3):
        rows = [(g, n) for g in growers for n in sorted(g.frontier)[:3]]
        found = draft.extend([g.row(n) for g, n in rows]).found
        for (g, n), candidate in zip(rows, found, strict=True):
            assert candidate is not None
            g.frontier.discard(n)
            g.found[n] = candidate
            for token in candidate.tokens[:2]:
                g.frontier.add(g.tree.add(n, int(token), -0.5))
    for g in growers:
        for node in sorted(g.found)[-3:]:
            same(g.found[node], g.path(node), plain)
        g.close()


def test_when_the_sequence_ids_run_out_rows_are_left_out_and_come_back(load: Callable[..., AnyDraft]) -> None:
    draft = load(2048)
    if not isinstance(draft, LlamaDraft):
        pytest.skip("a node costs a cell alone, and a full cache is said as such")
    grower = Grower(whole(draft), PROMPT)
    grower.run([grower.tree.root], fan_out=8)
    refused = 0
    for _ in range(20):  # eight branches a node: 255 ids are soon gone
        nodes = sorted(grower.frontier)[:32]
        refused += sum(f is None for f in grower.run(nodes, fan_out=8))
        if refused:
            break
    assert refused
    grower.commit([40])  # off the tree: all of it is free again
    assert len(draft._room.free) == MAX_SEQUENCES - 1
    assert grower.run([grower.tree.root])[0] is not None
    grower.close()


@pytest.fixture
def roomy(load: Callable[..., AnyDraft]) -> LlamaDraft:
    draft = load(2048)
    if not isinstance(draft, LlamaDraft):
        pytest.skip("only llama.cpp's room begins small")
    return draft


def test_the_room_grows_when_its_sequence_ids_run_out(roomy: LlamaDraft, plain: Plain) -> None:
    """The text stays cached; the rows that found no room then do."""
    draft = roomy
    grower = Grower(draft, PROMPT)
    assert draft._room.context.sequences == FIRST_SEQUENCES
    found = grower.run([grower.tree.root], fan_out=8)
    while None not in found:
        found = grower.run(sorted(grower.frontier)[:32], fan_out=8)
    assert found[0] is not None
    token = int(grower.found[grower.tree.root].tokens[0])
    grower.commit([token])
    grower.frontier, grower.found = {grower.tree.root}, {}
    grower.draft.commit(grower.handle, [], [], frozenset())
    found = grower.run([grower.tree.root])
    assert draft._room.context.sequences == MAX_SEQUENCES
    assert found[0] is not None
    same(found[0], grower.text, plain)
    grower.close()


@pytest.fixture
def small(load: Callable[..., AnyDraft], monkeypatch: pytest.MonkeyPatch) -> LlamaDraft:
    """A draft whose first room has 512 cells, of 1024."""
    monkeypatch.setattr(llama_room, "FIRST_CELLS", 512)
    draft = load(1024)
    if not isinstance(draft, LlamaDraft):
        pytest.skip("only llama.cpp's room begins small")
    assert draft._room.context.cells == 512
    return draft


def test_the_room_grows_for_a_long_prompt_and_others_keep_their_text(small: LlamaDraft, plain: Plain) -> None:
    rng = random.Random(1)
    first = Grower(small, PROMPT)
    first.run([first.tree.root])
    long = Grower(small, [2, *rng.choices(range(300, 20000), k=300)])
    assert small._room.context.cells == 1024
    assert small.extend([long.row(long.tree.root)]).ran == 301
    again = small.extend([first.row(first.tree.root)])  # its prompt has come along: one row, not all of them
    assert again.ran == 1
    assert again.found[0] is not None
    same(again.found[0], first.text, plain)
    for grower in (first, long):
        grower.grow(2, 4, rng)
        grower.close()


def test_a_text_that_outgrows_the_small_room_is_drafted_on(small: LlamaDraft, plain: Plain) -> None:
    grower = Grower(small, PROMPT)  # asks for no more than the small room
    while small._room.context.cells < 1024:
        with suppress(EngineError):  # the step that finds the small room full
            grower.run([grower.tree.root])
        grower.commit([*range(2000, 2040)])
    found = grower.run([grower.tree.root])[0]
    assert found is not None
    assert len(grower.text) > 500
    same(found, grower.text, plain)
    grower.close()


def test_where_there_is_no_memory_for_the_whole_room_the_small_one_stays(
    small: LlamaDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    grower = Grower(small, PROMPT)
    make = Room._make

    def refuse(room: Room, cells: int, sequences: int) -> None:
        if cells == 1024:
            raise EngineError("no memory for a context of 1024 tokens")
        make(room, cells, sequences)

    monkeypatch.setattr(Room, "_make", refuse)
    small.close(small.open(range(300, 400)))  # both together would need the whole room
    with pytest.raises(EngineError, match="longer than the draft's context"):
        small.open(range(300, 700))
    assert small._room.context.cells == 512
    assert grower.run([grower.tree.root])[0] is not None
    grower.close()


def test_a_full_cache_is_said_and_everybody_goes_on_when_there_is_room(
    load: Callable[..., AnyDraft], plain: Plain
) -> None:
    draft = whole(load(320))
    hog, late = Grower(draft, PROMPT), Grower(draft, [2, *range(700, 720)])
    hog.run([hog.tree.root])
    with pytest.raises(EngineError, match="full"):
        hog.fill(64)  # of 16 rows; llama.cpp rounds the cache up to 512 cells
    for _ in range(2):
        with pytest.raises(EngineError, match="full"):
            late.run([late.tree.root])
    hog.commit([500])  # off the tree: its cells are free
    for grower in (hog, late, hog):
        found = grower.run([grower.tree.root])[0]
        assert found is not None
        same(found, grower.text, plain)
        grower.commit([int(found.tokens[0]), 700])
    hog.close()
    late.close()


def test_a_prompt_longer_than_the_cache_is_refused(load: Callable[..., AnyDraft]) -> None:
    draft = load(320)
    with pytest.raises(EngineError, match="longer than the draft's context"):
        draft.open(range(300, 400))
    grower = Grower(draft, PROMPT)
    assert grower.run([grower.tree.root])[0] is not None


def test_nothing_leaks_over_200_generations(load: Callable[..., AnyDraft]) -> None:
    """Different prompts of a cache of 1,024 cells, each with a tree and three commits; the last drafts like the first."""
    draft, rng = load(), random.Random(0)
    first = None
    for i in range(200):
        prompt = PROMPT if i in (0, 199) else [2, *rng.sample(range(300, 20000), 4)]
        grower = Grower(draft, prompt)
        root = grower.run([grower.tree.root])[0]
        assert root is not None
        first = first or root
        grower.run(sorted(grower.frontier)[:2])
        grower.commit([int(root.tokens[0]), int(root.tokens[1])])
        grower.run([grower.tree.root])
        grower.close()
    assert root is not None
    assert list(root.tokens[:3]) == list(first.tokens[:3])
    assert root.confidence[0] == pytest.approx(first.confidence[0], abs=0.02)
    assert leftovers(draft) == 0


def test_a_draft_of_another_vocabulary_is_refused_naming_both(path: Path) -> None:
    other = Vocabulary.of("Other-1B", ["a", "b", "c"])
    with pytest.raises(EngineError, match=r"(?i)smollm2.*'Other-1B'"):
        opened(path, other)
