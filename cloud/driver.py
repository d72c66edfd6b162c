"""What runs the sessions of a house: the scheduler over an engine, or an engine that schedules by itself."""

import asyncio
from typing import Protocol

from paceline.cloud.engine import Blocks
from paceline.cloud.scheduler import Figures, Seat


class Driver(Protocol):
    figures: Figures
    width: int  # nodes verified in one step, at most
    floor: float  # seconds to which a step is paced
    idle: asyncio.Event  # set while there are no sessions

    @property
    def drafts(self) -> bool:
        """Whether it drafts by itself, with a model, where an edge has sent too little."""
        ...

    @property
    def rejects(self) -> bool:
        """Whether it can accept and refuse draws."""
        ...

    @property
    def blocks(self) -> Blocks | None:
        """The KV cache by now; None where it has no fixed size, or is told of elsewhere."""
        ...

    def __len__(self) -> int:
        """Sessions that run."""
        ...

    def add(self, seat: Seat) -> None:
        """The session takes steps from now on, until it ends, fails or is removed."""
        ...

    def remove(self, seat: Seat) -> None:
        """The session takes no more steps; nothing happens if it is not here."""
        ...

    def wake(self) -> None:
        """Something arrived for a session."""
        ...

    async def run(self) -> None:
        """Step for ever; ends by cancellation."""
        ...
