"""One edge's connection: frames in, frames out, its sessions. Transport, clock and scheduler are passed in.

    connection = Connection(channel, house)
    await connection.serve()      # until the edge goes

A frame that breaks the protocol is answered with an error and, where it concerns one session, ends that one; only a
wrong version or vocabulary ends the connection. When the edge goes, its sessions wait in the house for `session_ttl`
to be resumed.
"""

import asyncio
import itertools
import secrets

from paceline.cloud.grammar import Constraint
from paceline.cloud.house import MAX_WAITING, House
from paceline.cloud.limits import Owner
from paceline.cloud.scheduler import Seat
from paceline.protocol.channel import Channel, ChannelClosed
from paceline.protocol.cloud_session import CloudSession, Limits
from paceline.protocol.codec import decode_from_edge, encode
from paceline.protocol.errors import FATAL, HARMLESS, REFUSALS, Code, ProtocolError
from paceline.protocol.messages import (
    REJECTION,
    VERSION,
    Ack,
    Cancel,
    Commit,
    Draft,
    Error,
    Hello,
    Message,
    Open,
    Opened,
    Ping,
    Pong,
    Welcome,
)

__all__ = ["MAX_VIOLATIONS", "MAX_WAITING", "OUTBOX", "Connection", "House"]

MAX_VIOLATIONS = 100  # wrong frames before the connection is closed
OUTBOX = 4096  # frames waiting for a slow reader before it is taken for gone
FRAMES_A_TURN = 2  # of one connection, before the others have their turn: thousands may have come at once
PAUSE = 0.02  # seconds that who sends too fast is not read at least: a wait for each frame costs more than the frame


class Connection:
    def __init__(self, channel: Channel, house: House, owner: Owner | None = None) -> None:
        self._channel, self._house = channel, house
        self._owner = owner or house.owner()
        self.id = secrets.token_hex(4)  # for logs
        self._seats: dict[int, Seat] = {}
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(OUTBOX)
        self._greeted = False
        self._last_sid = -1
        self._closing: asyncio.Future[None] | None = None
        self._violations = 0

    async def serve(self) -> None:
        """Answer frames until the edge goes or has to go."""
        writer = asyncio.create_task(self._write())
        self._house.enter(self, self._owner)
        try:
            for count in itertools.count(1):
                if not self._handle_frame(await self._receive_frame()):
                    break
                if (wait := self._owner.messages.wait()) > 0:
                    await asyncio.sleep(max(wait, PAUSE))  # who sends faster than agreed is read no faster
                elif count % FRAMES_A_TURN == 0:
                    await asyncio.sleep(0)  # a frame that is there already is received without a pause
            async with asyncio.timeout(5):
                await self._outbox.join()
        except (ChannelClosed, TimeoutError):
            pass
        finally:
            writer.cancel()
            for seat in list(self._seats.values()):
                self._release(seat, keep=True)
            self._house.leave(self, self._owner)
            await self._channel.close()

    async def _receive_frame(self) -> bytes | str:
        async with asyncio.timeout(self._house.bounds.idle_seconds):
            frame = await self._channel.receive()
        self._owner.messages.take(1)
        return frame

    async def _write(self) -> None:
        try:
            while True:
                frame = await self._outbox.get()
                await self._channel.send(frame)
                self._outbox.task_done()
        except ChannelClosed:
            pass

    def send(self, message: Message) -> None:
        try:
            self._outbox.put_nowait(encode(message))
        except asyncio.QueueFull:
            self._closing = asyncio.ensure_future(self._channel.close("this edge does not read what it asked for"))

    # ---- frames in

    def _handle_frame(self, frame: bytes | str) -> bool:
        """False if the connection has to end."""
        try:
            self._handle(decode_from_edge(frame))
        except ProtocolError as e:
            self._refuse(e)
            self._violations += e.code not in HARMLESS | REFUSALS
            return e.code not in FATAL and self._violations < MAX_VIOLATIONS
        return True

    def _handle(self, message: Message) -> None:
        if not self._greeted and not isinstance(message, Hello):
            raise ProtocolError(Code.BAD_STATE, "the first message is hello", getattr(message, "sid", None))
        match message:
            case Hello():
                self._hello(message)
            case Open():
                self._open(message)
            case Draft():
                self._receive(message)
            case Ack() if (seat := self._seats.get(message.sid)) is not None:
                seat.session.expect_nothing(message.committed_len)
                self._house.scheduler.wake()
            case Cancel():
                self._cancel(message)
            case Ping():
                self.send(Pong(time=message.time))
                self._end_idle()

    def _hello(self, hello: Hello) -> None:
        own = self._house.vocabulary
        if self._greeted:
            raise ProtocolError(Code.BAD_STATE, "hello comes once")
        if VERSION not in hello.versions:
            raise ProtocolError(
                Code.VERSION, f"this verifier speaks version {VERSION}, the edge {list(hello.versions)}"
            )
        if hello.fingerprint != own.fingerprint:
            text = (
                f"the edge has the vocabulary {hello.vocabulary!r} ({hello.vocabulary_size} tokens), this verifier"
                f" {own.name!r} ({own.size} tokens): token ids would not mean the same text"
            )
            raise ProtocolError(Code.VOCABULARY, text)
        self._greeted = True
        self.send(
            Welcome(
                version=VERSION,
                model=self._house.model,
                vocabulary_size=own.size,
                fingerprint=own.fingerprint,
                context=self._context,
                width=self._house.scheduler.width,
                nodes=self._house.nodes,
                sessions=self._house.sessions,
                session_ttl=self._house.session_ttl,
                verify_floor=self._house.scheduler.floor,
                features=self._house.features,
            )
        )

    def _open(self, opened: Open) -> None:
        if opened.sid <= self._last_sid:
            text = f"session {opened.sid} was opened before; numbers of sessions only go up within a connection"
            raise ProtocolError(Code.DUPLICATE_SESSION, text, opened.sid)
        if len(self._seats) >= self._house.sessions:
            text = f"this connection has {len(self._seats)} sessions open, its limit"
            raise ProtocolError(Code.SESSION_LIMIT, text, opened.sid, retry_after=1.0)
        if self._house.draining:
            text = "this verifier is going away and takes no new sessions; another one will"
            raise ProtocolError(Code.OVERLOADED, text, opened.sid, retry_after=1.0)
        self._owner.check(opened.sid)
        self._house.admission.check(opened.sid)
        self._house.demand(opened)
        constraint = self._constraint(opened)
        if opened.rule == REJECTION and REJECTION not in self._house.features:
            text = f"{self._house.model} cannot verify draws, as the rule {REJECTION!r} needs; open without a rule"
            raise ProtocolError(Code.UNSUPPORTED, text, opened.sid)
        session, missed = self._resumed(opened)
        self._owner.spend(len(opened.prompt))
        seat = Seat(
            session, on_commit=self._commit, on_error=self._failed, pause=self._owner.pause, constraint=constraint
        )
        self._seats[opened.sid] = seat
        self._last_sid = opened.sid
        committed, left = len(session.committed), session.max_tokens
        self.send(Opened(sid=opened.sid, committed_len=committed, resume=session.resume_token, max_tokens=left))
        for commit in missed:
            self._commit(commit)
        if not session.finish:
            self._house.seat(self, seat, self._owner)

    def _constraint(self, opened: Open) -> Constraint | None:
        if not opened.grammar:
            return None
        if self._house.grammars is None:
            raise ProtocolError(Code.UNSUPPORTED, "this verifier does not keep texts to a grammar", opened.sid)
        try:
            return self._house.grammars.constraint(opened.grammar)
        except ProtocolError as e:
            raise ProtocolError(e.code, e.message, opened.sid) from None

    def _resumed(self, opened: Open) -> tuple[CloudSession, list[Commit]]:
        """The very session this edge had before its link was cut, if it still waits; a new one otherwise.

        With the commits that tell the edge what it missed.
        """
        session = self._house.take(opened.resume, self._owner) if opened.resume else None
        if session is not None and session.continues(opened):
            return session, session.resume(opened)
        limits = Limits(self._house.vocabulary.size, self._context, self._house.nodes)
        session = CloudSession(opened, limits, secrets.token_urlsafe(16))
        return session, session.catch_up(len(opened.held))

    @property
    def _context(self) -> int:
        own = self._owner.allowance.context
        return self._house.context if own is None else min(own, self._house.context)

    def _receive(self, draft: Draft) -> None:
        """Nodes of a session that has just ended are no fault: they were on their way."""
        seat = self._seats.get(draft.sid)
        if seat is not None:
            seat.session.receive(draft)
            self._house.scheduler.wake()
        elif draft.sid > self._last_sid:
            raise ProtocolError(Code.UNKNOWN_SESSION, f"session {draft.sid} was never opened", draft.sid)

    def _cancel(self, message: Cancel) -> None:
        seat = self._seats.get(message.sid)
        if seat is None:
            return
        session = seat.session
        session.cancel()
        self._commit(Commit(sid=message.sid, base=len(session.committed), tokens=(), finish=session.finish))

    # ---- sessions out

    def _commit(self, commit: Commit) -> None:
        self.send(commit)
        self._owner.spend(len(commit.tokens) if commit.step else 0)
        if commit.finish:
            self._release(self._seats[commit.sid], keep=False)

    def _failed(self, error: ProtocolError) -> None:
        assert error.sid is not None
        self._refuse(error)

    def _refuse(self, error: ProtocolError) -> None:
        self.send(
            Error(
                code=error.code,
                message=error.message[:2000],
                sid=error.sid,
                retryable=error.retryable,
                retry_after=error.retry_after,
            )
        )
        if error.sid in self._seats and error.code not in HARMLESS | {Code.DUPLICATE_SESSION}:
            self._release(self._seats[error.sid], keep=error.retryable)

    def _end_idle(self) -> None:
        """Sessions that wait for their edge to say what has arrived, for too long, give their places to others."""
        house = self._house
        for seat in list(self._seats.values()):
            if seat.unheard and house.clock() - seat.since > house.bounds.idle_seconds:
                text = f"nothing was acknowledged for {house.bounds.idle_seconds:.0f} s"
                self._refuse(ProtocolError(Code.IDLE, text, seat.session.sid))

    def give_up(self, seat: Seat) -> None:
        """Its session goes on over another connection; this one hears no more of it."""
        self._release(seat, keep=True)

    def _release(self, seat: Seat, *, keep: bool) -> None:
        del self._seats[seat.session.sid]
        self._house.unseat(seat, self._owner, keep=keep)
