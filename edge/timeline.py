"""The last seconds of an agent, for whoever wants to see them: draft steps, messages sent, commits, each with its time.

Times are those of the agent's clock, in seconds. Entries are numbered, so that a viewer asks for what is new.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

KEPT = 4096  # entries; some minutes at full speed


@dataclass(frozen=True)
class Entry:
    """`kind` is "draft" (a step from `begin` to `end` with `count` rows), "sent" (`count` nodes) or "commit".

    A commit's `count` are its tokens, `accepted` those of them that were drafted, `held` the nodes that the step could
    choose from; it arrived at `end`, and the cloud's step took `end - begin`.
    """

    number: int
    kind: str
    begin: float
    end: float
    count: int
    accepted: int = 0
    held: int = 0


@dataclass
class Timeline:
    clock: Callable[[], float]
    entries: deque[Entry] = field(default_factory=lambda: deque(maxlen=KEPT))
    _next: int = 0

    def drafted(self, begin: float, rows: int) -> None:
        self._add("draft", begin, self.clock(), rows)

    def sent(self, nodes: int) -> None:
        self._add("sent", self.clock(), self.clock(), nodes)

    def committed(self, tokens: int, step: float, accepted: int, held: int) -> None:
        now = self.clock()
        self._add("commit", now - step, now, tokens, accepted, held)

    def since(self, number: int) -> list[Entry]:
        """Entries from `number` on, oldest first."""
        new = []
        for entry in reversed(self.entries):
            if entry.number < number:
                break
            new.append(entry)
        return new[::-1]

    def _add(self, kind: str, begin: float, end: float, count: int, accepted: int = 0, held: int = 0) -> None:
        self.entries.append(Entry(self._next, kind, begin, end, count, accepted, held))
        self._next += 1
