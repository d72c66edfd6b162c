"""Whole transcripts of the chat, through a pseudo-terminal, against a running verifier."""

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

STORY = "Tell me a long story about a lighthouse keeper."
CTRL_C, CTRL_D = "\x03", "\x04"
Start = Callable[..., Any]


def piped(system: Any, *arguments: str, question: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline.scripts.cli", "chat", "--url", system.verifier, *arguments]
    return subprocess.run(command, input=question, capture_output=True, text=True, timeout=120, check=False)


def test_a_conversation(system: Any, terminal: Start, tmp_path: Path) -> None:
    t = terminal("chat", "--url", system.verifier, "--policy", "ar", "--max-tokens", "300", "--seed", "5")
    t.prompt()
    # tab completion; a command that is none; parameters with their ranges
    t.type("/set par\ttemp\t0\r")
    t.expect(r"\[temperature is 0\]")
    t.prompt()
    t.type("/set parameter top_p 7\r")
    t.expect("top_p")
    t.prompt()
    t.type("/nonsense\r")
    t.expect(r"there is no command /nonsense; /\? lists them")
    t.prompt()
    # Ctrl-C at the prompt clears the line, and Ctrl-C in an answer keeps what there is of it
    t.type("never asked" + CTRL_C)
    t.prompt()
    t.type(STORY + "\r")
    t.expect("lighthouse keeper is")
    t.type(CTRL_C)
    t.expect(r"\[stopped\]")
    assert system.waits_for(lambda: len(system.scheduler) == 0, 1.0)
    t.prompt()
    t.type("/show\r")
    t.expect(r"temperature +0\b.*messages +2\b.*link +plain, round trip")
    t.prompt()
    t.type("/save mine\r")
    t.expect(r"\[saved to ")
    kept = json.loads((tmp_path / "data/conversations/mine.json").read_text())
    assert [turn["role"] for turn in kept["turns"]] == ["user", "assistant"]
    assert kept["turns"][0]["content"] == STORY
    assert "lighthouse keeper is" in kept["turns"][1]["content"]
    t.prompt()
    # several lines, forgetting, going on with what was saved
    t.type("/set parameter max_tokens 4\r")
    t.prompt()
    t.type("/clear\r")
    t.expect("forgotten")
    t.prompt()
    t.type('"""First line\r')
    t.expect(r"\.\.\.")
    t.type('second line"""\r')
    t.prompt()
    t.type(f"/save {tmp_path}/two.json\r")
    t.expect(r"\[saved to ")
    assert json.loads((tmp_path / "two.json").read_text())["turns"][0]["content"] == "First line\nsecond line"
    t.prompt()
    t.type("/load mi\t\r")
    t.expect(r"\[2 messages")
    t.prompt()
    t.type("/load nothing\r")
    t.expect("cannot read .*No such file")
    t.prompt()
    t.type("/stats\r")
    t.expect(r"\[\d+ tokens, [\d.]+ tokens/s, plain [\d.]+ tokens/s, hit rate \d+%.*round trip \d+ ms.*link plain\]")
    t.prompt()
    t.type(CTRL_D)
    assert t.ends() == 0


def test_files_regeneration_and_leaving(system: Any, terminal: Start, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("The code word is heliotrope.\n")
    (tmp_path / "picture.bin").write_bytes(b"\xff\xd8\xff\x00")
    t = terminal("chat", "--url", system.verifier, "--policy", "ar", "--max-tokens", "12", "--seed", "5",
                 "--temperature", "1.5", "--system", "Be brief.", "--stats")  # fmt: skip
    t.prompt()
    t.type("/regen\r")
    t.expect("there is no question to answer again")
    t.prompt()
    t.type(f"/read {tmp_path}/picture.bin\r")
    t.expect("not a text file")
    t.prompt()
    t.type(f"/read {tmp_path}/note.txt\r")
    t.expect(r"\[note.txt: \d+ tokens")
    t.prompt()
    t.type("What is the code word?\r")
    t.expect("seed 5")
    t.prompt()
    t.type(f"/save {tmp_path}/a.json\r")
    t.prompt()
    t.type("/regen\r")
    t.expect("seed 6")
    t.prompt()
    t.type(f"/save {tmp_path}/b.json\r")
    t.prompt()
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert a["turns"][0] == b["turns"][0] == {
        "role": "user", "content": "The code word is heliotrope.\n\n\nWhat is the code word?"
    }  # fmt: skip
    assert a["system"] == "Be brief."
    assert len(a["turns"]) == len(b["turns"]) == 2
    assert a["turns"][1] != b["turns"][1]
    t.type("\x1b[A\x1b[A\x1b[A\x1b[A")  # back in the history, to the question
    t.expect("What is the code word")
    t.type(CTRL_C)
    t.prompt()
    t.type("/bye\r")
    assert t.ends() == 0


def test_a_paste_of_several_lines_is_one_question(system: Any, terminal: Start, tmp_path: Path) -> None:
    t = terminal("chat", "--url", system.verifier, "--policy", "ar", "--max-tokens", "2")
    t.prompt()
    t.type("\x1b[200~one\ntwo\nthree\x1b[201~")
    t.type("\r")
    t.prompt()
    t.type(f"/save {tmp_path}/pasted.json\r")
    t.expect(r"\[saved to ")
    assert json.loads((tmp_path / "pasted.json").read_text())["turns"][0]["content"] == "one\ntwo\nthree"


def test_piped_output_is_the_text_alone(system: Any) -> None:
    done = piped(
        system, "--policy", "ar", "--max-tokens", "16", "--color", "--optimistic", question="Name three colours."
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert done.stdout.count("\n") >= 1
    assert done.stderr == ""


def without_styles(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")


def answer_of(t: Any) -> str:
    """What an answer to `-p` left on the screen."""
    assert t.ends(60) == 0
    return "\n".join(t.lines).strip()


def test_drafted_tokens_are_marked_and_nothing_else_changes(system: Any, terminal: Start) -> None:
    asked = ("chat", "--url", system.verifier, "--max-tokens", "30", "-p", STORY, "--color")
    marked = terminal(*asked)
    bare = terminal(*asked, NO_COLOR="1")
    assert answer_of(marked) == answer_of(bare)
    assert "\x1b[36m" not in bare.raw
    assert without_styles(marked.raw) == without_styles(bare.raw)


def test_guesses_are_dimmed_and_corrected(system: Any, terminal: Start) -> None:
    """The screen ends up as without them, and every guess stayed on its line; how many come is the planner's business."""
    asked = ("chat", "--url", system.verifier, "--max-tokens", "40", "-p", STORY)
    guessed, plain = terminal(*asked, "--optimistic"), terminal(*asked)
    assert answer_of(guessed) == answer_of(plain), repr(guessed.raw)
    guesses = re.findall(r"\x1b\[2m(.*?)\x1b\[0m\x1b\[(\d+)D", guessed.raw, re.DOTALL)
    assert all("\n" not in text and 0 < int(back) < 100 for text, back in guesses)
    assert "\x1b[2m" not in plain.raw


def test_the_draft_answers_alone_and_says_so_on_every_line(terminal: Start, smollm2_draft_path: Path) -> None:
    t = terminal("chat", "--url", "ws://127.0.0.1:9", "--offline", "draft", "--max-tokens", "96", "--temperature", "0",
                 "-p", "Write a poem of four short lines.")  # fmt: skip
    assert t.ends() == 0
    head, *lines = without_styles(t.raw).strip().split("\n")
    assert head == "[offline: the draft answers alone, and this is not the target's text]"
    assert len(lines) >= 2
    assert all(line.startswith("draft|") for line in lines), lines


def test_without_a_verifier_the_reason_is_said(system: Any) -> None:
    command = [sys.executable, "-m", "paceline.scripts.cli", "chat", "--url", "ws://127.0.0.1:9", "-p", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"paceline: ws://127.0.0.1:9: cannot connect .*\n", done.stderr)


@contextmanager
def forwarding(port: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """A port that forwards to another one, and a way to cut everything that runs through it."""
    server = socket.create_server(("127.0.0.1", 0))
    pairs: list[socket.socket] = []

    def pump(a: socket.socket, b: socket.socket) -> None:
        with suppress(OSError):
            while data := a.recv(65536):
                b.sendall(data)
        for s in (a, b):
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = server.accept()
                far = socket.create_connection(("127.0.0.1", port))
                pairs.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    def cut() -> None:
        for s in pairs:
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
        pairs.clear()

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1], cut
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    cut()


def test_an_answer_goes_on_after_a_cut_as_if_nothing_had_happened(system: Any, terminal: Start) -> None:
    port = int(system.verifier.rsplit(":", 1)[1])
    asked = ("--policy", "ar", "--max-tokens", "60", "-p", STORY)
    with forwarding(port) as (other, cut):
        t = terminal("chat", "--url", f"ws://127.0.0.1:{other}", *asked)
        t.expect(r"\w+ \w+ \w+ \w+")
        cut()
        assert t.ends(60) == 0
    own = piped(system, "--policy", "ar", "--max-tokens", "60", question=STORY)
    assert own.returncode == 0
    # what was written, not the screen: there a space is lost where a notice ends a line in mid-sentence
    seen = [line for line in without_styles(t.raw).splitlines() if not line.startswith("[")]
    assert " ".join("".join(seen).split()) == " ".join("".join(own.stdout.splitlines()).split())


@pytest.mark.parametrize("option", ["--offline", "--policy"])
def test_options_that_make_no_sense_are_refused(option: str) -> None:
    command = [sys.executable, "-m", "paceline.scripts.cli", "chat", "--local", option, "nonsense", "-p", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "nonsense" in done.stderr


def test_a_chat_that_was_killed_goes_on_with_its_answer(system: Any, tmp_path: Path) -> None:
    arguments = ["--policy", "ar", "--max-tokens", "60", "--seed", "5"]
    whole = piped(system, *arguments, question=STORY)
    assert whole.returncode == 0, whole.stderr
    command = [sys.executable, "-m", "paceline.scripts.cli", "chat", "--url", system.verifier, *arguments, "-p", STORY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(20)
        process.kill()
    resumed = piped(system, *arguments, "--resume", question="")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == whole.stdout
    again = piped(system, *arguments, "--resume", question="")
    assert again.returncode == 1
    assert "no unfinished answer" in again.stderr
