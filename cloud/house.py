"""What the connections of one verifier share: its limits, its owners, who runs, who waits for a place and who for their edge."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from paceline.cloud.driver import Driver
from paceline.cloud.grammar import Grammars
from paceline.cloud.limits import Admission, Allowance, Bounds, Owner
from paceline.cloud.scheduler import Seat
from paceline.cloud.spans import Spans
from paceline.protocol.cloud_session import CloudSession
from paceline.protocol.errors import Code, ProtocolError
from paceline.protocol.messages import BACKUP, GRAMMAR, REJECTION, Goaway, Message, Open
from paceline.protocol.vocabulary import Vocabulary

MAX_WAITING = 1024  # sessions without an edge, over all connections; the oldest go first
audit = logging.getLogger("paceline.audit")


class Guest(Protocol):
    """A connection, as far as the house knows it."""

    id: str

    def send(self, message: Message) -> None: ...

    def give_up(self, seat: Seat) -> None:
        """Its session goes on over another connection."""
        ...


@dataclass(frozen=True)
class Waiting:
    """A session whose edge is gone, whose it was, and until when it waits."""

    session: CloudSession
    owner: Owner
    end: float


@dataclass
class House:
    scheduler: Driver
    model: str
    vocabulary: Vocabulary
    context: int
    nodes: int = 1024
    sessions: int = 64  # of one connection
    session_ttl: float = 60.0
    grammars: Grammars | None = None  # None: no text can be kept to a grammar
    traits: tuple[str, ...] = ()  # features of `welcome` that come from what runs the target
    demand: Callable[[Open], None] = lambda opened: None  # raises ProtocolError for what the engine cannot honour
    spans: Spans | None = None  # None: nobody traces
    clock: Callable[[], float] = field(default=lambda: 0.0)
    bounds: Bounds = field(default_factory=Bounds)
    waiting: dict[str, Waiting] = field(default_factory=dict)  # by resume token
    open_connections: dict[Guest, None] = field(default_factory=dict)  # in the order of coming
    draining: bool = False
    owners: dict[str, Owner] = field(default_factory=dict)
    admission: Admission = field(init=False)
    seated: dict[str, tuple[Guest, Seat, Owner]] = field(default_factory=dict)  # by resume token

    def __post_init__(self) -> None:
        self.admission = Admission(self.scheduler, self.bounds, self.clock)

    @property
    def features(self) -> tuple[str, ...]:
        """What edges are told that this cloud can do, and what it does otherwise."""
        able = (
            (GRAMMAR, self.grammars is not None),
            (BACKUP, self.scheduler.drafts),
            (REJECTION, self.scheduler.rejects),
        )
        return (*self.traits, *(name for name, has in able if has))

    @property
    def connections(self) -> int:
        return len(self.open_connections)

    def enter(self, guest: Guest, owner: Owner) -> None:
        """A connection begins."""
        self.open_connections[guest] = None
        owner.connections += 1
        if self.spans is not None:
            self.spans.came(guest.id, owner.name)

    def leave(self, guest: Guest, owner: Owner) -> None:
        """It has ended, and its sessions were released."""
        self.open_connections.pop(guest, None)
        owner.connections -= 1
        if self.spans is not None:
            self.spans.went(guest.id)

    def owner(self, name: str = "", allowance: Allowance | None = None) -> Owner:
        """Whoever has the key of that name, with what it may do by now; without keys each connection is one."""
        if not name:
            return Owner.of("", allowance or Allowance(), self.bounds, self.clock)
        owner = self.owners.get(name)
        if owner is None or (allowance is not None and allowance != owner.allowance):
            fresh = Owner.of(name, allowance or Allowance(), self.bounds, self.clock)
            if owner is not None:  # the key file has changed: what runs still counts
                owner.allowance, owner.tokens = fresh.allowance, fresh.tokens
                return owner
            self.owners[name] = owner = fresh
        return owner

    def drain(self, seconds: float) -> None:
        """Take no new sessions; tell every edge that running ones may go on for that long. Those in the queue go elsewhere."""
        self.draining = True
        for connection in list(self.open_connections):
            connection.send(Goaway(reason="this verifier is going away", drain=seconds))
        for seat in self.admission.waiting:
            seat.on_error(
                ProtocolError(Code.OVERLOADED, "this verifier is going away", seat.session.sid, retry_after=0.5)
            )

    # ---- sessions

    def seat(self, guest: Guest, seat: Seat, owner: Owner) -> None:
        session = seat.session
        self.seated[session.resume_token] = (guest, seat, owner)
        if self.spans is not None:
            self.spans.seated(session.resume_token, guest.id, resumed=bool(session.committed))
        self.admission.enter(seat, owner)

    def unseat(self, seat: Seat, owner: Owner, *, keep: bool) -> None:
        """The session leaves its connection: to be resumed, or for good."""
        session = seat.session
        entry = self.seated.pop(session.resume_token, None)
        self.admission.leave(seat, owner)
        end = "detached" if keep else session.finish or "ended"
        figures = figures_of(session, owner, end, entry[0].id if entry else "")
        audit.info("session %s", end, extra={"figures": figures})
        if self.spans is not None:
            self.spans.left(session.resume_token, figures)
        if keep:
            self._leave(session, owner)

    def take(self, token: str, owner: Owner) -> CloudSession | None:
        """The session of that resume token, if it is this owner's: also away from a connection that looks alive but is not."""
        self.forget_old()
        if (found := self.seated.get(token)) is not None and found[2].name == owner.name:
            found[0].give_up(found[1])
        waiting = self.waiting.get(token)
        if waiting is None or waiting.owner.name != owner.name:
            return None
        del self.waiting[token]
        return waiting.session

    def _leave(self, session: CloudSession, owner: Owner) -> None:
        self.forget_old()
        while len(self.waiting) >= MAX_WAITING:
            del self.waiting[next(iter(self.waiting))]
        self.waiting[session.resume_token] = Waiting(session, owner, self.clock() + self.session_ttl)

    def forget_old(self) -> None:
        now = self.clock()
        for token in [t for t, w in self.waiting.items() if w.end < now]:
            del self.waiting[token]


def figures_of(session: CloudSession, owner: Owner, end: str, connection: str) -> dict[str, str | int]:
    """For the audit when a session ends or loses its edge. Whose, how much and how well: never what."""
    c = session.counters
    return {
        "key": owner.name,
        "connection": connection,
        "sid": session.sid,
        "session": session.resume_token[:6],
        "prompt_tokens": len(session.prompt),
        "tokens": len(session.committed),
        "steps": c.steps,
        "hits": c.hits,
        "verified": c.verified,
        "accepted": c.accepted,
        "end": end,
    }
