"""A short run of the fuzzer on each target, and that it would notice."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from paceline.scripts.fuzz import (
    ConnectionTarget,
    Count,
    ServerTarget,
    Target,
    blindly,
    fuzz_codec,
    fuzz_session,
    join,
    seeds,
    split,
)

VECTORS = Path(__file__).parent / "vectors" / "frames.json"


@pytest.fixture
def connection() -> Iterator[ConnectionTarget]:
    target = ConnectionTarget()
    yield target
    target.close()


@pytest.mark.filterwarnings("error")
def test_a_running_server_outlives_what_comes_to_its_port() -> None:
    target = ServerTarget()
    try:
        count = Count(target)
        corpus = seeds(VECTORS)
        for seed in corpus:
            count(seed)
        blindly(count, corpus, len(corpus) + 150, seed=4)
        assert target._house.scheduler.figures.tokens > 5  # some of it was a conversation
    finally:
        target.close()


@pytest.mark.parametrize(
    ("target", "inputs"), [(fuzz_codec, 5000), (fuzz_session, 3000), (None, 1500)], ids=lambda v: ""
)
def test_nothing_crashes_hangs_or_stays(target: Target | None, inputs: int, connection: ConnectionTarget) -> None:
    count = Count(target or connection)
    blindly(count, seeds(VECTORS), inputs, seed=3)
    assert count.frames > inputs


def test_frames_are_split_as_they_were_joined() -> None:
    assert split(join([b"", b"abc", b"x" * 300])) == [b"", b"abc", b"x" * 300]
    assert split(join([b"abc"])[:-1]) == [b"ab"]  # cut short


def test_a_crash_is_noticed_and_its_input_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def crash(frames: Sequence[bytes]) -> None:
        if any(b"\xc1" in frame for frame in frames):
            raise KeyError("a mistake")

    with pytest.raises(KeyError):
        blindly(Count(crash), seeds(VECTORS), 5000, seed=3)
    assert "c1" in capsys.readouterr().err


def test_the_conversations_among_the_seeds_really_open_sessions(connection: ConnectionTarget) -> None:
    for data in seeds(VECTORS):
        connection(split(data))
    assert connection._house.scheduler.figures.tokens > 30
    assert connection._house.waiting
