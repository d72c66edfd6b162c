"""The device's side of one generation, without I/O: the text so far, the tree of candidates, which of them the cloud was sent.

    session = EdgeSession(request)
    open_message = session.open(sid)              # first time and after every reconnect alike, under a fresh sid
    events = session.receive(message)             # Opened, Commit, Error
    messages = session.send(nodes)                # candidates worth their bytes, as draft messages

Candidates live in `tree`; the planner adds them and picks from them. A node gets its number on the wire when it is
sent, and its parent is always sent before it. The session never decides what to draft; it keeps both ends' books
equal.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from paceline.protocol.cost import Patience
from paceline.protocol.errors import HARMLESS, Code, ProtocolError
from paceline.protocol.messages import (
    COUPLED,
    MAX_PROPOSALS,
    NODE_WINDOW,
    REJECTION,
    WEIGHT_UNIT,
    Ack,
    Cancel,
    Commit,
    Draft,
    Error,
    Message,
    Open,
    Opened,
)
from paceline.protocol.proposal import Proposal
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import History
from paceline.protocol.tree import State, Tree

_BYTES_A_NODE = 10  # token and parent in at most five and three bytes, weight in one
_BYTES_A_PROPOSAL, _BYTES_A_CHANCE = 8, 6  # a token in at most five bytes, its count in one
_BYTES_A_MESSAGE = 900  # keeps a draft message under 1 KB


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


@dataclass(frozen=True)
class Family:
    """Children of one node that were drawn together: they are sent together, in this order. `nodes` may have died since."""

    nodes: tuple[int, ...]
    proposal: Proposal


class EdgeSession:
    def __init__(
        self,
        request: GenerationRequest,
        *,
        rule: str = COUPLED,
        vocabulary_size: int = 2**31,
    ) -> None:
        self.sid = -1  # none yet
        self.prompt, self.sampling = request.prompt, request.sampling
        self.max_tokens, self.stop_ids = request.max_tokens, request.stop_ids
        self.rule = rule
        self.patience = Patience()  # see `Open`
        self.vocabulary_size = vocabulary_size
        self.committed: list[int] = []
        self.phase = Phase.OPENING
        self.finish = ""
        self.error: ProtocolError | None = None
        self.tree = Tree(self.prompt[-1] if self.prompt else 0)
        self.history = History(self.prompt) if self.sampling.penalised else None
        self._request, self._resume = request, ""
        self._families: dict[int, Family] = {}  # by node
        self._numbers: dict[int, int] = {}  # node -> its number on the wire
        self._next_number = 0

    def restore(self, held: Iterable[int], resume: str = "") -> None:
        """Before the first `open`: go on with a generation of which `held` is known, from another process of this device."""
        assert self.sid < 0, "nothing was opened yet"
        self._advance(tuple(held))
        self._resume = resume

    @property
    def resume(self) -> str:
        """The token by which the cloud knows this session; empty before `opened`."""
        return self._resume

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
            rule=self.rule,
            held=tuple(self.committed),
            resume=self._resume,
            logprobs=self._request.logprobs,
            grammar=self._request.grammar,
            patience=self.patience.longest,
            response=self.patience.response,
            row=self.patience.row,
        )

    def drew(self, nodes: Sequence[int], tokens: Sequence[int], counts: bytes) -> None:
        """`nodes`, new children of one node, were drawn in this order without replacement from counts over `tokens`.

        With randomness that nothing else has seen; whether a node is sent must not depend on which token it holds.
        """
        assert self.rule == REJECTION
        family = Family(tuple(nodes), Proposal(len(nodes), tuple(tokens), counts))
        assert not family.proposal.fault([self.tree.token(n) for n in nodes])
        self._families.update(dict.fromkeys(nodes, family))

    def whole(self, nodes: Iterable[int]) -> list[int]:
        """`nodes` in their order, each once, with all that were drawn together with one of them beside it."""
        out: dict[int, None] = {}
        for node in nodes:
            family = self._families.get(node)
            out.update(dict.fromkeys((node,) if family is None else family.nodes))
        return list(out)

    def send(self, nodes: Iterable[int]) -> list[Draft]:
        """Draft messages for those of `nodes` that are live and not yet sent. Each one's parent is sent, or comes before it.

        What was drawn together is sent together. Left out are nodes whose parent's number lies too far back to be named:
        that takes thousands of nodes in between.
        """
        assert self.phase is Phase.RUNNING
        groups = []
        for node in nodes:
            if node in self._numbers or self.tree.state(node) is not State.LIVE or node == self.tree.root:
                continue
            group = tuple(self.whole((node,)))
            if self._back(node, self._next_number + len(group) - 1) is not None:
                groups.append(group)
                self._numbers.update({n: self._next_number + i for i, n in enumerate(group)})
                self._next_number += len(group)
        return [self._draft(message) for message in _messages(groups, self._families)]

    def ack(self) -> Ack:
        """What the edge has; drafts say it too, so this is for an edge that has nothing to draft."""
        return Ack(sid=self.sid, committed_len=len(self.committed))

    def cancel(self) -> Cancel:
        self.finish, self.phase = self.finish or "cancelled", Phase.DONE
        return Cancel(sid=self.sid)

    def _back(self, node: int, number: int) -> int | None:
        """How many numbers before `number`, its own, the parent of `node` lies; 0: the committed text; None: out of reach."""
        parent = self.tree.parent(node)
        if parent == self.tree.root:
            return 0
        named = self._numbers.get(parent)
        return number - named if named is not None and number - named <= NODE_WINDOW else None

    def _draft(self, groups: Sequence[tuple[int, ...]]) -> Draft:
        nodes = [node for group in groups for node in group]
        numbers = [self._numbers[node] for node in nodes]
        weigh = self.tree.weight
        families = [self._families.get(group[0]) for group in groups]
        return Draft(
            sid=self.sid,
            base_committed_len=len(self.committed),
            first=numbers[0],
            parents=tuple(self._back(node, number) or 0 for node, number in zip(nodes, numbers, strict=True)),
            tokens=tuple(map(self.tree.token, nodes)),
            weights=bytes(_weight_byte(weigh(node) - weigh(self.tree.parent(node))) for node in nodes),
            proposals=tuple(Proposal(1) if f is None else f.proposal for f in families) if any(families) else (),
        )

    # ---- messages in

    def receive(self, message: Message) -> list[Committed]:
        """Take a message of this session in. Raises ProtocolError if the cloud contradicts itself or what is held here.

        After that the session has failed, as it has after an error message that is not harmless: see `error`.
        """
        if self.phase in (Phase.DONE, Phase.FAILED) or getattr(message, "sid", None) != self.sid:
            return []  # what was on its way when the session ended, or was opened anew
        match message:
            case Opened():
                self._receive_opened(message)
            case Commit():
                return self._receive_commit(message)
            case Error() if message.code not in HARMLESS | {Code.DUPLICATE_SESSION}:
                self._fail(message.code, message.message, message.retry_after)
        return []

    def _receive_opened(self, opened: Opened) -> None:
        if opened.committed_len < len(self.committed):
            text = f"the cloud begins at token {opened.committed_len}, but {len(self.committed)} are held here"
            raise self._fail(Code.BAD_BASE, text)
        self._resume, self.phase = opened.resume, Phase.RUNNING

    def _receive_commit(self, commit: Commit) -> list[Committed]:
        if self.phase is Phase.OPENING:
            raise self._fail(Code.BAD_STATE, "tokens came before the session was opened")
        known = len(self.committed) - commit.base
        if known < 0:
            raise self._fail(Code.BAD_BASE, f"tokens {len(self.committed)} to {commit.base} never came")
        if tuple(self.committed[commit.base : commit.base + len(commit.tokens)]) != commit.tokens[:known]:
            raise self._fail(Code.DIVERGED, f"the cloud changed its mind about what follows token {commit.base}")
        tokens = commit.tokens[known:]
        if len(self.committed) + len(tokens) > self.max_tokens:
            raise self._fail(
                Code.BAD_MESSAGE, f"the cloud wrote more than the {self.max_tokens} tokens it was asked for"
            )
        if tokens and max(tokens) >= self.vocabulary_size:
            raise self._fail(Code.BAD_TOKEN, f"the cloud wrote token {max(tokens)}, which is not in the vocabulary")
        events = [Committed(tokens, self._advance(tokens), commit)] if tokens else []
        if commit.finish:
            self.finish, self.phase = commit.finish, Phase.DONE
        return events

    def _fail(self, code: Code, text: str, retry_after: float | None = None) -> ProtocolError:
        self.phase, self.error = Phase.FAILED, ProtocolError(code, text, self.sid, retry_after=retry_after)
        return self.error

    def _advance(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        self.committed.extend(tokens)
        if self.history is not None:
            self.history.extend(tokens)
        walked = self.tree.advance(tokens)
        self.tree.forget(len(self.committed) - 1)
        if len(self._numbers) > NODE_WINDOW:
            self._numbers = {n: k for n, k in self._numbers.items() if self.tree.state(n) is not State.DEAD}
        if len(self._families) > 2 * len(self.tree):
            self._families = {n: f for n, f in self._families.items() if self.tree.state(n) is State.LIVE}
        return tuple(walked)


def _messages(groups: Iterable[tuple[int, ...]], families: Mapping[int, Family]) -> Iterator[list[tuple[int, ...]]]:
    """Groups of nodes, as many to a message as fit."""
    message: list[tuple[int, ...]] = []
    size = 0
    for group in groups:
        family = families.get(group[0])
        more = _BYTES_A_NODE * len(group)
        if family is not None:
            more += _BYTES_A_PROPOSAL + _BYTES_A_CHANCE * len(family.proposal.tokens)
        if message and (size + more > _BYTES_A_MESSAGE or (families and len(message) == MAX_PROPOSALS)):
            yield message
            message, size = [], 0
        message.append(group)
        size += more
    if message:
        yield message


def _weight_byte(log_probability: float) -> int:
    return min(255, max(0, math.floor(-log_probability / WEIGHT_UNIT + 0.5)))
