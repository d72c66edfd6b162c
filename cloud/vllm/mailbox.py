"""Trees on their way from the door to the drafter in another process: one memory-mapped file, one slot a session.

The door writes a session's tree into its slot, the drafter reads it in the middle of a step and never waits: a slot that is
being written, or holds nothing that fits, is a miss. A checksum over the slot tells a torn one, whatever the machine's memory
order. What the drafter took goes back as one 64-bit word a step, so that the door knows where each step began and what it
verified. Knows nothing about vLLM, sockets or what a session is.

A tree lies in depth-first order, likeliest child first, with the size of each node's subtree: so the likeliest path from a node
is a run of first children, and a sibling is one addition away.
"""

import math
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from paceline.protocol.errors import EngineError
from paceline.protocol.messages import WEIGHT_UNIT
from paceline.protocol.tree import Tree

VARIABLE = "PACELINE_MAILBOX"  # names the file to both processes
NODES = 128  # of a tree, at most; the likeliest
WINDOW = 64  # tokens before the root by which a text is known, besides its length
LAG = 64  # tokens a text may have grown since its tree was written
LEAST = (
    math.log(10) / WEIGHT_UNIT
)  # a node that the target reaches less often than one time in ten is not worth its row
_MAGIC = b"paceline mailbox 1".ljust(64)
_STEPS = 64  # that are remembered a slot
_SLOT = np.dtype(
    [
        ("check", "<u4"),
        ("length", "<u4"),  # of the text at the root; 0: nobody's
        ("mark", "<u4"),
        ("count", "<u4"),
        ("tokens", "<i4", NODES),
        ("sizes", "<u1", NODES),  # nodes of each one's subtree, itself among them
        ("weights", "<u1", NODES),  # as in a `draft` message
    ]
)
_HEAD = 16  # bytes before the tokens
_BYTES = _SLOT.itemsize + 8 * _STEPS

Ids = Any  # int32 tokens in one piece: an array, or a row of one


@dataclass(frozen=True)
class Branches:
    """A tree as it lies in a slot: depth first, likeliest child first."""

    tokens: Sequence[int] = ()
    sizes: Sequence[int] = ()
    weights: Sequence[int] = ()

    @classmethod
    def of(cls, tree: Tree, end: int) -> "Branches":
        """The likeliest nodes of `tree`; those at text positions from `end` on are left out."""
        nodes = tree.best(NODES, exclude_from=end)
        place = {node: i for i, node in enumerate(nodes)}
        sizes = [1] * len(nodes)
        for i in range(len(nodes) - 1, -1, -1):
            if (parent := place.get(tree.parent(nodes[i]))) is not None:
                sizes[parent] += sizes[i]
        weights = [round((tree.weight(tree.parent(n)) - tree.weight(n)) / WEIGHT_UNIT) for n in nodes]
        return cls([tree.token(n) for n in nodes], sizes, [min(w, 255) for w in weights])

    def below(self, path: Sequence[int], limit: int) -> tuple[int, list[int]]:
        """How many nodes lie below the one that the tokens of `path` lead to, and the likeliest chain of them."""
        here, end = 0, len(self.tokens)
        for token in path:
            while here < end and self.tokens[here] != token:
                here += self.sizes[here]
            if here >= end:
                return 0, []
            here, end = here + 1, here + self.sizes[here]
        held, chain, reach = end - here, list[int](), 0
        while here < end and len(chain) < limit and (reach := reach + self.weights[here]) <= LEAST:
            chain.append(self.tokens[here])
            here, end = here + 1, here + self.sizes[here]
        return held, chain


def mark(text: Ids) -> int:
    """By which the end of a text is known. A mistaken one costs a useless draft, never a wrong text."""
    return zlib.crc32(text[-WINDOW:])


class Mailbox:
    """The file at `path`, which both ends open. Raises EngineError if it is none."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as e:
            raise EngineError(f"{path}: the mailbox cannot be opened ({e}); start vLLM anew") from None
        self.slots, rest = divmod(len(self._memory) - len(_MAGIC), _BYTES)
        if self._memory[: len(_MAGIC)] != _MAGIC or rest or not self.slots:
            raise EngineError(f"{path} is no mailbox of this version of paceline; start vLLM anew")
        self._slots = np.frombuffer(self._memory, _SLOT, self.slots, len(_MAGIC))
        after = len(_MAGIC) + self.slots * _SLOT.itemsize
        self._steps = np.frombuffer(self._memory, "<u8", self.slots * _STEPS, after).reshape(self.slots, _STEPS)

    @staticmethod
    def create(slots: int) -> Path:
        """A new file for so many sessions, in memory where the system has such a place."""
        shared = Path("/dev/shm")
        try:
            number, name = tempfile.mkstemp(prefix="paceline-", dir=shared if shared.is_dir() else None)
            with os.fdopen(number, "wb") as file:
                file.write(_MAGIC + bytes(slots * _BYTES))
        except OSError as e:
            raise EngineError(f"no room for a mailbox of {slots * _BYTES:,} bytes ({e.strerror})") from None
        return Path(name)

    # ---- the door's end

    def publish(self, slot: int, length: int, end: Ids, branches: Branches) -> None:
        """The tree of the session whose text has `length` tokens, the last WINDOW of them in `end`; the one before goes.

        An empty tree is not looked for, so that sessions without drafts cost a step nothing.
        """
        new, count = np.zeros((), _SLOT), len(branches.tokens)
        if not count:
            self._slots[slot] = new
            return
        new["length"], new["mark"], new["count"] = length, mark(end), count
        for name in ("tokens", "sizes", "weights"):
            new[name][:count] = getattr(branches, name)
        new["check"] = zlib.crc32(new.tobytes()[4:])
        self._slots[slot] = new

    def clear(self, slot: int) -> None:
        """Nobody's slot: nothing in it is found, and no step remembered."""
        self._slots[slot] = np.zeros((), _SLOT)
        self._steps[slot] = 0

    def step(self, slot: int, length: int) -> tuple[int, int] | None:
        """Of the step that began with a text of `length`: nodes held, and nodes verified. None: none began there."""
        word = int(self._steps[slot, length % _STEPS])
        return ((word >> 16) & 0xFFFF, word & 0xFFFF) if word >> 32 == length else None

    # ---- the drafter's end

    def chains(self, texts: Iterator[Ids | None], limit: int) -> list[list[int]]:
        """For each text the likeliest path of its tree, at most `limit` tokens; empty where there is none."""
        index = self._index()
        if not index:
            return [[] for _ in texts]
        return [[] if text is None else self._chain(index, text, limit) for text in texts]

    def _index(self) -> dict[int, dict[int, list[int]]]:
        """Length and mark of a text -> slots."""
        index = dict[int, dict[int, list[int]]]()
        used = np.flatnonzero(self._slots["length"])
        lengths, marks = (self._slots[name][used].tolist() for name in ("length", "mark"))
        for slot, length, known in zip(used.tolist(), lengths, marks, strict=True):
            index.setdefault(length, {}).setdefault(known, []).append(slot)
        return index

    def _chain(self, index: dict[int, dict[int, list[int]]], text: Ids, limit: int) -> list[int]:
        for length in range(len(text), max(len(text) - LAG, 0), -1):
            if (marks := index.get(length)) is None or (slots := marks.get(mark(text[:length]))) is None:
                continue
            slot = slots.pop() if len(slots) > 1 else slots[0]  # twins have a slot each
            branches = self._read(slot, length)
            if branches is None:
                return []
            held, chain = branches.below(text[length:].tolist(), limit)
            self._steps[slot, len(text) % _STEPS] = len(text) << 32 | held << 16 | len(chain)
            return chain
        return []

    def _read(self, slot: int, length: int) -> Branches | None:
        begin = len(_MAGIC) + slot * _SLOT.itemsize
        whole = self._memory[begin : begin + _SLOT.itemsize]
        check, found, _, count = struct.unpack_from("<4I", whole)
        if found != length or zlib.crc32(memoryview(whole)[4:]) != check:
            return None  # written at this very moment
        sizes, weights = _HEAD + 4 * NODES, _HEAD + 5 * NODES
        tokens = np.frombuffer(whole, "<i4", count, _HEAD).tolist()
        return Branches(tokens, whole[sizes : sizes + count], whole[weights : weights + count])
