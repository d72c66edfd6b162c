"""The target's own text on given prompts, greedy or drawn: what a draft is measured along. Recorded once, kept on disk.

A prompts file has one JSON object a line with `turns` (a list whose first entry is used) or `prompt`, and perhaps `category`.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.kernels.gguf_file import GgufFile

from .errors import RecipeError
from .landing import landing
from .llama import LlamaModel, sampler


@dataclass(frozen=True)
class Prompt:
    category: str
    text: str


@dataclass(frozen=True)
class Trace:
    """prompt, text: target ids."""

    category: str
    prompt: list[int]
    text: list[int]


def read_prompts(path: Path, per_category: int = 0) -> list[Prompt]:
    """The prompts of a file; per_category > 0 keeps only the first so many of each category."""
    kept: dict[str, list[Prompt]] = defaultdict(list)
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            entry = json.loads(line)
            text = entry["turns"][0] if "turns" in entry else entry["prompt"]
            if not isinstance(text, str):
                raise ValueError(f"line {number} has no text")
            kept[str(entry.get("category", "all"))].append(Prompt(str(entry.get("category", "all")), text))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise RecipeError(
            f"{path} is no file of prompts, a JSON object a line with `turns` or `prompt`: {error}."
        ) from error
    return [p for prompts in kept.values() for p in (prompts[:per_category] if per_category else prompts)]


def chat(template: str, user: str, bos: str = "") -> str:
    """The user's words in the target's chat template, up to where the answer begins. bos: text of the beginning token."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": "user", "content": user}]
    return environment.from_string(template).render(
        messages=messages, add_generation_prompt=True, bos_token=bos, eos_token=""
    )


def record(
    target: Path,
    prompts: Sequence[Prompt],
    tokens: int,
    cache: Path | None = None,
    threads: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
    temperature: float = 0.0,
) -> list[Trace]:
    """The target's text of `tokens` tokens on each prompt, greedy at temperature 0, else drawn (the same at every call); taken
    from the cache folder where it is there already."""
    kept = cache / f"traces-{_key(target, prompts, tokens, temperature)}.json" if cache else None
    if kept and kept.exists():
        return [Trace(**t) for t in json.loads(kept.read_text())]
    metadata = GgufFile(target).metadata
    template = metadata.get("tokenizer.chat_template")
    model = LlamaModel(target, threads=threads)
    stops, traces = model.stops(), []
    bos = [int(metadata["tokenizer.ggml.bos_token_id"])] if metadata.get("tokenizer.ggml.add_bos_token") else []
    for i, prompt in enumerate(prompts):
        ids = bos + model.tokenize(chat(template, prompt.text) if isinstance(template, str) else prompt.text)
        if len(ids) + tokens <= model.limit:
            text = model.write(ids, tokens, stops, sampler(temperature, seed=i))
            traces.append(Trace(prompt.category, ids, text))
        progress(i + 1, len(prompts))
    model.close()
    if kept:
        with landing(kept) as part:
            part.write_text(json.dumps([asdict(t) for t in traces]))
    return traces


def _key(target: Path, prompts: Sequence[Prompt], tokens: int, temperature: float) -> str:
    """Names the recording: the model file's size and head, the prompts, the length, and the temperature unless greedy."""
    with target.open("rb") as file:
        head = hashlib.sha256(file.read(1 << 16)).hexdigest()
    drawn = [temperature] if temperature else []
    material = json.dumps([target.stat().st_size, head, [asdict(p) for p in prompts], tokens, *drawn])
    return hashlib.sha256(material.encode()).hexdigest()[:16]
