"""The cloud's side of one generation, without I/O: what was committed, the tree of what the edge drafted, when to stop.

    session = CloudSession(open_message, limits, resume_token)     # or ProtocolError
    session.receive(draft_message)                                 # grows the tree, or ProtocolError
    plan = session.plan(width)                                     # the nodes to verify in the next step
    commit = session.apply(plan, walk)                             # what the target chose: the tree is eaten, tokens are final

Why the text cannot depend on the tree. The target's choice at a position is a pure function of its logits there and of
(seed, position); `walk` follows a drafted node only where its token *equals* that choice. So `apply` commits the target's own
choices, as many as it could read off in one step: the tree decides how many, never which.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.protocol.errors import Code, ProtocolError
from paceline.protocol.messages import MAX_COMMIT, NODE_WINDOW, Commit, Draft, Open
from paceline.protocol.sampling import History
from paceline.protocol.tree import State, Tree

WEIGHT_UNIT = 1 / 16  # nats a step of the one-byte weights of a draft message


@dataclass(frozen=True)
class Limits:
    """What one session may ask for. `context` counts prompt and text."""

    vocabulary: int
    context: int
    nodes: int = 1024


@dataclass(frozen=True)
class Plan:
    """Nodes to verify: `tokens[i]` grows on node `parents[i]` of this plan, -1 being the last committed token."""

    nodes: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


@dataclass(frozen=True)
class Walk:
    """The target's walk: which nodes of the plan it went through, and the token it chose at the end of them.

    `logprobs[k]`, if asked for, are (token, log-probability) pairs for the k-th token committed: the chosen one, then the top.
    """

    accepted: tuple[int, ...]
    token: int
    logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass
class Counters:
    """Whole-session figures for metrics and tests."""

    steps: int = 0
    hits: int = 0  # steps that began with at least one node held
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    stale: int = 0


class CloudSession:
    def __init__(self, opened: Open, limits: Limits, resume_token: str) -> None:
        _check(opened, limits)
        self.sid = opened.sid
        self.prompt: tuple[int, ...] = opened.prompt
        self.sampling = opened.sampling
        self.logprobs = opened.logprobs
        self.stop_ids = frozenset(opened.stop_ids)
        self.max_tokens = min(opened.max_tokens, limits.context - len(opened.prompt))
        self.resume_token = resume_token
        self.committed: list[int] = list(opened.held)
        self.acknowledged = len(opened.held)
        self.history = History(opened.prompt, opened.held) if opened.sampling.penalised else None
        self.finish = self._finish_of_held()
        self.counters = Counters()
        self._limits = limits
        self._restart_tree()

    def _restart_tree(self) -> None:
        root = self.committed[-1] if self.committed else self.prompt[-1]
        self.tree = Tree(root, len(self.committed) - 1)
        self._nodes: dict[int, int] = {}  # the edge's node number -> id in the tree
        self._written: dict[int, int] = {}  # number of a node that came late but agreed -> text length just after it
        self._next_number = 0
        self._stale_to_report = 0

    @property
    def position(self) -> int:
        """Absolute position of the token that the target chooses next."""
        return len(self.prompt) + len(self.committed)

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.committed]

    # ---- what arrives

    def receive(self, draft: Draft) -> None:
        """Take drafted nodes in. Late ones that agree with what was committed since are kept, others counted as stale."""
        if len(draft.tokens) != len(draft.parents) or len(draft.weights) not in (0, len(draft.tokens)):
            raise ProtocolError(Code.BAD_MESSAGE, "draft: parents, tokens and weights differ in length", self.sid)
        if draft.first > self._next_number + NODE_WINDOW:
            raise ProtocolError(Code.BAD_PARENT, f"draft: node numbers jump to {draft.first}", self.sid)
        self.acknowledge(draft.base_committed_len)
        weights = draft.weights or bytes(len(draft.tokens))
        for i, (back, token, weight) in enumerate(zip(draft.parents, draft.tokens, weights, strict=True)):
            self._receive_node(draft.first + i, back, draft.base_committed_len, token, -weight * WEIGHT_UNIT)
        self._let_go_of_old_numbers()

    def acknowledge(self, committed_len: int) -> None:
        """The edge has the first `committed_len` tokens."""
        if committed_len > len(self.committed):
            text = f"{committed_len} tokens claimed, but {len(self.committed)} are committed"
            raise ProtocolError(Code.BAD_BASE, text, self.sid)
        self.acknowledged = max(self.acknowledged, committed_len)

    def cancel(self) -> None:
        self.finish = self.finish or "cancelled"

    def _receive_node(self, number: int, back: int, base: int, token: int, log_probability: float) -> None:
        if token >= self._limits.vocabulary:
            raise ProtocolError(Code.BAD_TOKEN, f"draft: token {token} is not in the vocabulary", self.sid)
        if back > number:
            raise ProtocolError(Code.BAD_PARENT, f"draft: node {number} has its parent {back} numbers back", self.sid)
        if number < self._next_number:
            return  # a frame came twice, or was overtaken
        self._next_number = number + 1
        self.counters.drafted += 1
        if not self._place(number, base if back == 0 else None, number - back, token, log_probability):
            self.counters.stale += 1
            self._stale_to_report += 1

    def _place(self, number: int, length: int | None, parent_number: int, token: int, log_probability: float) -> bool:
        """Put a node below its parent, which is the text of that `length` or a node. False if that place is gone."""
        parent = self.tree.root
        if length is None:
            length = self._written.get(parent_number)
        if length is None:
            parent = self._nodes.get(parent_number, -1)
            if parent < 0 or self.tree.state(parent) is State.DEAD:
                return False
            if self.tree.state(parent) is State.COMMITTED:
                length = self.tree.position(parent) + 1
        if length is not None and length < len(self.committed):
            if self.committed[length] == token:
                self._written[number] = length + 1
            return self.committed[length] == token
        if length is not None:
            parent = self.tree.root
        if self.tree.child(parent, token) is not None:
            return False
        if len(self.tree) >= self._limits.nodes:
            raise ProtocolError(Code.TREE_LIMIT, f"more than {self._limits.nodes} nodes held", self.sid)
        self._nodes[number] = self.tree.add(parent, token, log_probability)
        return True

    def _let_go_of_old_numbers(self) -> None:
        if len(self._nodes) + len(self._written) > 2 * NODE_WINDOW:
            oldest = self._next_number - NODE_WINDOW
            self._nodes = {k: v for k, v in self._nodes.items() if k >= oldest}
            self._written = {k: v for k, v in self._written.items() if k >= oldest}

    # ---- the step

    def plan(self, width: int) -> Plan:
        """The likeliest connected subtree of at most `width` nodes. Its leaves stop short of `max_tokens`."""
        nodes = self.tree.best(width, exclude_from=self.max_tokens - 1)
        index = {node: i for i, node in enumerate(nodes)}
        parents = tuple(index.get(self.tree.parent(node), -1) for node in nodes)
        return Plan(tuple(nodes), tuple(map(self.tree.token, nodes)), parents)

    def apply(self, plan: Plan, walk: Walk, step: float = 0.0) -> Commit:
        """Commit what the target chose in a step that took `step` seconds; ends the session where it must end."""
        base, held = len(self.committed), len(plan.nodes)
        tokens = [plan.tokens[i] for i in walk.accepted] + [walk.token]
        assert len(tokens) <= MAX_COMMIT
        tokens = self._cut(tokens)
        self.committed.extend(tokens)
        if self.history is not None:
            self.history.extend(tokens)
        self.tree.advance(tokens)
        self.tree.forget(self.acknowledged - 1)
        accepted = min(len(walk.accepted), len(tokens))
        self._count(held, accepted)
        stale, self._stale_to_report = self._stale_to_report, 0
        return Commit(
            sid=self.sid,
            base=base,
            tokens=tuple(tokens),
            accepted=accepted,
            held=held,
            verified=held,
            stale=stale,
            step=step,
            finish=self.finish,
            logprobs=walk.logprobs[: len(tokens)],
        )

    def catch_up(self, held: int) -> list[Commit]:
        """Commits that bring an edge which holds `held` tokens up to date, the last one with how the session ended."""
        ranges = range(held, len(self.committed), MAX_COMMIT)
        out = [Commit(sid=self.sid, base=i, tokens=tuple(self.committed[i : i + MAX_COMMIT])) for i in ranges]
        if self.finish:
            last = out.pop() if out else Commit(sid=self.sid, base=held, tokens=())
            out.append(Commit(sid=self.sid, base=last.base, tokens=last.tokens, finish=self.finish))
        return out

    def continues(self, opened: Open) -> bool:
        """Whether `opened` asks to go on with this very generation."""
        return (
            opened.prompt == self.prompt
            and opened.sampling == self.sampling
            and opened.max_tokens >= self.max_tokens
            and self.committed[: len(opened.held)] == list(opened.held)
        )

    def reattach(self, opened: Open) -> None:
        """Go on under a new session number, for an edge that holds `opened.held` and numbers its nodes from zero."""
        self.sid = opened.sid
        self.acknowledged = len(opened.held)
        self._restart_tree()

    def _cut(self, tokens: Sequence[int]) -> list[int]:
        """`tokens` up to the first stop token or the limit, whichever comes first; a stop on the limit counts as a stop."""
        room = self.max_tokens - len(self.committed)
        for i, token in enumerate(tokens[:room]):
            if token in self.stop_ids:
                self.finish = "stop"
                return list(tokens[: i + 1])
        if len(tokens) >= room:
            self.finish = "length"
        return list(tokens[:room])

    def _finish_of_held(self) -> str:
        if self.committed and self.committed[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.committed) >= self.max_tokens else ""

    def _count(self, held: int, accepted: int) -> None:
        c = self.counters
        c.steps += 1
        c.hits += held > 0
        c.verified += held
        c.accepted += accepted


def _check(opened: Open, limits: Limits) -> None:
    """Refuse what cannot be generated, with the reason."""
    sid = opened.sid
    if not opened.prompt:
        raise ProtocolError(Code.BAD_PROMPT, "the prompt is empty", sid)
    if any(t >= limits.vocabulary for t in (*opened.prompt, *opened.held)):
        raise ProtocolError(Code.BAD_TOKEN, "the prompt holds a token that is not in the vocabulary", sid)
    if len(opened.prompt) >= limits.context:
        text = f"the prompt has {len(opened.prompt)} tokens; the model's context here is {limits.context}"
        raise ProtocolError(Code.CONTEXT, text, sid)
    if len(opened.held) > opened.max_tokens:
        raise ProtocolError(Code.BAD_MESSAGE, "open: held is longer than max_tokens", sid)
    if any(t in opened.stop_ids for t in opened.held[:-1]):
        raise ProtocolError(Code.BAD_MESSAGE, "open: held goes on after a stop token", sid)
    if opened.rule != "coupled":
        raise ProtocolError(Code.UNSUPPORTED, f"rule {opened.rule!r} is not offered here; 'coupled' is", sid)
