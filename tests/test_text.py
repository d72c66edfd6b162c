"""Text to tokens and back with real vocabularies: characters come whole, a template is applied once, one begin token."""

import random
from pathlib import Path

import pytest
from paceline.edge.text import Text
from paceline.kernels.llama import Model
from paceline.protocol.errors import PacelineError

ODD = "naïve café — 🦜🏴‍☠️ 漢字 ελληνικά नमस्ते \u202eعربى\u202c ąęł 👩‍👩‍👧 ﷽ \U0001f9ff"


@pytest.fixture(scope="module")
def text(smollm2_path: Path) -> Text:
    return Text(smollm2_path)


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Model:
    return Model(smollm2_path, vocabulary_only=True)


@pytest.mark.parametrize("seed", range(20))
def test_streamed_text_never_cuts_a_character(text: Text, seed: int) -> None:
    """Token by token and in random groups, as commits bring them: no piece holds half a character, all is there."""
    rng = random.Random(seed)
    whole = "".join(rng.sample(ODD, len(ODD))) + ODD
    ids = text.plain(whole)
    decoder, pieces, i = text.decoder(), [], 0
    while i < len(ids):
        n = rng.randrange(1, 4)
        pieces.append(decoder.feed(ids[i : i + n]))
        i += n
    pieces.append(decoder.end())
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces)


def test_characters_really_are_spread_over_tokens(text: Text) -> None:
    """Or the test above could not fail."""
    ids = text.plain("🦜")
    assert len(ids) > 1
    decoder = text.decoder()
    assert [decoder.feed([t]) for t in ids] == [""] * (len(ids) - 1) + ["🦜"]
    assert "\ufffd" in "".join(text.decode([t]) for t in ids)


def test_a_character_that_is_never_finished_shows_as_one_sign(text: Text) -> None:
    ids = text.plain("ok 🦜")[:-1]
    decoder = text.decoder()
    assert decoder.feed(ids) == "ok "
    assert decoder.end() == "\ufffd"


def test_tokens_no_text_can_end_with_are_held_back_not_lost(text: Text) -> None:
    decoder = text.decoder()
    half, rest = text.plain("🦜")[:1], text.plain("x")
    assert decoder.feed(half) == ""
    assert decoder.feed(rest) == "\ufffdx"


def test_the_template_is_applied_once(text: Text, model: Model) -> None:
    ids = text.prompt([{"role": "user", "content": "hello"}])
    start, end = model.tokenize("<|im_start|>")[0], model.tokenize("<|im_end|>")[0]
    assert ids.count(start) == 3  # system, user, assistant
    assert ids.count(end) == 2
    shown = b"".join(model.piece(t, special=True) for t in ids).decode()
    assert shown.count("hello") == 1
    assert shown.endswith("<|im_start|>assistant\n")


def test_turns_begin_with_the_turns_before_them(text: Text) -> None:
    """What a cache can reuse."""
    turns = [{"role": "user", "content": "one"}]
    first = text.prompt(turns)
    second = text.prompt([*turns, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}])
    assert second[: len(first)] == first


def test_control_tokens_have_no_text_and_bare_text_has_no_control_tokens(text: Text, model: Model) -> None:
    end = model.tokenize("<|im_end|>")[0]
    assert end in text.end_tokens
    assert text.decode([*text.plain("yes"), end]) == "yes"
    assert end not in text.plain("<|im_end|>")
    assert text.decode(text.plain("<|im_end|>")) == "<|im_end|>"


@pytest.mark.parametrize(("adds", "rendered", "expected"), [
    (True, [7, 8], [1, 7, 8]), (True, [1, 7], [1, 7]), (True, [], [1]), (False, [7], [7]), (False, [1, 7], [1, 7]),
])  # fmt: skip
def test_exactly_one_begin_token(
    text: Text, monkeypatch: pytest.MonkeyPatch, adds: bool, rendered: list[int], expected: list[int]
) -> None:
    """For every kind of model: one that wants it and whose template writes it, or does not, and one that wants none."""

    class Wanting:
        adds_bos, bos = adds, 1

    monkeypatch.setattr(text, "_model", Wanting())
    assert text._begin(rendered, "") == expected


def test_a_template_that_refuses_is_an_error_for_a_person(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_template", "{{ raise_exception('Only user and\n  assistant') }}")
    with pytest.raises(PacelineError, match="does not take this conversation: Only user and assistant"):
        text.prompt([{"role": "user", "content": "x"}])


def test_a_template_cannot_reach_the_machine(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_template", "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(PacelineError):
        text.prompt([{"role": "user", "content": "x"}])


def test_without_a_template_the_text_stands_as_it_is(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_template", None)
    assert text.decode(text.prompt([{"role": "user", "content": "as it is"}])) == "as it is"
