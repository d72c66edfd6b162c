"""vLLM as the verifier, for real: a plain vLLM, one with Paceline inside, and our own engine, asked the same questions.

What must hold is checked: greedy text token for token that of plain vLLM, drafted or not; above temperature 0 the same
distribution; requests that vLLM would not honour refused. What is measured is reported as ratios within this run, whose parts
take turns: the speed without any drafted token against plain vLLM, tokens a forward and hit rate against our own engine.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from paceline.cloud.settings import READY
from paceline.edge.policies import policy as policy_named
from paceline.edge.runtime import Settings, running_agent
from paceline.edge.text import Text
from paceline.edge.websocket import Address
from paceline.protocol.errors import Code, PacelineError, ProtocolError
from paceline.protocol.sampling import Sampling
from paceline.scripts.chaos.kills import free_port
from paceline.scripts.comparison import Answer, Question, answer
from paceline.scripts.llama_folder import write_folder
from paceline.scripts.local import local_verifier
from paceline.scripts.models import cache_folder, resolve_pair
from paceline.scripts.pairs import vocabulary_of
from paceline.scripts.vllm_draws import p_value

PROMPTS = (
    "Why is the sky blue?",
    "Write a short poem about a lighthouse.",
    "List five uses of a paper clip.",
    "Explain how a bicycle stays upright.",
    "Write a Python function that reverses a string.",
    "What happened on the first day of school?",
)
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
OPTIONS = "--enforce-eager --dtype float32"
ALPHA = 1e-4
Figures = dict[str, Any]


@contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child that ends with the block; what it says goes into `log`."""
    with log.open("w") as said:
        child = subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, **ENVIRONMENT})
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def until(ready: Callable[[], bool], child: subprocess.Popen[bytes], log: Path) -> None:
    while not ready():
        if child.poll() is not None:
            raise PacelineError(f"vLLM ended before it was ready: {_last(log)}")
        time.sleep(0.5)


def _last(log: Path) -> str:
    return next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "it said nothing")


@contextmanager
def with_paceline(model: Path, width: int, slots: int, log: Path) -> Iterator[str]:
    """The address of `paceline cloud --engine vllm`."""
    command = [sys.executable, "-m", "paceline.scripts.cli", "cloud", "--engine", "vllm", "--model", str(model)]
    command += ["--port", "0", "--width", str(width), "--slots", str(slots), "--vllm-args", OPTIONS]
    with process(command, log) as child:
        until(lambda: f"\n{READY}" in log.read_text(), child, log)
        yield log.read_text().split(f"\n{READY}")[1].split("\n")[0]


@contextmanager
def plain_vllm(model: Path, slots: int, log: Path) -> Iterator[str]:
    """The address of vLLM's own server, with nothing of ours in it."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--max-num-seqs", str(slots)]
    with process([*command, *OPTIONS.split()], log) as child:
        url = f"http://127.0.0.1:{port}"
        until(lambda: _healthy(url), child, log)
        yield url


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as found:
            return bool(found.status == 200)
    except OSError:
        return False


def ask_plain(
    url: str, model: Path, prompt: Sequence[int], max_tokens: int, stops: Sequence[int]
) -> tuple[list[int], float]:
    """Tokens that plain vLLM streams, greedy, and the seconds that it took."""
    asked = {"model": str(model), "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True}
    asked |= {"stop_token_ids": list(stops), "ignore_eos": True, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode(), headers)
    tokens, begin = list[int](), time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("token_ids") or []
    return tokens, time.perf_counter() - begin


class Bench:
    """What asks: one device's files, and how many tokens of an answer."""

    def __init__(self, vocabulary: Path, draft: Path, cache: Path, max_tokens: int) -> None:
        self.text, self.max_tokens = Text(vocabulary), max_tokens
        self._files = vocabulary, draft, cache

    def prompt(self, question: str) -> list[int]:
        return list(self.text.prompt([{"role": "user", "content": question}]))

    async def ask(self, url: str, policy: str, question: str, sampling: Sampling | None = None) -> Answer:
        vocabulary, draft, cache = self._files
        settings = Settings((Address(url),), vocabulary, draft, cache, threads=1, attempts=3)
        async with running_agent(settings, self.text, policy_named(policy)) as agent:
            return await answer(agent, self.text, Question(question, sampling or Sampling(), self.max_tokens))


def drafted(bench: Bench, url: str, expected: Sequence[Sequence[int]]) -> Figures:
    """The questions with a draft on the device. `expected`: the texts of plain vLLM."""
    answers = [asyncio.run(bench.ask(url, "stream", question)) for question in PROMPTS]
    texts = [a.tokens for a in answers]
    made = [a.generation.figures for a in answers]
    steps = max(sum(f.steps for f in made), 1)
    return {
        "tokens": sum(map(len, texts)),
        "tokens_per_forward": round(sum(map(len, texts)) / steps, 3),
        "hit_rate": round(sum(f.hits for f in made) / steps, 4),
        "accepted_per_step": round(sum(f.accepted for f in made) / steps, 3),
        "identical": sum(list(a) == list(b) for a, b in zip(texts, expected, strict=True)),
        "of": len(texts),
    }


def empty_mailbox(bench: Bench, ours: str, plain: str, model: Path, rounds: int) -> tuple[Figures, list[list[int]]]:
    """Plain vLLM and ours without a drafted token, in turns. With the plain texts."""
    ratios, totals, texts, same = list[float](), [0.0, 0.0], list[list[int]](), 0
    for number in range(rounds * len(PROMPTS)):
        question, turn = PROMPTS[number % len(PROMPTS)], number // len(PROMPTS) + number
        prompt = bench.prompt(question)
        ask_plain(plain, model, prompt, 1, ())  # the prompt is then cached, as `answer` does it on our side
        seconds = [0.0, 0.0]
        for side in (turn % 2, 1 - turn % 2):
            if side:
                tokens, seconds[1] = ask_plain(plain, model, prompt, bench.max_tokens, bench.text.end_tokens)
            else:
                mine = asyncio.run(bench.ask(ours, "ar", question))
                seconds[0] = mine.seconds
        same += mine.tokens == tokens
        ratios.append(seconds[0] / seconds[1])
        totals = [a + b for a, b in zip(totals, seconds, strict=True)]
        if number < len(PROMPTS):
            texts.append(tokens)
    figures: Figures = {
        "ratio_of_totals": round(totals[0] / totals[1], 4),
        "median_ratio": round(statistics.median(ratios), 4),
        "pairs": len(ratios),
        "identical": same,
        "of": len(ratios),
    }
    return figures, texts


def refused(bench: Bench, url: str) -> Figures:
    """What vLLM would not honour, asked for."""
    found = {}
    for name, sampling in (
        ("min_p", Sampling(temperature=1.0, min_p=0.1)),
        ("logit_bias", Sampling(logit_bias=((5, 1.0),))),
        ("frequency_penalty", Sampling(frequency_penalty=0.5)),
    ):
        try:
            asyncio.run(bench.ask(url, "ar", PROMPTS[0], sampling))
            found[name] = False
        except ProtocolError as e:
            found[name] = e.code is Code.UNSUPPORTED
    return found


def check(
    pair: Annotated[str, typer.Option(help="A pair by name; its target is a plain Llama.")] = "smollm2",
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds over the prompts, for the speed without drafts.")] = 3,
    draws: Annotated[int, typer.Option(help="Samples of each kind for the distribution; 0: none.")] = 600,
    width: Annotated[int, typer.Option(help="Tokens of a drafted chain.")] = 4,
    report: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    """Run everything; ends with an error if something that must hold does not."""
    from vllm.platforms import current_platform

    files = resolve_pair(pair, cache_folder())
    model = write_folder(files.target, cache_folder() / "folders" / files.target.stem)
    found: Figures = {}

    def note(part: str, figures: Figures) -> None:
        """Kept and told at once: the whole takes minutes."""
        found[part] = figures
        typer.echo(f"{part}: {json.dumps(figures)}")
        if report is not None:
            report.write_text(json.dumps(found, indent=2) + "\n")

    with ExitStack() as stack:
        logs, cache = (Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-check-"))) for _ in range(2))
        bench = Bench(vocabulary_of(model), files.draft, cache / "vllm", max_tokens)
        plain = stack.enter_context(plain_vllm(model, 8, logs / "plain"))
        ours = stack.enter_context(with_paceline(model, width, 8, logs / "paceline"))
        note("refused", refused(bench, ours))
        without, texts = empty_mailbox(bench, ours, plain, model, rounds)
        note("without_drafts", without)
        note("vllm", drafted(bench, ours, texts))
        if draws and not current_platform.is_cpu():  # where what is drawn is refused
            chances = p_value(ours, bench.text.vocabulary, bench.prompt(PROMPTS[1]), draws)
            note("distribution", asyncio.run(chances))
        bench = Bench(vocabulary_of(model), files.draft, cache / "own", max_tokens)
        arguments = ["--engine", "torch", "--model", str(model), "--threads", "1"]
        note("own_engine", drafted(bench, stack.enter_context(local_verifier(arguments)), texts))
    raise typer.Exit(0 if holds(found) else 1)


def holds(found: Figures) -> bool:
    same = all(found[part]["identical"] == found[part]["of"] for part in ("without_drafts", "vllm"))
    drawn = found.get("distribution", {"p_value": 1.0, "accepted": 1})
    return same and all(found["refused"].values()) and drawn["p_value"] > ALPHA and drawn["accepted"] > 0


if __name__ == "__main__":
    typer.run(check)
