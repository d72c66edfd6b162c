"""One answer of an agent that runs in an aarch64 root under emulation, fed to a verifier that runs here as it is.

Started by scripts/run_aarch64, which makes the root. Says whether the text is what the verifier writes alone.
"""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from paceline.protocol.errors import PacelineError
from paceline.scripts.local import local_verifier, serving
from paceline.scripts.pairs import files_of

EMULATOR = "/usr/bin/qemu-aarch64-static"
PYTHON = [EMULATOR, "-E", "PYTHONPATH=/opt/site", "-E", "PACELINE_CACHE=/tmp/paceline", "/usr/bin/python3"]
VERIFY_FLOOR = 10.0  # seconds of a step there: what a target would have to take for an emulated draft to pay
PATIENCE = 1800.0  # seconds; emulation of a draft is slow, and slower where the machine has other work


@contextmanager
def edge_in(root: Path, arguments: Sequence[str]) -> Iterator[str]:
    """The address of `paceline edge`, run in `root` with these arguments; it ends with the block."""
    command = ["chroot", str(root), *PYTHON, "-m", "paceline.scripts.cli", "edge", "--port", "0", *arguments]
    with serving(command, "emulated agent", patience=120) as url:
        yield url


def ask(url: str, question: str, tokens: int) -> str:
    message = {"role": "user", "content": question}
    body = {"model": "paceline", "messages": [message], "max_tokens": tokens, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def counters(url: str) -> dict[str, float]:
    """The agent's own counts: tokens, nodes drafted, of them accepted, steps."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE) as answer:
        text = answer.read().decode()
    found = re.findall(r"^paceline_(tokens|steps|drafted|accepted)(?:_tokens)?_total (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def machine(root: Path) -> str:
    said = "import platform, llama_cpp as ll; print(platform.machine(), platform.python_version(), "
    said += "ll.__version__, ll.llama_print_system_info().decode())"
    done = subprocess.run(["chroot", str(root), *PYTHON, "-c", said], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PacelineError(f"the root does not run: {done.stderr[-800:]}")
    return done.stdout.strip()


def main(
    root: Annotated[Path, typer.Argument(help="An aarch64 root with Python, the packages and llama.cpp in /opt/site.")],
    question: Annotated[str, typer.Option(help="What is asked.")] = "Name three colours.",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer, at most.")] = 12,
) -> None:
    """Ask an emulated agent once, and the verifier alone; exit status 1 if the texts differ."""
    import shutil

    files = files_of("smollm2", None, None)
    shutil.copyfile(files.draft, root / "models" / "draft.gguf")
    report: dict[str, Any] = {"machine": machine(root)}
    with local_verifier(["--model", str(files.target), "--verify-floor", str(VERIFY_FLOOR)]) as verifier:
        begin = time.monotonic()
        with edge_in(root, ["--url", verifier, "--draft", "/models/draft.gguf", "--threads", "1"]) as url:
            report["seconds_to_start"] = round(time.monotonic() - begin, 1)
            begin = time.monotonic()
            report["text"] = ask(url, question, tokens)
            report["seconds_to_answer"] = round(time.monotonic() - begin, 1)
            report |= counters(url)
        command = [sys.executable, "-m", "paceline.scripts.cli", "chat", "--url", verifier, "--policy", "ar"]
        command += ["--max-tokens", str(tokens), "-p", question]
        plain = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    report["same_as_alone"] = plain.strip() == str(report["text"]).strip()
    typer.echo(json.dumps(report, indent=1, ensure_ascii=False))
    if not report["same_as_alone"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
