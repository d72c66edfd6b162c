"""The commands given what they cannot work with: one clear line on standard error, exit code 1, nothing lost.

In-process where that shows the same as a process would; as real processes where one of them has to die.
"""

import http.server
import os
import pty
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from paceline.scripts.cli import app
from typer.testing import CliRunner

CLI = [sys.executable, "-m", "paceline.scripts.cli"]


def fails(*arguments: str, stdin: str = "") -> str:
    """The one line that the command says as it fails."""
    done = CliRunner().invoke(app, list(arguments), input=stdin)
    assert done.exit_code == 1, (done.output, done.exception)
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("Fetching the model")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("paceline: ")
    return lines[0].removeprefix("paceline: ")


@contextmanager
def cloud(*arguments: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A verifier in a process of its own, and its address."""
    command = [*CLI, "cloud", "--port", str(port), "--threads", "1", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready at "), process.stderr.read() if process.stderr else ""
        yield process, line.removeprefix("ready at ").strip()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def toy_url() -> Iterator[str]:
    with cloud("--engine", "toy") as (_, url):
        yield url


@pytest.fixture(scope="module")
def real_url(smollm2_path: Path) -> Iterator[str]:
    with cloud("--model", str(smollm2_path), "--context", "128", "--slots", "2") as (_, url):
        yield url


@pytest.fixture
def other_server() -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def babbling_port() -> Iterator[int]:
    """Something that is no HTTP at all."""
    listener = socket.create_server(("127.0.0.1", 0))

    def babble() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.recv(1000)
            connection.sendall(b"220 smtp.example.org ESMTP\r\n")
            connection.close()

    threading.Thread(target=babble, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


# ---- nobody there, or somebody else


def test_no_cloud() -> None:
    said = fails("chat", "--url", f"ws://127.0.0.1:{free_port()}", "-p", "hello", "--policy", "ar")
    assert "cannot connect" in said
    assert "paceline cloud" in said


def test_a_server_that_is_no_verifier(other_server: int) -> None:
    said = fails("chat", "--url", f"ws://127.0.0.1:{other_server}", "-p", "hello", "--policy", "ar")
    assert "not a Paceline verifier" in said


def test_a_port_that_speaks_no_http(babbling_port: int) -> None:
    said = fails("chat", "--url", f"ws://127.0.0.1:{babbling_port}", "-p", "hello", "--policy", "ar")
    assert "not a Paceline verifier" in said or "cannot connect" in said


def test_a_verifier_without_a_vocabulary_to_give(toy_url: str) -> None:
    assert toy_url.startswith("ws://127.0.0.1:")
    assert "verifier" in fails("chat", "--url", toy_url, "-p", "hello", "--policy", "ar")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:8765", "ws://", "ws://127.0.0.1:notaport"])
def test_no_address(url: str) -> None:
    assert "address" in fails("chat", "--url", url, "-p", "hello", "--policy", "ar") or "port" in url


def test_neither_or_both_addresses() -> None:
    assert "--local" in fails("chat", "-p", "hello")
    assert "--local" in fails("chat", "-p", "hello", "--local", "--url", "ws://127.0.0.1:1")


def test_a_port_in_use(toy_url: str) -> None:
    port = toy_url.rsplit(":", 1)[1]
    said = fails("cloud", "--engine", "toy", "--port", port)
    assert f"127.0.0.1:{port}" in said
    assert "--port" in said


def test_a_host_that_is_not_here() -> None:
    assert "cannot listen on 192.0.2.1" in fails("cloud", "--engine", "toy", "--host", "192.0.2.1", "--port", "0")


# ---- wrong words


@pytest.mark.parametrize(("option", "value", "named"), [
    ("--temperature", "-1", "temperature"), ("--temperature", "nan", "temperature"), ("--top-p", "0", "top_p"),
    ("--top-p", "1.5", "top_p"), ("--top-k", "-3", "top_k"), ("--min-p", "2", "min_p"),
    ("--repetition-penalty", "0", "repetition_penalty"), ("--seed", "-1", "seed"),
    ("--policy", "fastest", "fastest"),
])  # fmt: skip
@pytest.mark.parametrize("command", [("chat", "--local"), ("demo",)], ids=lambda c: c[0])
def test_settings_out_of_range(command: tuple[str, ...], option: str, value: str, named: str) -> None:
    assert named in fails(*command, "-p", "hello", option, value)


@pytest.mark.parametrize("prompt", ["", "  \n\t "])
def test_an_empty_prompt(prompt: str) -> None:
    assert fails("chat", "--local", "-p", prompt) == "the prompt is empty"
    assert fails("chat", "--local", stdin=prompt) == "the prompt is empty"
    assert fails("demo", "-p", prompt) == "the prompt is empty"


def test_names_that_stand_for_nothing() -> None:
    assert "Did you mean smollm2?" in fails("cloud", "--model", "smolm2")
    assert "no pair" in fails("chat", "--local", "--pair", "none", "-p", "hello")
    assert "engine 'nosuch' is not known" in fails("cloud", "--engine", "nosuch", "--model", "smollm2")
    assert "--draft go together" in fails("demo", "-p", "hello", "--target", "smollm2")


def test_numbers_that_are_none() -> None:
    assert "whole numbers above 0" in fails("bench", "load", "--sessions", "x")
    assert "whole numbers above 0" in fails("bench", "fleet", "--prompts", "x", "--verifiers", "1,0")
    assert "whole numbers above 0" in fails("bench", "drafts", "x", "--rows", "1,,4")
    assert "at least one is honest" in fails("bench", "load", "--sessions", "64,4", "--liars", "4")


# ---- wrong files


@pytest.mark.parametrize("size", [0, 3, 24, 5_000, 30_000_000])
def test_a_corrupt_model(smollm2_path: Path, tmp_path: Path, size: int) -> None:
    """In processes: llama.cpp aborts on some broken files, and that too must reach a person as a sentence."""
    broken = tmp_path / "broken.gguf"
    with smollm2_path.open("rb") as file:
        broken.write_bytes(file.read(size))
    done = subprocess.run(
        [*CLI, "cloud", "--model", str(broken), "--port", "0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "broken.gguf" in done.stderr
    assert done.stderr.startswith("paceline: ")
    assert done.stderr.count("\n") == 1
    said = fails("chat", "--local", "-p", "hello", "--target", str(broken), "--draft", str(smollm2_path))
    assert "broken.gguf" in said


def test_a_draft_of_another_tokenizer(smollm2_path: Path, tmp_path: Path, real_url: str) -> None:
    """The same weights with one token spelt otherwise: ids would not mean the same text."""
    data = smollm2_path.read_bytes()
    other = tmp_path / "other.gguf"
    at = data.index(" chemistry".replace(" ", "Ġ").encode())
    other.write_bytes(data[: at + 2] + b"q" + data[at + 3 :])
    said = fails("chat", "--url", real_url, "-p", "hello", "--draft", str(other))
    assert "other.gguf" in said
    assert "another vocabulary" in said


def test_a_prompt_longer_than_the_context(real_url: str) -> None:
    said = fails("chat", "--url", real_url, "-p", "word " * 300, "--policy", "ar")
    assert re.search(r"the prompt has 3\d\d tokens; the model's context here is 128", said)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
    for arguments in (("chat", "--local", "-p", "hello"), ("demo", "-p", "hello"), ("models", "fetch", "smollm2")):
        assert "Cannot write to" in fails(*arguments)


def limited(*arguments: str, cache: Path, blocks: int = 0) -> subprocess.CompletedProcess[str]:
    """A command that may write no file beyond so many blocks of 1 KB: what a full disk looks like."""
    command = ["sh", "-c", f'ulimit -f {blocks}; exec "$0" "$@"', *CLI, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PACELINE_CACHE": str(cache)}, check=False
    )


def test_a_full_cache_folder(smollm2_path: Path, tmp_path: Path, real_url: str) -> None:
    done = limited("chat", "--url", real_url, "-p", "hello", "--policy", "ar", cache=tmp_path / "a")
    assert done.returncode == 1
    assert re.fullmatch(r"paceline: cannot keep the vocabulary in .*\n", done.stderr), done.stderr
    assert not list((tmp_path / "a" / "vocabulary").iterdir())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / smollm2_path.name).symlink_to(smollm2_path)
    done = limited("chat", "--local", "-p", "hello", cache=tmp_path / "b")
    assert done.returncode == 1
    assert "disk is full" in done.stderr.splitlines()[-1], done.stderr


def test_a_cache_that_fills_up_meanwhile_costs_no_answer(
    smollm2_path: Path, smollm2_draft_path: Path, tmp_path: Path, real_url: str
) -> None:
    """The vocabulary is there; what is learned on the way cannot be kept."""
    first = ["chat", "--url", real_url, "-p", "hello", "--draft", str(smollm2_draft_path), "--max-tokens", "8"]
    env = os.environ | {"PACELINE_CACHE": str(tmp_path)}
    done = subprocess.run([*CLI, *first], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "predictor").iterdir())
    for path in (tmp_path / "predictor").iterdir():
        path.unlink()
    again = limited(*first, cache=tmp_path)
    assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr


# ---- the link is cut


def first_bytes(process: subprocess.Popen[str], seconds: float = 60) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], seconds)[0], "nothing came"
    return os.read(process.stdout.fileno(), 4096).decode()


def asking(url: str) -> subprocess.Popen[str]:
    command = [*CLI, "chat", "--url", url, "-p", "Count from one to thirty.", "--policy", "ar", "--max-tokens", "60"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_verifier_that_dies_for_good(smollm2_path: Path) -> None:
    with cloud("--model", str(smollm2_path), "--context", "256", "--verify-floor", "0.1") as (process, url):
        chat = asking(url)
        began = first_bytes(chat)
        process.kill()
        rest, said = chat.communicate(timeout=120)
    assert chat.returncode == 1
    assert began.strip()
    assert (began + rest).endswith("\n")
    assert re.fullmatch(r"(\[resuming: .*\]\n)?paceline: ws://.*cannot connect.*\n", said), said


def test_a_verifier_that_comes_back_goes_on_with_the_same_text(smollm2_path: Path) -> None:
    settings = ("--model", str(smollm2_path), "--context", "256")
    with cloud(*settings) as (_, url):
        whole, _ = asking(url).communicate(timeout=120)
    port = free_port()
    with cloud(*settings, "--verify-floor", "0.05", port=port) as (process, url):
        chat = asking(url)
        began = first_bytes(chat)
        process.kill()
        process.wait()
        with cloud(*settings, port=port):
            rest, said = chat.communicate(timeout=120)
    assert chat.returncode == 0, said
    assert began + rest == whole  # byte for byte: what is said of the link goes elsewhere
    assert re.fullmatch(r"(\[resuming: .*\]\n\[connected again\]\n)?", said), said


# ---- at a terminal


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(smollm2_path: Path, smollm2_draft_path: Path) -> None:
    """On a real terminal with a verifier of its own, which the terminal's Ctrl-C must not reach."""
    mine, theirs = pty.openpty()
    pair = ["--target", str(smollm2_path), "--draft", str(smollm2_draft_path), "--threads", "1"]
    command = [*CLI, "chat", "--local", *pair, "--verify-floor", "0.05", "--max-tokens", "300"]
    take_terminal = (
        "import os, sys, fcntl, termios\nos.setsid()\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", take_terminal, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(theirs)
    shown = ""

    def until(pattern: str, seconds: float = 120) -> None:
        nonlocal shown
        end = time.monotonic() + seconds
        while not re.search(pattern, shown):
            left = end - time.monotonic()
            assert left > 0, f"{pattern!r} was not shown: {shown!r}"
            if select.select([mine], [], [], min(left, 1))[0]:
                new = os.read(mine, 4096).decode(errors="replace")
                shown += new
                if "\x1b[6n" in new:  # the input line asks where the cursor is
                    os.write(mine, b"\x1b[1;1R")

    try:
        until(">>>")
        shown = ""
        os.write(mine, b"Tell me a long story about a dragon.\r")
        until(r"[a-z ,.]{8}[^\x1b]{20}\Z")  # the answer comes as bare text; the input line is full of escapes
        os.write(mine, b"\x03")
        until(r"\[stopped\]")
        shown = ""
        until(">>>")
        os.write(mine, b"What is the capital of France?\r")
        until("Paris")
        os.write(mine, b"\x03")
        until(r"\[stopped\][\s\S]*>>>|Paris[\s\S]*>>>")
        os.write(mine, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(mine)
