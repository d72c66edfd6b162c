"""The target's own text on disk, extended on demand: one folder a target, one file a writing, never rewritten."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from platformdirs import user_cache_path

from . import text as own_text
from .chat import chat_of
from .target import Target, in_memory, vocabulary
from .text import OwnText
from .traces import read_prompts
from .writer import openings, write

ROWS, LENGTH = 96, 320  # conversations a writing, tokens each
ROWS_ON_GPU = 1024


def folder(target: Target, prompts: Path | None = None, root: Path | None = None) -> Path:
    """Where a target's text is kept; text from a user's prompts stands apart. Named by vocabulary and shape, so that a renamed
    file finds its text again."""
    material = [vocabulary(target).fingerprint, vars(target.shape), _weights_mark(target)]
    if prompts is not None:
        material.append(hashlib.sha256(prompts.read_bytes()).hexdigest())
    mark = hashlib.sha256(json.dumps(material).encode()).hexdigest()[:16]
    return (root or user_cache_path("paceline") / "text") / mark


def _weights_mark(target: Target) -> str:
    """Tells two targets of one shape apart: a digest of the last norm."""
    return hashlib.sha256(target.tensor("output_norm.weight").numpy().tobytes()).hexdigest()


def count(where: Path) -> int:
    """Conversations on disk."""
    return sum(len(own_text.load(p)) for p in own_text.shards(where))


def text(
    target: Target,
    source: Path,
    conversations: int,
    prompts: Path | None = None,
    root: Path | None = None,
    device: torch.device | None = None,
    rows: int | None = None,
    length: int = LENGTH,
    progress: Callable[[int, int], None] = lambda done, total: None,
    file: Path | None = None,
) -> OwnText:
    """At least `conversations` conversations by the target at `source`, read from disk and written where they are too few.

    file: of text to take instead, as it is.
    """
    if file is not None:
        return own_text.load(file)
    where = folder(target, prompts, root)
    kept = [own_text.load(p) for p in own_text.shards(where)]
    have = sum(len(t) for t in kept)
    if have < conversations:
        rows = rows or (ROWS if device is None or device.type == "cpu" else ROWS_ON_GPU)
        kept += _written(
            target, source, where, conversations - have, len(kept), prompts, device, rows, length, progress
        )
    return own_text.joined(kept)


def _written(
    target: Target,
    source: Path,
    where: Path,
    wanted: int,
    first: int,
    prompts: Path | None,
    device: torch.device | None,
    rows: int,
    length: int,
    progress: Callable[[int, int], None],
) -> Sequence[OwnText]:
    chat, tokenize = chat_of(source)
    words = [tokenize(p.text) for p in read_prompts(prompts)] if prompts else []
    w = in_memory(target, device)
    out: list[OwnText] = []
    while sum(len(t) for t in out) < wanted:
        number = first + len(out)
        batch = openings(chat, min(rows, max(8, wanted)), number, [w for w in words if len(w) < length // 2])
        longest = max((len(r.given) for r in batch), default=0)
        piece = write(target.shape, w, chat, batch, max(length, longest + length // 2), number, progress)
        out.append(piece)
        own_text.save(where / f"text-{number:04d}.npz", piece)
        if not len(piece):
            break
    return out
