"""An answer outlives the process that asks for it: what the file holds, what a damaged one says, and real kills."""

import asyncio
import json
import logging
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from paceline.cloud.engines.toy import ToyEngine
from paceline.edge.held import Held, HeldError, Keeping, read_held, write_held
from paceline.edge.websocket import Address, connecting
from paceline.protocol.errors import LinkError
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling
from paceline.scripts.chaos.answers import Question
from paceline.scripts.chaos.kills import real_agent, running

FINGERPRINT = ToyEngine().vocabulary.fingerprint
HELD = Held(
    (1, 2, 3), Sampling(seed=4, temperature=0.7), 20, (5,),
    fingerprint=FINGERPRINT, tokens=(7, 8), resume="token", note="a note",
)  # fmt: skip


def test_what_is_written_is_read_and_nobody_else_may(tmp_path: Path) -> None:
    path = tmp_path / "new" / "held.json"
    assert read_held(path) is None
    write_held(path, HELD)
    assert read_held(path) == HELD
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_the_format_of_the_file_is_fixed(tmp_path: Path) -> None:
    path = tmp_path / "held.json"
    fields = {"fingerprint": FINGERPRINT, "prompt": [1, 2, 3], "sampling": {"seed": 4, "temperature": 0.7},
              "max_tokens": 20, "stop_ids": [5], "logprobs": None, "tokens": [7, 8], "resume": "token",
              "note": "a note", "grammar": "", "format": 1}  # fmt: skip
    path.write_text(json.dumps(fields))
    assert read_held(path) == HELD
    assert msgspec.to_builtins(HELD).keys() == fields.keys()


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_damaged_file_says_so(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "held.json"
    path.write_bytes(msgspec.json.encode(HELD)[:cut])
    with pytest.raises(HeldError, match="delete it"):
        read_held(path)


@pytest.mark.parametrize("change", [{"format": 2}, {"tokens": [2**40]}, {"fingerprint": "x"}, {"max_tokens": 0}])
def test_a_wrong_file_says_so(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "held.json"
    path.write_text(json.dumps(msgspec.to_builtins(HELD) | change))
    with pytest.raises(HeldError, match="delete it"):
        read_held(path)


def test_a_full_disk_leaves_the_older_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "held.json"
    write_held(path, HELD)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(HeldError, match="cannot be written"):
            write_held(path, msgspec.structs.replace(HELD, tokens=(1,)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_held(path) == HELD
    assert list(tmp_path.iterdir()) == [path]


async def test_an_answer_goes_on_without_its_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "held.json"  # no folder can be made there
    question = Question((1, 2, 3), Sampling(), 30)
    async with running(1) as [verifier], real_agent(connecting([Address(verifier.url)])) as agent:
        keeping = Keeping(agent, path, iter(range(0, 1000)).__next__, fingerprint=FINGERPRINT)
        with caplog.at_level(logging.WARNING):
            events = keeping.generate(question)
            got = [t async for event in events for t in event.tokens]
        assert got == question.answer(ToyEngine())
        assert caplog.text.count("goes on without it") == 1
        with pytest.raises(HeldError, match="another model"):
            await anext(Keeping(agent, path, float, fingerprint="0" * 64).go_on(HELD))


async def test_the_file_is_there_while_the_answer_is_unfinished(tmp_path: Path) -> None:
    path = tmp_path / "held.json"
    async with running(1) as [verifier]:
        async with real_agent(connecting([Address(verifier.url)])) as agent:
            keeping = Keeping(agent, path, iter(range(0, 10000)).__next__, fingerprint=FINGERPRINT)
            events = keeping.generate(GenerationRequest((1, 2), Sampling(), 30))
            first = await anext(events)
            held = read_held(path)
            assert held is not None
            assert held.tokens == first.tokens
            assert held.resume
            await events.aclose()  # stopped on purpose
            assert not path.exists()
            events = keeping.generate(GenerationRequest((1, 2), Sampling(), 30))
            await anext(events)
        with pytest.raises(LinkError):
            [event async for event in events]
        assert path.exists()  # lost its agent: to be gone on with


async def test_an_edge_killed_again_and_again_writes_the_same_text(tmp_path: Path) -> None:
    question = Question((1, 2, 7), Sampling(seed=7, temperature=0.9), 300)
    state = tmp_path / "held.json"
    async with running(1, "--session-ttl", "1") as [verifier]:
        command = [sys.executable, "-m", "paceline.scripts.chaos.edge", "--url", verifier.url, "--state", str(state)]
        command += ["--tokens", "300", "--seed", "7"]
        begun: list[int] = []
        for kill in (True, True, False):
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            assert process.stderr is not None
            begun.append(int((await process.stderr.readline()).split()[1]))
            if kill:
                before = read_held(state)
                while read_held(state) == before:  # noqa: ASYNC110 - another process writes it
                    await asyncio.sleep(0.02)
                process.send_signal(signal.SIGKILL)
            out, _ = await process.communicate()
        assert begun[0] == 0 < begun[1] < begun[2]
        assert json.loads(out) == question.answer(ToyEngine())
        assert not state.exists()
