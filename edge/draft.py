"""What the agent asks of a draft model. The tree and the planner know about speculation; a draft only runs rows."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from paceline.protocol.sampling import History, Sampling
from paceline.protocol.vocabulary import Vocabulary

if TYPE_CHECKING:
    from paceline.edge.drawing import Drawing


@dataclass(frozen=True)
class Row:
    """A node to run: the root of a generation's tree (`parent` < 0), or a child of a node that was run before.

    `position` is absolute; `choice` says how the next token is chosen there, so that the draft can rank its
    candidates alike.
    """

    handle: int
    node: int
    parent: int
    token: int
    position: int
    choice: "Choice"


@dataclass(frozen=True)
class Choice:
    """How the token after a row is chosen: parameters, and the text so far where penalties need it.

    With `drawing`, candidates are drawn at random instead of ranked as the target ranks them.
    """

    sampling: Sampling
    history: History | None = None
    drawing: "Drawing | None" = None


@dataclass(frozen=True)
class Candidates:
    """What may follow a row, best first: `tokens` [F], and the draft's confidence in each, `confidence` [F], in (0, 1).

    The first `drawn` of them were drawn in this order, without replacement, in proportion to `counts` over `support`.
    """

    tokens: npt.NDArray[np.integer]
    confidence: npt.NDArray[np.float64]
    support: tuple[int, ...] = ()
    counts: bytes = b""
    drawn: int = 0


@dataclass(frozen=True)
class Extended:
    """What came of a batch: per row its candidates, None where there was no room; and how many rows ran in all.

    More rows run than were asked for where text was not cached yet. `forward` are the seconds spent in the model.
    """

    found: Sequence[Candidates | None] = ()
    ran: int = 0
    forward: float = 0.0


PROBE_ROWS = (1, 2, 4, 8)  # of the steps by which a draft measures what a step costs


class Draft(Protocol):
    """A draft model. Calls come from one thread at a time; handles are generations."""

    name: str
    vocabulary: Vocabulary

    @property
    def step_cost(self) -> Sequence[tuple[int, float]]:
        """(rows, seconds of a step), measured at start."""
        ...

    def open(self, prompt: Sequence[int]) -> int:
        """A handle for a generation that begins with `prompt`. Cached prefixes of earlier ones are reused."""
        ...

    def commit(self, handle: int, tokens: Sequence[int], walked: Sequence[int], live: Collection[int]) -> None:
        """The text grew by `tokens`, along the tree nodes `walked`; of the nodes run so far only `live` are still wanted."""
        ...

    def extend(self, rows: Sequence[Row]) -> "Extended":
        """Run rows of any generations as one batch."""
        ...

    def close(self, handle: int) -> None: ...
