"""What a verifier grants before it works: to everybody together, and to each owner of a key.

Nothing here does any work; it says yes, no with a code and a time to come back, or not yet. Owners are named by their keys
(`keys`); without keys each connection is an owner by itself. The clock is passed in.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.cloud.driver import Driver
from paceline.cloud.scheduler import Seat
from paceline.protocol.errors import Code, ProtocolError

SHORTEST, LONGEST = 0.5, 60.0  # seconds after which to come back
SAVED = 0.5  # seconds of an owner's frames that may come at once: what is read without a pause delays the others


@dataclass(frozen=True)
class Bounds:
    """What one verifier bears. `slots` sessions run at once, `queue` more wait for a place, others are told when to come."""

    connections: int = 1024
    slots: int = 64
    queue: int = 256
    messages_a_second: float = 2000.0  # of one owner; beyond it frames are read no faster
    idle_seconds: float = 120.0  # without any frame, or of a session that waits for its edge to acknowledge


@dataclass(frozen=True)
class Allowance:
    """What an owner may do. `tokens_a_minute` counts prompts and text; None: as much as there is."""

    sessions: int | None = None
    tokens_a_minute: float | None = None
    context: int | None = None
    connections: int | None = None


@dataclass
class Bucket:
    """`rate` units a second, at most `burst` saved up. What is taken may go below zero; then `wait` tells for how long."""

    rate: float
    burst: float
    clock: Callable[[], float]
    _level: float = math.inf
    _at: float = 0.0

    def take(self, units: float) -> None:
        self._level = self._now() - units

    def wait(self) -> float:
        """Seconds until there is something to take again."""
        level = self._now()
        return max(-level / self.rate, 0.0) if self.rate > 0 else math.inf * (level < 0)

    def _now(self) -> float:
        now = self.clock()
        self._level = min(self.burst, self._level + max(now - self._at, 0.0) * self.rate)
        self._at = now
        return self._level


@dataclass(eq=False)
class Owner:
    """Whoever has one key, over all connections."""

    name: str
    allowance: Allowance
    messages: Bucket
    tokens: Bucket | None
    connections: int = 0
    seats: set[Seat] = field(default_factory=set)

    @classmethod
    def of(cls, name: str, allowance: Allowance, bounds: Bounds, clock: Callable[[], float]) -> "Owner":
        rate = bounds.messages_a_second
        tokens = None
        if allowance.tokens_a_minute is not None:
            tokens = Bucket(allowance.tokens_a_minute / 60, allowance.tokens_a_minute, clock)
        return cls(name, allowance, Bucket(rate, SAVED * rate, clock), tokens)

    def check(self, sid: int) -> None:
        """May this owner open another session? Raises ProtocolError."""
        limit = self.allowance.sessions
        if limit is not None and len(self.seats) >= limit:
            text = f"this key has {len(self.seats)} sessions open, its limit"
            raise ProtocolError(Code.SESSION_LIMIT, text, sid, retry_after=1.0)
        if self.tokens is not None and (wait := self.tokens.wait()) > 0:
            text = f"this key has used its {self.allowance.tokens_a_minute:.0f} tokens a minute"
            raise ProtocolError(Code.RATE_LIMIT, text, sid, retry_after=clamped(wait))

    def spend(self, tokens: int) -> None:
        if self.tokens is not None:
            self.tokens.take(tokens)

    def pause(self) -> float:
        """Seconds that its running sessions have to wait."""
        return self.tokens.wait() if self.tokens is not None else 0.0


class Admission:
    """Which sessions run, and which wait for a place: of those the next is the one whose owner has the fewest running."""

    def __init__(self, scheduler: Driver, bounds: Bounds, clock: Callable[[], float]) -> None:
        self._scheduler, self._bounds, self._clock = scheduler, bounds, clock
        self._running: dict[Seat, tuple[Owner, float]] = {}  # owner, and since when
        self._queue: dict[Seat, Owner] = {}  # oldest first
        self._mean = 5.0  # seconds that a session has its place

    def __len__(self) -> int:
        return len(self._queue)

    def check(self, sid: int) -> None:
        """Raises ProtocolError if another one could not even wait."""
        if len(self._running) >= self._bounds.slots and len(self._queue) >= self._bounds.queue:
            text = f"{len(self._running)} sessions run and {len(self._queue)} wait, as many as may"
            raise ProtocolError(Code.OVERLOADED, text, sid, retry_after=self.retry_after())

    def enter(self, seat: Seat, owner: Owner) -> None:
        owner.seats.add(seat)
        self._queue[seat] = owner
        self._admit()

    def leave(self, seat: Seat, owner: Owner) -> None:
        owner.seats.discard(seat)
        self._queue.pop(seat, None)
        self._scheduler.remove(seat)
        if (entry := self._running.pop(seat, None)) is not None:
            self._mean += 0.1 * (self._clock() - entry[1] - self._mean)
        self._admit()

    @property
    def waiting(self) -> list[Seat]:
        return list(self._queue)

    def retry_after(self) -> float:
        """About how long until a place would be free for one that came now."""
        return clamped(self._mean * (len(self._queue) + 1) / self._bounds.slots)

    def _admit(self) -> None:
        while self._queue and len(self._running) < self._bounds.slots:
            running: dict[Owner, int] = {}
            for owner, _ in self._running.values():
                running[owner] = running.get(owner, 0) + 1
            seat = min(self._queue, key=lambda s: running.get(self._queue[s], 0))  # the oldest of those that tie
            self._running[seat] = (self._queue.pop(seat), self._clock())
            self._scheduler.add(seat)


def clamped(seconds: float) -> float:
    return round(min(max(seconds, SHORTEST), LONGEST), 3)
