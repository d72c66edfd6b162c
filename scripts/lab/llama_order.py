"""Does the order of cells matter? The same trees with the engine's ordering on and off, held against one-by-one decoding.

The draft grows a small tree after each token; the target walks it. A row is what a token was chosen from. The text is the
plain one throughout (it is put right after every flip), so every row compared follows the very same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from paceline.cloud.engine import Work
from paceline.cloud.engines.llamacpp import LlamaEngine, Slot
from paceline.edge.draft import Choice, Row
from paceline.edge.drafts.files import FileDraft, open_draft
from paceline.edge.text import Text
from paceline.protocol.cloud_session import Plan, Walk
from paceline.protocol.sampling import Sampling, choose

Logits = npt.NDArray[np.float32]
GREEDY = Sampling()
DEPTH, BRANCHES = 3, 3  # of the trees: the likeliest chain, and at each of its nodes the runners-up


@dataclass
class Order:
    """Counts over all rows looked at. `largest` is the largest difference of a logit."""

    rows: int = 0
    different: int = 0
    flipped: int = 0
    largest: float = 0.0

    def add(self, row: Logits, plain: Logits) -> None:
        self.rows += 1
        self.different += not np.array_equal(row, plain)
        self.flipped += choose(row, GREEDY, 0) != choose(plain, GREEDY, 0)
        self.largest = max(self.largest, float(np.abs(row - plain).max()))


class Watched(LlamaEngine):
    """Keeps the rows of its last step."""

    rows: Logits

    def _decode(
        self,
        slot: Slot,
        tokens: Sequence[int],
        positions: Sequence[int],
        paths: Sequence[Sequence[int]],
        wanted: Sequence[bool],
    ) -> Logits:
        logits = super()._decode(slot, tokens, positions, paths, wanted)
        self.rows = logits[:, : self.vocabulary.size].copy()
        return logits


def measure(target: Path, draft: Path, text: Text, questions: Sequence[str], tokens: int) -> dict[bool, Order]:
    """By `keep_order`. Each question's first `tokens` tokens, greedily."""
    speculator = open_draft(draft, text.vocabulary, threads=1)
    found = {}
    for keep_order in (True, False):
        engine = Watched(target, threads=1, slots=2, keep_order=keep_order)
        found[keep_order] = Order()
        for question in questions:
            prompt = text.prompt([{"role": "user", "content": question}])
            plain = _plain(engine, prompt, tokens)
            _compare(engine, speculator, prompt, plain, found[keep_order])
        engine.shut()
    speculator.shut()
    return found


def _plain(engine: Watched, prompt: list[int], tokens: int) -> list[tuple[int, Logits]]:
    """The target's own tokens, one step each and nothing drafted, with the rows they were chosen from."""
    handle, sequence, out = engine.open([-1]), [*prompt], list[tuple[int, Logits]]()
    for _ in range(tokens):
        step = Work(handle, tuple(sequence[engine.length(handle) :]), Plan(), GREEDY)
        (walk,) = engine.verify([step])
        assert isinstance(walk, Walk)
        out.append((walk.token, engine.rows[0]))
        sequence.append(walk.token)
    engine.close(handle)
    return out


def _compare(
    engine: Watched, draft: FileDraft, prompt: list[int], plain: list[tuple[int, Logits]], order: Order
) -> None:
    handle, text = engine.open([-1]), [t for t, _ in plain]
    done = 0
    while done + DEPTH + 1 < len(text):
        sequence = prompt + text[:done]
        plan = _tree(draft, sequence)
        new = tuple(sequence[engine.length(handle) :])
        (walk,) = engine.verify([Work(handle, new, plan, GREEDY)])
        assert isinstance(walk, Walk)
        here = [-1, *walk.accepted]
        path = [plan.tokens[i] for i in walk.accepted]
        agreed = next((k for k, t in enumerate([*path, walk.token]) if t != text[done + k]), len(here))
        for k, node in enumerate(here[: agreed + 1]):
            order.add(engine.rows[node + 1], plain[done + k][1])
        if agreed <= len(path):  # a flip: go on along the plain text, in a sequence that ends before it
            engine.close(handle)
            handle = engine.open(sequence)
            done += agreed + 1
        else:
            done += len(path) + 1
    engine.close(handle)


def _tree(draft: FileDraft, sequence: list[int]) -> Plan:
    """The draft's likeliest chain, runners-up first at the end of the batch, as a verifier's plan has it."""
    handle = draft.open(sequence)
    tokens: list[int] = []
    parents: list[int] = []
    side: list[tuple[int, int]] = []
    parent, token, node = -1, sequence[-1], 0
    for depth in range(DEPTH):
        row = Row(handle, node, node - 1 if depth else -1, token, len(sequence) - 1 + depth, Choice(GREEDY))
        (candidates,) = draft.extend([row]).found
        assert candidates is not None
        side += [(parent, int(t)) for t in candidates.tokens[1:BRANCHES]]
        token = int(candidates.tokens[0])
        tokens.append(token)
        parents.append(parent)
        parent, node = len(tokens) - 1, node + 1
    draft.close(handle)
    for above, other in side:
        tokens.append(other)
        parents.append(above)
    return Plan(tuple(range(len(tokens))), tuple(tokens), tuple(parents))
