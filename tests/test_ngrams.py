"""What a target is known to write: counted right, found by the longest context, believed as often as it is right."""

import random
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from paceline.cloud.backup import Ngram
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.serve import check_engine, load_backup
from paceline.cloud.settings import Settings
from paceline.protocol.errors import PacelineError
from paceline.protocol.guesses import Guesses
from paceline.protocol.ngrams import IDEAS, SIZES, Gram, Ngrams, Trust
from paceline.protocol.sampling import Sampling
from paceline.protocol.vocabulary import Vocabulary
from paceline.quant import shipped
from paceline.quant.errors import RecipeError
from paceline.quant.ngrams import LEAST, counted
from paceline.scripts.pairs import ngrams_of

TEXTS = [[1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4], [7, 2, 3, 4, 9]]


def test_followers_of_the_longest_context_come_first() -> None:
    table = counted(TEXTS, "v")
    assert [(token, size) for token, size, _ in table.after([1, 2, 3])] == [(4, 3), (5, 3)]
    assert [(token, size) for token, size, _ in table.after([8, 2, 3])] == [(4, 2), (5, 2)]
    assert table.after([3])[0] == (4, 1, pytest.approx(3 / 5, abs=1 / 255))  # three times of four, and once unseen
    assert table.after([99]) == table.after([]) == ()


def test_the_table_is_what_counting_says() -> None:
    rng = random.Random(2)
    texts = [[rng.randrange(6) for _ in range(40)] for _ in range(5)]
    table = counted(texts, "v")
    for _ in range(200):
        end = [rng.randrange(6) for _ in range(rng.randrange(1, 5))]
        wanted = list[int]()
        for size in SIZES:
            after = Counter(
                t[i] for t in texts for i in range(size, len(t)) if len(end) >= size and t[i - size : i] == end[-size:]
            )
            if after.total() >= LEAST[size]:
                ranked = sorted(after, key=lambda token: (-after[token], token))[:IDEAS]
                wanted += [token for token in ranked if token not in wanted]
        assert [token for token, _, _ in table.after(end)] == wanted[:IDEAS]


def test_a_table_comes_back_from_its_file_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path, table = tmp_path / "t.npz", counted(TEXTS, "v")
    table.save(path)
    assert Ngrams.load(path).vocabulary == "v"
    assert Ngrams.load(path).after([1, 2, 3]) == table.after([1, 2, 3])
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"PK nothing", whole[:300] + bytes(40) + whole[340:]):
        path.write_bytes(damaged)
        with pytest.raises(PacelineError, match="not a usable table of n-grams"):
            Ngrams.load(path)
    good = table.grams[1]
    for gram in (
        Gram(good.keys[::-1].copy(), good.tokens, good.shares),
        Gram(good.keys, good.tokens[:-1], good.shares),
        Gram(good.keys, good.tokens.astype(np.float64), good.shares),
    ):
        Ngrams(table.grams | {1: gram}, "v").save(path)
        with pytest.raises(PacelineError, match="contradict"):
            Ngrams.load(path)


def test_a_table_is_held_against_the_vocabulary(tmp_path: Path) -> None:
    table = counted(TEXTS, "v")
    table.check(Vocabulary("words", 10, "v"))
    with pytest.raises(PacelineError, match="of another vocabulary than words"):
        table.check(Vocabulary("words", 10, "w"))
    with pytest.raises(PacelineError, match="names token 9; words has 9"):
        table.check(Vocabulary("words", 9, "v"))
    vast = tmp_path / "vast.npz"
    np.savez_compressed(vast, keys1=np.zeros(1 << 26, np.int64))  # a small file that unpacks to half a gigabyte
    with pytest.raises(PacelineError, match="unpacks to more"):
        Ngrams.load(vast)


def test_tokens_too_large_for_a_key_are_refused() -> None:
    with pytest.raises(RecipeError, match="2,097,151"):
        counted([[1, 1 << 21]], "v")


def test_a_table_is_believed_as_often_as_it_is_right() -> None:
    always, never = Trust(), Trust()
    ideas = [(5, 2, 0.8), (6, 2, 0.1)]
    for _ in range(400):
        always.learn(ideas, 5)
        never.learn(ideas, 7)
    assert always.chance(ideas[0]) > 0.85 > 0.4 > always.chance(ideas[1]) > 0.05
    assert 0 < never.chance(ideas[0]) < 0.1
    assert never.chance((5, 3, 0.8)) == pytest.approx(0.48)  # of longer contexts nothing was learnt


def test_guesses_take_what_the_text_repeats_and_what_is_known_together() -> None:
    guesses = Guesses([1, 2, 9], counted(TEXTS, "v"))
    assert guesses.after([1, 2])[0][0] in (3, 9)  # known to go on with 3; went on with 9 before
    assert {token for token, _ in guesses.after([1, 2])} == {3, 9}
    chances = [chance for _, chance in guesses.after([2, 3])]
    assert chances == sorted(chances, reverse=True)
    before = dict(guesses.after([2]))[3]
    guesses.extend([2, 3] * 30)
    assert dict(guesses.after([2]))[3] > before
    assert guesses.repeat([2], 3) == guesses.repeat([2], 1)
    assert Guesses([1, 2, 9]).after([5]) == []


def test_a_verifiers_backup_asks_the_table_where_the_text_repeats_nothing() -> None:
    backup = Ngram(counted(TEXTS, "v"))
    assert backup.begin([50, 51, 1, 2, 3], Sampling(), None).after(())[0][0] == 4
    repeated = [token for token, _ in backup.begin([1, 2, 3, 8, 1, 2, 3], Sampling(), None).after(())]
    assert repeated == [8, 4, 5]  # its own text goes first
    assert Ngram().begin([50, 51, 1, 2, 3], Sampling(), None).after(()) == []


def test_the_shipped_table_is_found_by_what_its_tokens_mean(tmp_path: Path) -> None:
    fingerprint = shipped.card("default").target["fingerprint"]
    table = ngrams_of(fingerprint)
    assert table is not None
    assert len(table) > 50_000
    assert table.vocabulary == fingerprint
    assert ngrams_of("another") is None
    counted(TEXTS, "another").save(tmp_path / shipped.NGRAMS)
    beside = ngrams_of("another", tmp_path / "draft.gguf")
    assert beside is not None
    assert beside.after([1, 2, 3])[0][0] == 4
    with pytest.raises(PacelineError, match="another vocabulary"):
        ngrams_of(fingerprint, tmp_path / "draft.gguf")


def test_a_verifier_takes_a_table_of_its_own_targets(tmp_path: Path) -> None:
    made = tmp_path / "made.npz"
    toy = ToyEngine()
    counted(TEXTS, toy.vocabulary.fingerprint).save(made)
    settings = Settings(engine="toy", backup="ngram", ngrams=made)
    [top_up] = load_backup(settings, toy, lambda: tmp_path, partial(ngrams_of, given=settings.ngrams))
    assert top_up.backup.begin([1, 2, 3], Sampling(), None).after(())[0][0] == 4
    with pytest.raises(PacelineError, match="another vocabulary than the target"):
        ngrams_of("other", given=made)
    with pytest.raises(PacelineError, match=f"{shipped.NGRAMS} is not a usable table"):
        ngrams_of("other", given=tmp_path)  # a folder without one
    for backup in ("none", "draft"):
        with pytest.raises(PacelineError, match="--ngrams is for --backup ngram or both"):
            check_engine(Settings(engine="toy", backup=backup, ngrams=made))


def test_a_target_without_a_table_is_said_to_have_none(caplog: pytest.LogCaptureFixture) -> None:
    [top_up] = load_backup(Settings(engine="toy", backup="ngram"), ToyEngine(), lambda: Path(), ngrams_of)
    assert "`paceline draft ngrams` makes a table" in caplog.text
    assert top_up.backup.begin([5, 1, 2, 9, 1, 2], Sampling(), None).after(())[0][0] == 9  # repeats all the same
