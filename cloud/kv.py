"""The paged KV cache: the tensors, the sequences that live in them, and who has to give way when memory is short.

Sequences are named by handles. `reserve` makes room for a step, at the expense of stored prefixes that nobody uses, then of the
ends of sequences that are not in the step, longest unused first: their `length` shrinks, and they are rebuilt from their tokens
when they come back. Never more memory than the tensors made at start.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from paceline.cloud.architecture import Config
from paceline.cloud.pages import Held, Pages, pages_for
from paceline.kernels.layout import PAGE
from paceline.protocol.errors import EngineError
from torch import Tensor


@dataclass(frozen=True)
class Space:
    """How much memory the cache may take and how many sequences it may hold."""

    bytes: int
    sequences: int


class Cache:
    def __init__(self, config: Config, space: Space, dtype: torch.dtype, device: torch.device) -> None:
        count = pages_for(space.bytes, page_bytes(config, dtype))
        shape = (config.layers, config.kv_heads, count * PAGE, config.head_dim)
        try:
            self.keys = torch.zeros(shape, dtype=dtype, device=device)  # [layers, Hkv, slots, D]
            self.values = torch.zeros(shape, dtype=dtype, device=device)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as e:
            raise EngineError(f"no {space.bytes} bytes are free for the KV cache on {device}; give it less") from e
        self.pages = Pages(count)
        self._sequences: dict[int, Held] = {}
        self._limit = space.sequences
        self._next = 0
        self._clock = 0  # steps: the order of last use

    def open(self, tokens: Sequence[int]) -> int:
        if len(self._sequences) >= self._limit:
            raise EngineError(f"all {self._limit} sequences of this engine are in use; close one or try again later")
        self._next += 1
        held = self._sequences[self._next] = Held(used=self._clock)
        self.pages.match(held, tokens)
        return self._next

    def close(self, handle: int) -> None:
        self.pages.drop(self._sequences.pop(handle))

    def held(self, handle: int) -> Held:
        return self._sequences[handle]

    def length(self, handle: int) -> int:
        return len(self._sequences[handle].tokens)

    def reserve(self, handle: int, length: int, needed: Collection[int]) -> bool:
        """Room for `length` keys of a sequence, without touching sequences in `needed`. False if there is none."""
        held = self._sequences[handle]
        held.used = self._clock
        if self.pages.grow(held, length):
            return True
        self._evict(-(-length // PAGE) - len(held.pages), needed)
        return self.pages.grow(held, length)

    def tick(self) -> None:
        """A step begins."""
        self._clock += 1

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy keys and values of all layers between slots [n]; the two sets may overlap."""
        for tensor in (self.keys, self.values):
            tensor[:, :, destination] = tensor[:, :, source]

    def forget(self, handle: int) -> None:
        """A sequence's cache is not to be trusted: drop it, for everybody."""
        self.pages.distrust(self._sequences[handle])

    def _evict(self, pages: int, needed: Collection[int]) -> None:
        """Make `pages` pages available, or nothing if idle sequences do not hold that many."""
        idle = [s for h, s in sorted(self._sequences.items(), key=lambda item: item[1].used) if h not in needed]
        if self.pages.available + sum(map(self.pages.reclaimable, idle)) < pages:
            return
        for held in idle:
            while held.pages and self.pages.available < pages:
                self.pages.drop(held, 1)


def page_bytes(config: Config, dtype: torch.dtype) -> int:
    """Bytes of one page's keys and values over all layers."""
    return 2 * config.layers * config.kv_heads * config.head_dim * PAGE * dtype.itemsize
