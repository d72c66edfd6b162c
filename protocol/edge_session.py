"""The device's side of one generation, without I/O: the text so far, the tree of candidates, which of them the cloud was sent.

    session = EdgeSession(prompt, sampling, max_tokens)
    open_message = session.open(sid)              # first time and after every reconnect alike, under a fresh sid
    events = session.receive(message)             # Opened, Commit, Error
    messages = session.send(nodes)                # candidates worth their bytes, as draft messages

Candidates live in `tree`; the planner adds them and picks from them. A node gets its number on the wire when it is
sent, and its parent is always sent before it. The session never decides what to draft; it keeps both ends' books
equal.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from paceline.protocol.cloud_session import WEIGHT_UNIT
from paceline.protocol.errors import Code, ProtocolError
from paceline.protocol.messages import (
    MAX_NODES_A_DRAFT,
    NODE_WINDOW,
    Cancel,
    Commit,
    Draft,
    Error,
    Message,
    Open,
    Opened,
)
from paceline.protocol.sampling import History, Sampling
from paceline.protocol.tree import State, Tree

_BYTES_A_NODE = 10  # token and parent in at most five and three bytes, weight in one
_NODES_A_MESSAGE = min(MAX_NODES_A_DRAFT, 900 // _BYTES_A_NODE)  # keeps a draft message under 1 KB


class Phase(Enum):
    OPENING = "opening"  # `open` is on its way, or has to be sent again
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Committed:
    """New tokens of the text. `walked` are the tree's nodes among them, `commit` the message with the step's figures."""

    tokens: tuple[int, ...]
    walked: tuple[int, ...]
    commit: Commit


class EdgeSession:
    def __init__(
        self,
        prompt: Iterable[int],
        sampling: Sampling,
        max_tokens: int,
        stop_ids: Iterable[int] = (),
        logprobs: int | None = None,
    ) -> None:
        self.sid = -1  # none yet
        self.prompt = tuple(prompt)
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.stop_ids = tuple(stop_ids)
        self.logprobs = logprobs
        self.committed: list[int] = []
        self.phase = Phase.OPENING
        self.finish = ""
        self.error: ProtocolError | None = None
        self.tree = Tree(self.prompt[-1] if self.prompt else 0)
        self.history = History(self.prompt) if sampling.penalised else None
        self._resume = ""
        self._numbers: dict[int, int] = {}  # node -> its number on the wire
        self._next_number = 0

    @property
    def position(self) -> int:
        """Absolute position of the first token that is not committed yet."""
        return len(self.prompt) + len(self.committed)

    def sent(self, node: int) -> bool:
        return node in self._numbers

    # ---- messages out

    def open(self, sid: int) -> Open:
        """Start, or go on after the link or the verifier was lost: the session is rebuilt from what is held here.

        `sid` is one that this connection has not seen, so that nothing sent before can be taken for this session's.
        """
        self.sid, self.phase = sid, Phase.OPENING
        self._numbers, self._next_number = {}, 0
        return Open(
            sid=self.sid,
            prompt=self.prompt,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop_ids=self.stop_ids,
            held=tuple(self.committed),
            resume=self._resume,
            logprobs=self.logprobs,
        )

    def send(self, nodes: Iterable[int]) -> list[Draft]:
        """Draft messages for those of `nodes` that are live and not yet sent. Each one's parent is sent, or comes before it."""
        assert self.phase is Phase.RUNNING
        new = [n for n in nodes if n not in self._numbers and self.tree.state(n) is State.LIVE and n != self.tree.root]
        return [self._draft(new[i : i + _NODES_A_MESSAGE]) for i in range(0, len(new), _NODES_A_MESSAGE)]

    def cancel(self) -> Cancel:
        self.finish, self.phase = "cancelled", Phase.DONE
        return Cancel(sid=self.sid)

    def _draft(self, nodes: list[int]) -> Draft:
        first, parents, weights = self._next_number, [], bytearray()
        for node in nodes:
            parent = self.tree.parent(node)
            number = self._next_number
            back = 0 if parent == self.tree.root else number - self._numbers[parent]
            assert 0 <= back <= NODE_WINDOW, "the tree is pruned long before its numbers run out"
            parents.append(back)
            weights.append(_weight_byte(self.tree.weight(node) - self.tree.weight(parent)))
            self._numbers[node] = number
            self._next_number += 1
        tokens = tuple(map(self.tree.token, nodes))
        return Draft(
            sid=self.sid,
            base_committed_len=len(self.committed),
            first=first,
            parents=tuple(parents),
            tokens=tokens,
            weights=bytes(weights),
        )

    # ---- messages in

    def receive(self, message: Message) -> list[Committed]:
        """Take a message of this session in. Raises ProtocolError if the cloud contradicts itself or what is held here."""
        if self.phase in (Phase.DONE, Phase.FAILED) or getattr(message, "sid", None) != self.sid:
            return []  # what was on its way when the session ended, or was opened anew
        match message:
            case Opened():
                self._resume, self.phase = message.resume, Phase.RUNNING
            case Commit():
                return self._receive_commit(message)
            case Error():
                self.phase = Phase.FAILED
                self.error = ProtocolError(message.code, message.message, self.sid, retry_after=message.retry_after)
        return []

    def _receive_commit(self, commit: Commit) -> list[Committed]:
        if self.phase is Phase.OPENING:
            raise ProtocolError(Code.BAD_STATE, "tokens came before the session was opened", self.sid)
        known = len(self.committed) - commit.base
        if known < 0:
            text = f"tokens {len(self.committed)} to {commit.base} never came"
            raise ProtocolError(Code.BAD_BASE, text, self.sid)
        if tuple(self.committed[commit.base :])[: len(commit.tokens)] != commit.tokens[:known]:
            raise ProtocolError(Code.DIVERGED, f"the cloud changed its mind about token {commit.base}", self.sid)
        tokens = commit.tokens[known:]
        events = [Committed(tokens, self._advance(tokens), commit)] if tokens else []
        if commit.finish:
            self.finish, self.phase = commit.finish, Phase.DONE
        return events

    def _advance(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        self.committed.extend(tokens)
        if self.history is not None:
            self.history.extend(tokens)
        walked = self.tree.advance(tokens)
        self.tree.forget(len(self.committed) - 1)
        if len(self._numbers) > NODE_WINDOW:
            self._numbers = {n: k for n, k in self._numbers.items() if self.tree.state(n) is not State.DEAD}
        return tuple(walked)


def _weight_byte(log_probability: float) -> int:
    return min(255, max(0, math.floor(-log_probability / WEIGHT_UNIT + 0.5)))
