"""`paceline edge` as a process: from the command line to the answer, and to its end."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

Start = Callable[..., tuple[subprocess.Popen[str], str]]
ASK = {"model": "mine", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}


@pytest.fixture
def edge(tmp_path: Path) -> Iterator[Start]:
    """Starts the command with a cache of its own; gives the process and its first line of output."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "paceline.scripts.cli", "edge", "--port", "0", "--policy", "ar", *arguments]
        command.append("--stop-with-stdin")  # so that it ends with these tests, however they end
        env = os.environ | {"PACELINE_CACHE": str(tmp_path / "cache")} | environment
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def address(line: str) -> str:
    found = re.fullmatch(r"ready at (http://127\.0\.0\.1:\d+)\n", line)
    assert found is not None, line
    return found[1]


def test_it_serves_and_ends_when_told_to(system: Any, edge: Start) -> None:
    process, line = edge("--url", system.verifier, "--name", "mine", "--client-key", "sesame")
    url = address(line)
    assert httpx.get(f"{url}/v1/models").status_code == 401
    key = {"Authorization": "Bearer sesame"}
    assert [m["id"] for m in httpx.get(f"{url}/v1/models", headers=key).json()["data"]] == ["mine"]
    answer = httpx.post(f"{url}/v1/chat/completions", headers=key, json=ASK, timeout=60).json()
    assert answer["usage"]["completion_tokens"] <= 3
    assert "Paceline" in httpx.get(url).text
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0


def test_systemd_hears_that_it_serves_that_it_goes_on_and_that_it_ends(
    system: Any, edge: Start, tmp_path: Path
) -> None:
    """As a unit of Type=notify with a watchdog is told, on a socket that stands for systemd's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.settimeout(120)
        ear.bind(str(tmp_path / "notify"))
        told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        process, line = edge("--url", system.verifier, **told)
        assert httpx.get(f"{address(line)}/version", timeout=60).status_code == 200
        heard = [ear.recv(100) for _ in range(4)]
        process.send_signal(signal.SIGTERM)
        while heard[-1] == b"WATCHDOG=1":
            heard.append(ear.recv(100))
        assert heard[0] == b"READY=1"
        assert set(heard[1:-1]) == {b"WATCHDOG=1"}
        assert heard[-1] == b"STOPPING=1"
        assert process.wait(15) == 0


def test_it_starts_while_the_verifier_it_knows_is_away(system: Any, edge: Start) -> None:
    """A device that boots before its network: up, unhealthy, and saying why."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        gone = f"ws://127.0.0.1:{taken.getsockname()[1]}"
    process, line = edge("--url", gone)
    assert line == ""
    assert process.wait(15) == 1
    assert process.stderr is not None
    assert re.fullmatch(r"paceline: ws://127.* cannot connect .*\n", process.stderr.read())
    process, line = edge("--url", system.verifier)
    assert httpx.get(f"{address(line)}/version").status_code == 200
    _rename_note(process, system.verifier, gone)
    process, line = edge("--url", gone, "--patience", "0.2", "--name", "mine")
    url = address(line)
    assert httpx.get(f"{url}/health").status_code == 503
    refused = httpx.post(f"{url}/v1/chat/completions", json=ASK)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "cloud_unreachable"


def _rename_note(process: subprocess.Popen[str], known: str, other: str) -> None:
    """What was noted of one address is what would have been noted of another, had the verifier been there before."""
    import hashlib

    environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    cache = next(e.partition(b"=")[2].decode() for e in environment if e.startswith(b"PACELINE_CACHE="))
    name = {url: hashlib.sha256(url.encode()).hexdigest()[:16] for url in (known, other)}
    folder = Path(cache) / "vocabulary"
    (folder / f"{name[known]}.last").rename(folder / f"{name[other]}.last")


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells what memory a process holds")
def test_an_idle_agent_with_the_default_draft_takes_under_250_megabytes(
    system: Any, edge: Start, smollm2_draft_path: Path
) -> None:
    process, line = edge("--url", system.verifier, "--policy", "stream", "--draft", str(smollm2_draft_path))
    address(line)
    told = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    held = {name: int(kilobytes) // 1024 for name, kilobytes in re.findall(r"^(\w+): +(\d+) kB", told, re.MULTILINE)}
    assert held["Rss"] < 250, held


def test_an_open_address_without_keys_is_pointed_out(system: Any, edge: Start) -> None:
    process, line = edge("--url", system.verifier, "--host", "0.0.0.0")
    assert line.startswith("ready at http://0.0.0.0:")
    process.send_signal(signal.SIGINT)
    assert process.wait(15) == 0
    assert process.stderr is not None
    assert "--client-key" in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "say where the verifier is"),
        (("--local", "--client-key", " "), "a client's key is empty"),
        (("--url", "http://x"), "is not a websocket address"),
    ],
)
def test_wrong_arguments_end_in_one_sentence(edge: Start, arguments: tuple[str, ...], said: str) -> None:
    process, line = edge(*arguments)
    assert line == ""
    assert process.wait(15) == 1
    assert process.stderr is not None
    text = process.stderr.read()
    assert said in text
    assert text.count("\n") == 1
