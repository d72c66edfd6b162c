"""Text as it becomes certain: stop strings, characters spread over tokens."""

import random

from hypothesis import given
from hypothesis import strategies as st
from paceline.edge.answer import Answer, StopStrings, Token
from paceline.protocol.edge_session import Committed
from paceline.protocol.messages import Commit
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling


def slow(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text up to the stop string that is complete first, found by looking at every prefix."""
    for end in range(1, len(text) + 1):
        begins = [end - len(s) for s in stops if text[:end].endswith(s)]
        if begins:
            return text[: min(begins)], True
    return text, False


@given(st.text("abc", max_size=24), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.integers(0, 2**32))
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], seed: int) -> None:
    rng, strings, out = random.Random(seed), StopStrings(stops), ""
    expected, hit = slow(text, stops)
    rest = text
    while rest:
        n = rng.randint(1, 5)
        out += strings.feed(rest[:n])
        assert expected.startswith(out), "something was let out that had to be taken back"
        rest = rest[n:]
    if not strings.hit:
        out += strings.end()
    assert (out, strings.hit) == (expected, hit)


def test_no_more_is_held_back_than_may_become_a_stop() -> None:
    strings = StopStrings(["\n\nHuman:"])
    assert strings.feed("Yes.\n") == "Yes."
    assert strings.feed("\nHu") == ""
    assert strings.feed("m\n") == "\n\nHum"
    assert strings.end() == "\n"


def test_a_token_counts_and_is_marked_by_what_the_cloud_accepted() -> None:
    answer = Answer(None, GenerationRequest((1,), Sampling(), 9, (5,)))  # type: ignore[arg-type]
    commit = Commit(sid=1, base=0, tokens=(3, 4, 5), accepted=2)
    tokens = list(answer._tokens(Committed((4, 5), (), commit), lambda t: "x" * t))
    assert tokens == [Token(4, "xxxx", 4, True)]
    assert answer.count == 2  # the end token was written too
