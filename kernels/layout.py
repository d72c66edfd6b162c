"""Which rows of a step see which keys. Host-side; the attention kernels read it, the engine's batch builds it.

A step's rows are grouped into blocks. The rows of a block belong to one sequence and share a prefix of it, all of which they
see (a window aside); beyond it they see some of the block's `extra` keys, as a bit-mask says: the tokens of this step before
them, and their ancestors in the tree. Keys live in slots of a paged cache; slot = page * page_size + offset.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PAGE = 64  # keys a page; also the tile of keys over which attention sums, whatever the batch
BLOCK_ROWS = 64  # rows a block, at most

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Block:
    """Rows [first, first + rows) of the step. Prefix key p lies in slot pages[p // PAGE] * PAGE + p % PAGE, at position p."""

    first: int
    rows: int
    pages: Ints  # [>= ceil(prefix / PAGE)]
    prefix: int
    extra: Ints  # [E] slots
    extra_positions: Ints  # [E]
    mask: Bools  # [rows, E] row r sees extra key e


@dataclass(frozen=True)
class Layout:
    """All blocks of a step, in the order of rows, and the position of every row [R]."""

    blocks: tuple[Block, ...]
    positions: Ints

    @property
    def rows(self) -> int:
        return len(self.positions)


def prefix_slots(pages: Ints, prefix: int) -> Ints:
    """Slots [prefix] of the keys before a block."""
    at = np.arange(prefix)
    slots: Ints = pages[at // PAGE] * PAGE + at % PAGE
    return slots


def pack_bits(mask: Bools, words: int) -> npt.NDArray[np.int32]:
    """Mask [r, E] as words [r, words]: bit e % 32 of word e // 32."""
    bits = np.zeros((mask.shape[0], words * 32), dtype=np.uint32)
    bits[:, : mask.shape[1]] = mask
    packed: npt.NDArray[np.int32] = (
        (bits.reshape(-1, words, 32) << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)
    )
    return packed
