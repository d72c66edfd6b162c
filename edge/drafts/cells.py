"""Which cells of a cache belong to whom: the trunk and tree of a generation, and the rows of a batch. Runs nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Place:
    """Where a node that was run lies: after `base` cells of the trunk those of `path`, the last of them its own."""

    base: int
    path: tuple[int, ...]


@dataclass
class Generation:
    """`text` is prompt and committed tokens; `trunk` are the cells of the first of them."""

    text: list[int]
    trunk: list[int] = field(default_factory=list)
    placed: dict[int, Place] = field(default_factory=dict)
    branches: set[int] = field(default_factory=set)  # cells beside the trunk
    closed: bool = False


@dataclass
class Line:
    """A row of a batch: a node below `parent`, or (None) the text at its position. Its cell is given when the batch runs."""

    generation: Generation
    token: int
    position: int
    wanted: bool
    node: int | None = None
    parent: int | None = None
    cell: int = -1

    @property
    def runs_again(self) -> bool:
        """A root whose cell holds already what it is about to write."""
        return self.parent is None and self.position < len(self.generation.trunk)

    @property
    def above(self) -> Place:
        """Where the parent lies; a root without a place is the end of the trunk."""
        assert self.parent is not None
        return self.generation.placed.get(self.parent) or Place(len(self.generation.trunk), ())


def seen(lines: Sequence[Line]) -> list[npt.NDArray[np.intp]]:
    """The cells each row attends to, in the order of positions, its own last."""
    trunks: dict[int, list[int]] = {}
    for line in lines:
        trunk = trunks.setdefault(id(line.generation), list(line.generation.trunk))
        if line.parent is None and not line.runs_again:
            trunk.append(line.cell)
    arrays = {key: np.array(trunk, np.intp) for key, trunk in trunks.items()}
    found = []
    for line in lines:
        trunk_cells = arrays[id(line.generation)]
        if line.parent is None:
            found.append(trunk_cells[: line.position + 1])
        else:
            found.append(np.append(trunk_cells[: line.above.base], [*line.above.path, line.cell]))
    return found


def place(line: Line) -> None:
    """Note where a row lies now that it has run."""
    g = line.generation
    if line.parent is not None:
        assert line.node is not None
        g.placed[line.node] = Place(line.above.base, (*line.above.path, line.cell))
        g.branches.add(line.cell)
        return
    if not line.runs_again:
        g.trunk.append(line.cell)
    if line.node is not None:
        g.placed[line.node] = Place(line.position + 1, ())


def renumber(g: Generation, new: dict[int, int]) -> None:
    """The cells have other numbers now."""
    g.trunk = [new[c] for c in g.trunk]
    g.branches = {new[c] for c in g.branches}
    g.placed = {n: Place(at.base, tuple(new[c] for c in at.path)) for n, at in g.placed.items()}
