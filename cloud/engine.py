"""What the scheduler asks of a target, and the walk that engines with logits on the host share.

An engine keeps sequences (its KV cache) under handles. One `verify` call is one step over all sessions given to it:
append each session's new tokens, run its drafted nodes, walk them along the target's own choices. It knows nothing
about sockets, sessions or speculation beyond that; the tree's bookkeeping is `paceline.protocol.cloud_session`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from paceline.protocol.cloud_session import Plan, Walk
from paceline.protocol.errors import EngineError, PacelineError
from paceline.protocol.rejection import choose_among
from paceline.protocol.sampling import History, Sampling, log_softmax
from paceline.protocol.vocabulary import Vocabulary

Mask = npt.NDArray[np.bool_]
Logits = npt.NDArray[np.float32]  # [V], V the number of real tokens


class Work(msgspec.Struct, frozen=True):
    """One session's share of a step.

    `tokens` continue the handle's sequence, in order; they are never empty. With `choose`, the target then chooses
    after the last of them and walks `plan`; without, they are a chunk of a prompt and nothing is chosen. Where `plan` has
    draws, the choice is that of `paceline.protocol.rejection`; engines with `rejects` see to it, others are never given any.
    """

    handle: int
    tokens: tuple[int, ...]
    plan: Plan
    sampling: Sampling
    history: History | None = None  # prompt and committed text; given where the penalties need it
    logprobs: int | None = None
    choose: bool = True
    mask: Callable[[Sequence[int]], Mask] | None = (
        None  # tokens [V] that may follow the text and these; engines with `masks`
    )


@dataclass(frozen=True)
class Blocks:
    """How much of an engine's KV cache running sequences hold, in blocks of `tokens` tokens.

    What is only kept for prefixes that may come again counts as free: it is given up when room is needed.
    """

    used: int
    total: int
    tokens: int


class Engine(Protocol):
    """A target. Calls come from one thread at a time. Where its cache is of a fixed size, `blocks` says so: see `blocks_of`."""

    name: str
    vocabulary: Vocabulary
    context: int  # tokens a sequence may hold
    max_width: int  # nodes a step can take along, over all sessions
    chunk: int  # prompt tokens a step takes along, over all sessions
    free_width: int  # nodes that a step takes along at no more than 10 % above one row's cost; measured at start

    @property
    def step_cost(self) -> Sequence[tuple[int, float]]:
        """(rows, seconds of a step), measured at start."""
        ...

    def open(self, tokens: Sequence[int]) -> int:
        """A handle for a sequence that will begin with `tokens`. What is cached of them is reused, but for the last one.

        Raises EngineError when there is no room for another sequence.
        """
        ...

    def length(self, handle: int) -> int:
        """How many tokens of the sequence are in the cache: the next `Work.tokens` begin there."""
        ...

    def verify(self, batch: Sequence[Work]) -> Sequence[Walk | EngineError | None]:
        """One step. Per work: the walk; None if nothing was to be chosen; an EngineError if this session cannot go on.

        Afterwards `length` counts what of (tokens, accepted nodes) stayed in the cache: at most all but the chosen
        token.
        """
        ...

    def close(self, handle: int) -> None:
        """The session is over. The engine may keep its cache for a later `open` with the same prefix."""
        ...


def blocks_of(engine: Engine) -> Blocks | None:
    """The engine's KV cache by now; from any thread. None if it has none of a fixed size."""
    blocks: Blocks | None = getattr(engine, "blocks", None)
    return blocks


def walk(work: Work, position: int, logits: Callable[[int], Logits]) -> Walk | EngineError:
    """The target's walk down `work.plan`. `logits(i)` are those after node i, `logits(-1)` those after the last token.

    `position` is the absolute position of the token chosen first. Only rows on the path are asked for. A choice that is
    one of the draws below a node is that node accepted.
    """
    children: dict[tuple[int, int], int] = {}
    for i, (parent, token) in enumerate(zip(work.plan.parents, work.plan.tokens, strict=True)):
        children.setdefault((parent, token), i)
    accepted: list[int] = []
    tokens: list[int] = []
    logprobs: list[tuple[tuple[int, float], ...]] = []
    here = -1
    while True:
        row = logits(here)
        try:
            allowed = row if work.mask is None else np.where(work.mask(tokens), row, np.float32(-np.inf))
        except PacelineError as e:
            return EngineError(str(e))
        history = work.history.after(tokens) if work.history is not None else None
        try:
            drawn = work.plan.drawn_below(here)
            token = choose_among(allowed, work.sampling, position + len(tokens), history, drawn)
        except FloatingPointError as e:
            return EngineError(f"{e}; the model or its weights are damaged")
        if work.logprobs is not None:
            logprobs.append(top_logprobs(row, token, work.logprobs))
        below = children.get((here, token))
        if below is None:
            return Walk(tuple(accepted), token, tuple(logprobs))
        accepted.append(below)
        tokens.append(token)
        here = below


def top_logprobs(row: Logits, chosen: int, count: int) -> tuple[tuple[int, float], ...]:
    """(token, log-probability) of the chosen token, then of the `count` likeliest, from raw logits [V]."""
    logp = log_softmax(row)
    top = np.argsort(-logp, kind="stable")[:count] if count else np.empty(0, dtype=int)
    return tuple((int(t), round(float(logp[t]), 4)) for t in (chosen, *top))
