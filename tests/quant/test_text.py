"""The target's own text: written, stored, batched, counted; and the rows that a trimmed vocabulary keeps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from paceline.quant import store
from paceline.quant import text as own_text
from paceline.quant.chat import chat_of
from paceline.quant.errors import WeightsError
from paceline.quant.target import open_target
from paceline.quant.text import OwnText
from paceline.quant.trim import choose, rank_prior, special, trim
from paceline.quant.writer import openings, write


@pytest.fixture(scope="module")
def text(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> OwnText:
    folder = tmp_path_factory.mktemp("text")
    return store.text(open_target(tiny), tiny, 8, root=folder, rows=24, length=200)


def test_a_chat_is_found_by_rendering_the_template(smollm2_path: Path) -> None:
    chat, tokenize = chat_of(smollm2_path)
    assert chat.opening[-2:] == tokenize("user\n")
    assert chat.reply == tokenize("<|im_end|>\n<|im_start|>assistant\n")
    assert 2 in chat.ends


def test_the_answers_are_what_the_target_says(tiny: Path) -> None:
    """Every greedy answer token is the first of its own list; every list is in order."""
    target = open_target(tiny)
    chat, _ = chat_of(tiny)
    w = {n: target.tensor(n).bfloat16() for n in target.names()}
    rows = openings(chat, 6, 0, [[40, 41, 42]])
    for row in rows:
        row.temperature = 0.0
    written = write(target.shape, w, chat, rows, 60, seed=0)
    assert len(written)
    for i in range(len(written)):
        answer = written.conversation(i)[written.rs[i] :]
        top = written.ti[written.answer[i] : written.answer[i + 1]]
        assert np.array_equal(answer, top[:, 0])
    assert (np.diff(written.tv.astype(np.float32), axis=1) <= 0).all()


def test_text_is_kept_and_extended_on_demand(tiny: Path, tmp_path: Path) -> None:
    target = open_target(tiny)
    first = store.text(target, tiny, 1, root=tmp_path, rows=16, length=160)
    files = list(own_text.shards(store.folder(target, root=tmp_path)))
    again = store.text(target, tiny, 1, root=tmp_path, rows=16, length=160)
    assert np.array_equal(first.toks, again.toks)
    more = store.text(target, tiny, len(first) + 1, root=tmp_path, rows=16, length=160)
    assert len(more) > len(first)
    assert np.array_equal(more.toks[: len(first.toks)], first.toks)
    assert len(list(own_text.shards(store.folder(target, root=tmp_path)))) > len(files)


def test_another_target_has_another_folder(tiny: Path, other: Path, tmp_path: Path) -> None:
    assert store.folder(open_target(tiny), root=tmp_path) != store.folder(open_target(other), root=tmp_path)


def test_batches_hold_every_answer_token_once(text: OwnText) -> None:
    every = np.arange(len(text))
    groups = text.batches(every, 400, np.random.default_rng(0))
    assert sorted(i for g in groups for i in g) == every.tolist()
    batch = text.batch(groups[0])
    flat = batch.tokens.flatten()
    following = flat[batch.at + 1]  # the token after each predicting position is the answer token
    expected = np.concatenate([text.conversation(i)[text.rs[i] :] for i in groups[0]])
    assert np.array_equal(following.numpy(), expected)


def test_a_damaged_file_says_so(tmp_path: Path, text: OwnText) -> None:
    path = tmp_path / "text-0000.npz"
    own_text.save(path, text)
    assert np.array_equal(own_text.load(path).tv, text.tv)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(WeightsError, match="text-0000"):
        own_text.load(path)


def test_rows_kept_are_the_used_ones_and_the_special_ones() -> None:
    usage = np.array([0.0, 5.0, 1.0, 9.0, 1.0, 0.0])
    keep = special(["<s>", "a", "b", "c", "d", "e"], None)
    assert choose(usage, keep, 3).tolist() == [0, 1, 3]
    assert choose(usage, keep, 4).tolist() == [0, 1, 2, 3]  # of equals the lower id


def test_a_dropped_token_is_stood_for_by_the_most_similar_row() -> None:
    table = torch.tensor([[1.0, 0], [0, 1], [0.9, 0.1], [-1, 0.2]])
    cut = trim(table, torch.tensor([0, 1, 3]))
    assert cut.to_row.tolist() == [0, 1, 0, 2]
    assert cut.row_or_none(4).tolist() == [0, 1, -1, 2]


def test_an_unseen_common_token_goes_before_an_unseen_rare_one_and_a_seen_one_before_both() -> None:
    usage = np.zeros(1_000)
    usage[[800, 900]] = 500.0
    kept = choose(usage + rank_prior(1_000, float(usage.sum())), np.zeros(1_000, bool), 4)
    assert kept.tolist() == [0, 1, 800, 900]
    assert rank_prior(49_152, 1.0).sum() < 0.06
