"""A draft that remembers: each row's candidates are computed by the real draft once, whoever asks, and kept on disk.

A row's candidates are a function of the tokens on its path and of how tokens are chosen, so a memo by path is exact as
far as a draft's logits are (llama.cpp rounds a row differently in batches of other shapes; the memo keeps the first).
It counts the rows that the real draft would have run. A policy that asks for the same paths as another costs no forward.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import BadZipFile

import msgspec
import numpy as np
import numpy.typing as npt
from paceline.cloud.backup import Follower, Whole
from paceline.edge.candidates import FAN_OUT, candidates
from paceline.edge.draft import Candidates, Choice, Extended, Row
from paceline.edge.drawing import drawn_from, shortlist
from paceline.protocol.errors import PacelineError
from paceline.protocol.philox import Floats, Ids
from paceline.protocol.sampling import History, Sampling
from paceline.protocol.vocabulary import Vocabulary
from paceline.scripts.lab.cases import Case
from paceline.scripts.lab.forest import Forest
from paceline.scripts.lab.virtual import Meter

Digest = bytes  # of a path: of the prompt, the parameters and the tokens after the prompt


def begin(case: Case) -> Digest:
    seed = msgspec.msgpack.encode((case.prompt, case.sampling))
    return hashlib.blake2b(seed, digest_size=16).digest()


def onward(digest: Digest, token: int) -> Digest:
    return hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=16).digest()


class Memo:
    """Candidates by path for one case, in a file; new ones are computed by `forest`, which is made when first needed."""

    def __init__(self, file: Path, case: Case, forest: Callable[[], Forest]) -> None:
        self._file, self._case, self._forest = file, case, forest
        self._found: dict[Digest, Candidates] = {}
        self._shortlists: dict[Digest, tuple[Ids, Floats]] = {}  # not kept: drawn texts do not come again
        self._fresh = 0
        self._load()

    def of(self, paths: Sequence[tuple[Digest, Sequence[int]]]) -> list[Candidates]:
        """Candidates after each path, given as its digest and its tokens after the prompt."""
        missing = {digest: tokens for digest, tokens in paths if digest not in self._found}
        if missing and not self._forest().stands([*self._case.prompt, *self._case.text]):
            self._plant()
            missing = {digest: tokens for digest, tokens in missing.items() if digest not in self._found}
        if missing:
            whole = [[*self._case.prompt, *tokens] for tokens in missing.values()]
            logits = self._forest().run(whole)
            for digest, tokens, row in zip(missing, missing.values(), logits, strict=True):
                self._keep(digest, tokens, row)
        return [self._found[digest] for digest, _ in paths]

    def held(self, digest: Digest) -> Candidates | None:
        """Candidates after that path, if they were computed before."""
        return self._found.get(digest)

    def shortlists(self, paths: Sequence[tuple[Digest, Sequence[int]]]) -> list[tuple[Ids, Floats]]:
        """What is drawn from after each path."""
        missing = {digest: tokens for digest, tokens in paths if digest not in self._shortlists}
        if missing:
            if not self._forest().stands([*self._case.prompt, *self._case.text]):
                self._plant()
            rows = self._forest().run([[*self._case.prompt, *tokens] for tokens in missing.values()])
            for (digest, tokens), row in zip(missing.items(), rows, strict=True):
                self._shortlists[digest] = shortlist(row, Choice(self._case.sampling, self._history(tokens)))
        return [self._shortlists[digest] for digest, _ in paths]

    def save(self) -> None:
        """Raises PacelineError if the file cannot be written."""
        if not self._fresh:
            return
        keys = np.frombuffer(b"".join(self._found), np.uint8).reshape(-1, 16)
        tokens = np.full((len(keys), FAN_OUT), -1, np.int32)
        confidence = np.zeros((len(keys), FAN_OUT), np.float32)
        for i, c in enumerate(self._found.values()):
            tokens[i, : len(c.tokens)], confidence[i, : len(c.tokens)] = c.tokens, c.confidence
        part = self._file.with_suffix(".part.npz")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            np.savez(part, keys=keys, tokens=tokens, confidence=confidence)
            part.replace(self._file)
        except OSError as e:
            raise PacelineError(f"{self._file}: cannot be written ({e.strerror or e})") from None
        self._fresh = 0

    def _load(self) -> None:
        try:
            with np.load(self._file) as table:
                keys, tokens, confidence = table["keys"], table["tokens"], table["confidence"].astype(np.float64)
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return  # not there, or damaged: computed again
        sizes = (tokens >= 0).sum(axis=1)
        for i, key in enumerate(keys):
            self._found[key.tobytes()] = Candidates(tokens[i, : sizes[i]], confidence[i, : sizes[i]])

    def _plant(self) -> None:
        """Run the target's own text, which every policy asks for."""
        whole, first = [*self._case.prompt, *self._case.text], len(self._case.prompt) - 1
        for i, row in self._forest().plant(whole, first):
            tokens = whole[first + 1 : i + 1]
            self._keep(digest_of(self._case, tokens), tokens, row)

    def _keep(self, digest: Digest, tokens: Sequence[int], logits: npt.NDArray[np.float32]) -> None:
        if digest in self._found:
            return
        choice = Choice(self._case.sampling, self._history(tokens))
        found = candidates(logits, len(self._case.prompt) + len(tokens), choice)
        single = found.confidence.astype(np.float32).astype(np.float64)  # as it will come back from the file
        self._found[digest] = Candidates(found.tokens.astype(np.int32), single)
        self._fresh += 1

    def _history(self, tokens: Sequence[int]) -> History | None:
        return History(self._case.prompt, tokens) if self._case.sampling.penalised else None


def digest_of(case: Case, tokens: Sequence[int]) -> Digest:
    digest = begin(case)
    for token in tokens:
        digest = onward(digest, token)
    return digest


@dataclass
class Text:
    """A generation's committed tokens, of which the draft's cache holds prompt and the first `cached`."""

    tokens: list[int] = field(default_factory=list)
    digest: Digest = b""
    cached: int = -1  # the last token of the prompt has not been run
    nodes: dict[int, tuple[Digest, tuple[int, ...]]] = field(default_factory=dict)  # run -> path


class MemoDraft:
    """A `Draft` over a memo. Its prompt counts as read before: an answer's time begins after the prompt."""

    def __init__(self, name: str, vocabulary: Vocabulary, memo: Memo, case: Case, costs: Sequence[tuple[int, float]]):
        self.name, self.vocabulary, self.step_cost = name, vocabulary, list(costs)
        self._memo, self._case = memo, case
        self._texts: dict[int, Text] = {}

    def open(self, prompt: Sequence[int]) -> int:
        assert tuple(prompt) == self._case.prompt, "the memo is for one prompt"
        handle = len(self._texts) + 1
        self._texts[handle] = Text(digest=begin(self._case))
        return handle

    def commit(self, handle: int, tokens: Sequence[int], walked: Sequence[int], live: Collection[int]) -> None:
        text = self._texts[handle]
        run = [i for i, node in enumerate(walked) if node in text.nodes]
        if run:
            text.cached = max(text.cached, len(text.tokens) + run[-1] + 1)
        for token in tokens:
            text.tokens.append(token)
            text.digest = onward(text.digest, token)
        text.nodes = {n: path for n, path in text.nodes.items() if n in live}

    def extend(self, rows: Sequence[Row]) -> Extended:
        ran, paths = 0, list[tuple[Digest, tuple[int, ...]]]()
        for row in rows:
            text = self._texts[row.handle]
            if row.parent < 0:
                path = (text.digest, tuple(text.tokens))
                ran += len(text.tokens) - min(text.cached, len(text.tokens) - 1)
                text.cached = len(text.tokens)
            else:
                above = text.nodes.get(row.parent, (text.digest, tuple(text.tokens)))
                path = (onward(above[0], row.token), (*above[1], row.token))
                ran += 1
            text.nodes[row.node] = path
            paths.append(path)
        drawings = [row.choice.drawing for row in rows]
        if not any(drawings):
            return Extended(self._memo.of(paths), ran)
        lists = self._memo.shortlists(paths)
        found = [drawn_from(*q, d) for q, d in zip(lists, drawings, strict=True) if d is not None]
        assert len(found) == len(rows), "a generation draws, or it does not"
        return Extended(found, ran)

    def close(self, handle: int) -> None:
        self._texts[handle].nodes.clear()


class MemoBackup:
    """A `Backup` over a memo: the draft model beside the target, at `seconds` a token, which `meter` lets pass."""

    def __init__(self, memo: Memo, case: Case, seconds: float, meter: Meter) -> None:
        self.seconds = seconds
        self._memo, self._case, self._meter = memo, case, meter

    def begin(self, prompt: Sequence[int], sampling: Sampling, history: History | None) -> Follower:
        return Whole(self.follow, prompt, sampling, history)

    def follow(self, tokens: Sequence[int], sampling: Sampling, history: History | None) -> tuple[int, float] | None:
        after = tokens[len(self._case.prompt) :]
        [found] = self._memo.of([(digest_of(self._case, after), after)])
        self._meter.charge(self.seconds)
        return int(found.tokens[0]), float(found.confidence[0])
