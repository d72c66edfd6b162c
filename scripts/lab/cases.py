"""What the lab measures on: prompts of a file, and the target's own text for each, recorded once with the real engine.

The target's text is a pure function of (prompt, parameters), so a recording stands for the target. Recordings lie in the
cache, one file per (model file, prompt, parameters, length), and are only made when they are not there.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import msgspec
from paceline.cloud.engine import Engine, Work
from paceline.protocol.cloud_session import Plan, Walk
from paceline.protocol.errors import PacelineError
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import History, Sampling

Report = Callable[[int, int], None]  # done, total


@dataclass(frozen=True)
class Prompt:
    """A question of a prompt file: its id and category there, and its first turn."""

    name: str
    category: str
    text: str


@dataclass(frozen=True)
class Case:
    """A prompt as tokens, and what the target writes after it under `sampling`; the text ends where the target ends it."""

    name: str
    category: str
    prompt: tuple[int, ...]
    sampling: Sampling
    text: tuple[int, ...]

    @property
    def request(self) -> GenerationRequest:
        """What is asked for when the whole text is wanted, and not a token more."""
        return GenerationRequest(self.prompt, self.sampling, len(self.text))


def read_prompts(path: Path) -> list[Prompt]:
    """Lines of JSON with `turns` (the first is used) and, if there, `id` and `category`. Raises PacelineError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [(n, json.loads(line)) for n, line in enumerate(lines, 1) if line.strip()]
        return [Prompt(str(r.get("id", n)), str(r.get("category", "all")), str(r["turns"][0])) for n, r in rows]
    except OSError as e:
        raise PacelineError(f"{path}: {e.strerror or e}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        raise PacelineError(f'{path}: not lines of JSON like {{"turns": ["..."]}} ({e})') from None


def spread(prompts: Sequence[Prompt], count: int, skip: int = 0) -> list[Prompt]:
    """`count` prompts after the first `skip`, taking turns between the categories, in the order of the file."""
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    turns = (p for turn in zip_longest(*by_category.values()) for p in turn if p is not None)
    chosen = list(turns)[skip : skip + count]
    if len(chosen) < count:
        raise PacelineError(f"{count} prompts after {skip} were asked for; the file has {len(prompts)}")
    return chosen


def write_text(engine: Engine, request: GenerationRequest) -> list[int]:
    """What the target writes by itself, one token a step. Raises the engine's own error."""
    stops, text = frozenset(request.stop_ids), list[int]()
    history = History(request.prompt) if request.sampling.penalised else None
    handle = engine.open(request.prompt)
    try:
        while len(text) < request.max_tokens and not (text and text[-1] in stops):
            missing = tuple([*request.prompt, *text][engine.length(handle) :])
            [walk] = engine.verify([Work(handle, missing, Plan(), request.sampling, history)])
            if not isinstance(walk, Walk):
                raise walk or PacelineError("the engine chose nothing")
            text.append(walk.token)
            if history is not None:
                history.extend([walk.token])
    finally:
        engine.close(handle)
    return text


class Recordings:
    """The cache of recordings of one target. `engine` is called once, and only when something has to be recorded."""

    def __init__(self, folder: Path, model: Path, engine: Callable[[], Engine]) -> None:
        self._folder, self._engine = folder, engine
        self._model, self._loaded = _identity(model), list[Engine]()

    def text(self, request: GenerationRequest) -> tuple[int, ...]:
        """What the target writes. A damaged recording is made anew."""
        prompt, stops = list(request.prompt), sorted(request.stop_ids)
        asked = {"model": self._model, "prompt": prompt, "stop": stops, "max": request.max_tokens}
        asked["sampling"] = msgspec.to_builtins(request.sampling)
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]
        path = self._folder / f"{key}.json"
        try:
            found = json.loads(path.read_text())
            if found["request"] == asked:
                return tuple(int(t) for t in found["text"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        if not self._loaded:
            self._loaded.append(self._engine())
        text = write_text(self._loaded[0], request)
        write_whole(path, json.dumps({"request": asked, "text": text}))
        return tuple(text)


def write_whole(path: Path, text: str) -> None:
    """The whole file or nothing. Raises PacelineError if it cannot be written."""
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.replace(path)
    except OSError as e:
        raise PacelineError(f"{path}: cannot be written ({e.strerror or e})") from None


def _identity(model: Path) -> str:
    stat = model.stat()
    return f"{model.name}:{stat.st_size}:{stat.st_mtime_ns}"
