"""What is ONNX Runtime's alone: agreement with llama.cpp on the same values, a cache that changes its size, what is missing."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import paceline.edge.drafts
import paceline.kernels
import pytest
from paceline.edge.candidates import candidates
from paceline.edge.draft import Candidates, Choice, Row
from paceline.edge.drafts.files import open_draft
from paceline.edge.text import Text
from paceline.protocol.errors import EngineError, PacelineError
from paceline.protocol.sampling import Sampling
from paceline.protocol.vocabulary import Vocabulary
from plain_llama import PlainModel
from small_models import write_folder

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
import onnxruntime as ort
from paceline.edge.drafts.onnx import GRAIN, KEPT, OnnxDraft
from plain_onnx import PlainOnnx

GREEDY = Choice(Sampling())
QUESTION = "Why is the sky blue? Explain it to a child in a few sentences, please."


def test_its_logits_are_llama_cpps_on_the_same_values(
    smollm2_path: Path, smollm2_draft_path: Path, smollm2_onnx_path: Path
) -> None:
    """The weights are the same numbers. Both round activations to 8 bits, each in its own way, and so are as far from each other
    as each is from unrounded ones: by a tenth of the logits' spread."""
    tokens = Text(smollm2_path).prompt([{"role": "user", "content": QUESTION}])
    llama, onnx = PlainModel(smollm2_draft_path), PlainOnnx(smollm2_onnx_path)
    theirs, ours = llama.after(tokens), onnx.after(tokens)
    llama.close()
    difference = np.sqrt(((ours - theirs) ** 2).mean(1)) / theirs.std(1)  # of each row
    assert np.median(difference) < 0.16
    best = np.sort(theirs, 1)
    clear = best[:, -1] - best[:, -2] > 1.0
    assert clear.sum() > len(tokens) // 3
    assert (ours.argmax(1) == theirs.argmax(1))[clear].all()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random draft that costs nothing to run."""
    from paceline.quant import factory
    from paceline.quant.onnx_export import export

    at = tmp_path_factory.mktemp("small")
    write_folder(at / "target", "llama2", num_key_value_heads=2)
    factory.build(at / "target", at / "d", factory.Options(quant="q4_0", rounding="plain"))
    export(at / "d", at / "onnx")
    return at / "onnx"


@pytest.fixture(scope="module")
def vocabulary(small: Path) -> Vocabulary:
    from paceline.quant.folder import read_card

    return Vocabulary(**read_card(small).target)


@pytest.fixture
def draft(small: Path, vocabulary: Vocabulary) -> Iterator[OnnxDraft]:
    made = OnnxDraft(small / "draft.onnx", vocabulary, cells=1024, threads=1)
    yield made
    made.shut()


class Walker:
    """A generation whose tree is any nodes at all: what its draft finds is compared with the model alone."""

    def __init__(self, draft: OnnxDraft, prompt: list[int]) -> None:
        self.draft, self.text, self.handle = draft, [*prompt], draft.open(prompt)
        self.nodes: dict[int, list[int]] = {}  # node -> tokens from the root to it
        self.next = 0

    def rows(self, rng: random.Random, count: int) -> list[tuple[int, Row]]:
        if not any(not path for path in self.nodes.values()):
            self.nodes[self.next] = []
            self.next += 1
            return [(self.next - 1, Row(self.handle, self.next - 1, -1, self.text[-1], len(self.text) - 1, GREEDY))]
        out = []
        for parent in rng.choices(sorted(self.nodes), k=count):
            token, node = rng.randrange(3, 150), self.next
            path = [*self.nodes[parent], token]
            out.append((node, Row(self.handle, node, parent, token, len(self.text) - 1 + len(path), GREEDY)))
            self.next += 1
        self.nodes |= {node: [*self.nodes[row.parent], row.token] for node, row in out}
        return out

    def commit(self, rng: random.Random) -> None:
        """Along a node that was run and one token more, or off the tree."""
        path = rng.choice(list(self.nodes.values())) if self.nodes and rng.random() < 0.8 else []
        tokens = [*path, rng.randrange(3, 150)]
        on = {tuple(p): n for n, p in self.nodes.items()}
        walked = [on[tuple(tokens[:i])] for i in range(1, len(tokens) + 1) if tuple(tokens[:i]) in on]
        self.nodes = {n: p[len(tokens) :] for n, p in self.nodes.items() if p[: len(tokens)] == tokens}
        self.text += tokens
        self.draft.commit(self.handle, tokens, walked, frozenset(self.nodes))


def check(found: Candidates | None, tokens: list[int], plain: PlainOnnx) -> None:
    assert found is not None
    fresh = candidates(plain.after(tokens)[-1][:150], len(tokens), GREEDY)
    np.testing.assert_allclose(found.confidence, fresh.confidence, atol=0.02)
    assert found.tokens[0] == fresh.tokens[0] or fresh.confidence[0] - fresh.confidence[1] < 0.02


@pytest.mark.parametrize("seed", range(3))
def test_any_walk_of_several_generations_holds_what_fresh_runs_give(seed: int, draft: OnnxDraft, small: Path) -> None:
    """Opened, grown, committed and closed in any order, over a cache that is made larger and smaller meanwhile."""
    rng, plain, sizes = random.Random(seed), PlainOnnx(small / "draft.onnx"), set[int]()
    walkers: list[Walker] = []
    for _ in range(60):
        if len(walkers) < 3 and rng.random() < 0.4:
            old = rng.choice(walkers).text if walkers and rng.random() < 0.5 else []
            walkers.append(Walker(draft, [*old[:100], *(rng.randrange(3, 150) for _ in range(rng.randrange(1, 60)))]))
        for walker in [w for w in walkers if rng.random() < 0.4]:
            walker.commit(rng)
        asked = [(w, node, row) for w in walkers for node, row in w.rows(rng, rng.randrange(1, 6))]
        found = draft.extend([row for *_, row in asked]).found if asked else []
        for (walker, node, _), one in list(zip(asked, found, strict=True))[:2]:
            check(one, [*walker.text, *walker.nodes[node]], plain)
        sizes.add(draft._cache.cells)
        if walkers and rng.random() < 0.1:
            draft.close(walkers.pop(rng.randrange(len(walkers))).handle)
    assert len(sizes) > 2
    for walker in walkers:
        draft.close(walker.handle)
    trunks = sum(len(g.trunk) for g in draft._generations.values())
    assert draft._cache.cells - len(draft._free) == trunks


def test_a_cache_that_was_large_once_is_small_again_and_keeps_the_last_prefix(draft: OnnxDraft, small: Path) -> None:
    rng, plain = random.Random(0), PlainOnnx(small / "draft.onnx")
    long = [rng.randrange(3, 150) for _ in range(700)]
    first = Walker(draft, long)
    draft.extend([row for _, row in first.rows(rng, 1)])
    draft.close(first.handle)
    assert draft._cache.cells >= 700
    for i in range(3):  # of 400 tokens each: the prefixes of the oldest are let go
        walker = Walker(draft, [4 + i, *long[:400]])
        draft.extend([row for _, row in walker.rows(rng, 1)])
        draft.close(walker.handle)
    kept = sum(len(g.trunk) for g in draft._generations.values())
    assert kept <= KEPT + 401
    again = Walker(draft, [6, *long[:400], 9, 9])
    ((_, row),) = again.rows(rng, 1)
    done = draft.extend([row])
    assert done.ran == 2  # the rest was kept
    check(done.found[0], again.text, plain)
    draft.close(again.handle)
    while draft._forget():
        pass
    short = Walker(draft, [5, 6, 7])
    assert draft._cache.cells <= 2 * GRAIN
    ((_, row),) = short.rows(rng, 1)
    check(draft.extend([row]).found[0], short.text, plain)


def test_a_trimmed_draft_speaks_the_targets_ids(tmp_path: Path) -> None:
    from paceline.quant import export as gguf_export
    from paceline.quant.folder import read_card, verify
    from paceline.quant.onnx_export import export

    write_trimmed(tmp_path)
    assert gguf_export.TOKEN_MAP == "paceline.token_map"
    export(tmp_path / "d", tmp_path / "onnx")
    verify(tmp_path / "onnx")
    draft = OnnxDraft(tmp_path / "onnx" / "draft.onnx", Vocabulary(**read_card(tmp_path / "onnx").target), threads=1)
    handle = draft.open([1, 140, 7])
    (found,) = draft.extend([Row(handle, 0, -1, 7, 2, GREEDY)]).found
    assert found is not None
    assert set(found.tokens.tolist()) <= set(range(0, 150, 2))
    llama = open_draft(tmp_path / "d" / "draft.gguf", draft.vocabulary, threads=1)
    handle = llama.open([1, 140, 7])
    (theirs,) = llama.extend([Row(handle, 0, -1, 7, 2, GREEDY)]).found
    assert theirs is not None
    np.testing.assert_allclose(found.confidence, theirs.confidence, atol=0.05)
    assert found.tokens[0] == theirs.tokens[0]


def write_trimmed(at: Path) -> None:
    """A draft that has a row for every second of its target's tokens."""
    import torch
    from paceline.quant import build, factory, folder
    from paceline.quant.grids import GRIDS
    from paceline.quant.target import open_target
    from paceline.quant.trim import trim

    target = open_target(write_folder(at / "target", "llama2"))
    kept = trim(target.tensor("token_embd.weight"), torch.arange(0, 150, 2))
    recipe = build.Recipe([0, 1, 2], kept, GRIDS["q4_0"], GRIDS["q8_0"])
    (at / "d").mkdir()
    factory.write_streamed(target, recipe, at / "d" / "draft.gguf", "q4_0", lambda done, total: None)
    factory.write_vocabulary(target, at / "target", at / "d")
    folder.write_card(at / "d", factory.card(target, "trimmed", {}))


def test_a_provider_that_is_not_there_is_said(small: Path, vocabulary: Vocabulary) -> None:
    path = small / "draft.onnx"
    with pytest.raises(EngineError, match="no provider 'npu'; there are cpu, cuda, tensorrt"):
        open_draft(path, vocabulary, provider="npu")
    for name, own in (("cuda", "CUDAExecutionProvider"), ("tensorrt", "TensorrtExecutionProvider")):
        if own not in ort.get_available_providers():
            with pytest.raises(EngineError, match=rf"no {name} provider \(it has .*cpu.*install onnxruntime-gpu"):
                open_draft(path, vocabulary, provider=name)


def test_a_provider_is_for_onnx_drafts_alone(smollm2_draft_path: Path, vocabulary: Vocabulary) -> None:
    with pytest.raises(PacelineError, match="--provider says what runs an ONNX draft"):
        open_draft(smollm2_draft_path, vocabulary, provider="cpu")


def test_without_onnx_runtime_it_says_what_to_install(
    small: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for package, name in ((paceline.edge.drafts, "onnx"), (paceline.kernels, "onnx_session")):
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}")
        monkeypatch.delattr(package, name)
    with pytest.raises(PacelineError, match=r"ONNX Runtime is not installed .*pip install 'paceline\[onnx\]'"):
        open_draft(small / "draft.onnx", vocabulary)


def test_what_onnx_runtime_itself_refuses_is_said(small: Path, vocabulary: Vocabulary, tmp_path: Path) -> None:
    """A file that looks like a draft and does not compute: a node reads a value that nobody writes."""
    import onnx

    model = onnx.load(small / "draft.onnx")
    next(n for n in model.graph.node if n.op_type == "Softmax").input[0] = "nothing"
    onnx.save(model, tmp_path / "draft.onnx")
    with pytest.raises(EngineError, match="ONNX Runtime cannot load it"):
        open_draft(tmp_path / "draft.onnx", vocabulary)
