"""The cloud's side of one generation, without I/O: what was committed, the tree of what the edge drafted, when to stop.

    session = CloudSession(open_message, limits, resume_token)     # or ProtocolError
    session.receive(draft_message)                                 # grows the tree, or ProtocolError
    plan = session.plan(width)                                     # the nodes to verify in the next step
    commit = session.apply(plan, walk)                             # what the target chose: the tree is eaten, tokens are final
    if session.continues(open_message):                            # after a cut: the same request, under a new sid
        commits = session.resume(open_message)

Why the text cannot depend on the tree. The target's choice at a position is a pure function of its logits there and of
(seed, position); `walk` follows a drafted node only where its token *equals* that choice. So `apply` commits the target's own
choices, as many as it could read off in one step: the tree decides how many, never which.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from paceline.protocol.cost import Patience
from paceline.protocol.errors import Code, ProtocolError
from paceline.protocol.messages import MAX_COMMIT, NODE_WINDOW, WEIGHT_UNIT, Commit, Draft, Open
from paceline.protocol.sampling import History
from paceline.protocol.tree import State, Tree

Logprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Limits:
    """What one session may ask for. `context` counts prompt and text."""

    vocabulary: int
    context: int
    nodes: int = 1024


@dataclass(frozen=True)
class Plan:
    """Nodes to verify: `tokens[i]` grows on node `parents[i]` of this plan, -1 being the last committed token.

    `base` is the length of the text that the plan was made for, `held` how many nodes there were to choose from.
    """

    nodes: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    base: int | None = None
    held: int = 0


@dataclass(frozen=True)
class Walk:
    """The target's walk: which nodes of the plan it went through, and the token it chose at the end of them.

    `logprobs[k]`, if asked for, are (token, log-probability) pairs for the k-th token committed: the chosen one, then the top.
    """

    accepted: tuple[int, ...]
    token: int
    logprobs: tuple[Logprobs, ...] = ()


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
        self.patience = Patience(opened.patience, opened.response, opened.row)
        self.stop_ids = frozenset(opened.stop_ids)
        self.max_tokens = min(opened.max_tokens, limits.context - len(opened.prompt))
        self.resume_token = resume_token
        self.committed: list[int] = list(opened.held)
        self.acknowledged = len(opened.held)
        self._idle_at = -1  # length of the text for which the edge said that it has nothing to draft
        self.history = History(opened.prompt, opened.held) if opened.sampling.penalised else None
        self.finish = self._finish_of_held()
        self.counters = Counters()
        self.tree = Tree(self.sequence[-1], len(self.committed) - 1)
        self._request = _request(opened)
        self._limits = limits
        self._logprobs: list[Logprobs] = []  # of the last tokens: of those that were not acknowledged, for `catch_up`
        self._stale_to_report = 0
        self._refused = 0  # nodes of the draft at hand that found no room
        self._number_anew()

    def _number_anew(self) -> None:
        self._nodes: dict[int, int] = {}  # the edge's node number -> id in the tree
        self._written: dict[int, int] = {}  # number of a node that came late but agreed -> text length just after it
        self._next_number = 0

    @property
    def position(self) -> int:
        """Absolute position of the token that the target chooses next."""
        return len(self.prompt) + len(self.committed)

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.committed]

    def after(self, length: int) -> tuple[int, ...]:
        """The tokens of `sequence` from `length` on, without copying what comes before them."""
        inside = length - len(self.prompt)
        if inside >= 0:
            return tuple(self.committed[inside:])
        return (*self.prompt[length:], *self.committed)

    # ---- what arrives

    def receive(self, draft: Draft) -> None:
        """Take drafted nodes in. Late ones that agree with what was committed since are kept, others counted as stale.

        A refused draft leaves nothing behind, but for `tree_limit`: then as many of its nodes are kept as found room.
        """
        self._check_draft(draft)
        self.acknowledge(draft.base_committed_len)
        weights = draft.weights or bytes(len(draft.tokens))
        for i, (back, token, weight) in enumerate(zip(draft.parents, draft.tokens, weights, strict=True)):
            self._receive_node(draft.first + i, back, draft.base_committed_len, token, -weight * WEIGHT_UNIT)
        self._let_go_of_old_numbers()
        refused, self._refused = self._refused, 0
        if refused:
            text = f"{refused} nodes dropped: the session holds {self._limits.nodes}, as many as it may"
            raise ProtocolError(Code.TREE_LIMIT, text, self.sid)

    def _check_draft(self, draft: Draft) -> None:
        if len(draft.tokens) != len(draft.parents) or len(draft.weights) not in (0, len(draft.tokens)):
            raise ProtocolError(Code.BAD_MESSAGE, "draft: parents, tokens and weights differ in length", self.sid)
        if draft.first > self._next_number + NODE_WINDOW:
            raise ProtocolError(Code.BAD_PARENT, f"draft: node numbers jump to {draft.first}", self.sid)
        if (token := max(draft.tokens)) >= self._limits.vocabulary:
            raise ProtocolError(Code.BAD_TOKEN, f"draft: token {token} is not in the vocabulary", self.sid)
        for number, back in enumerate(draft.parents, draft.first):
            if back > number:
                raise ProtocolError(
                    Code.BAD_PARENT, f"draft: node {number} has its parent {back} numbers back", self.sid
                )

    def acknowledge(self, committed_len: int) -> None:
        """The edge has the first `committed_len` tokens."""
        if committed_len > len(self.committed):
            text = f"{committed_len} tokens claimed, but {len(self.committed)} are committed"
            raise ProtocolError(Code.BAD_BASE, text, self.sid)
        self.acknowledged = max(self.acknowledged, committed_len)

    def expect_nothing(self, committed_len: int) -> None:
        """An ack by itself: the edge has that much text and no node for it, so no step need wait for one."""
        self.acknowledge(committed_len)
        self._idle_at = committed_len

    @property
    def waiting(self) -> bool:
        """Would the next step begin without a node, where one may still come?"""
        return self.patience.longest > 0 and len(self.tree) == 0 and self._idle_at < len(self.committed)

    def cancel(self) -> None:
        self.finish = self.finish or "cancelled"

    def _receive_node(self, number: int, back: int, base: int, token: int, log_probability: float) -> None:
        if number < self._next_number:
            return  # a frame came twice, or was overtaken
        self._next_number = number + 1
        self.counters.drafted += 1
        length = base if back == 0 else self._length_at(number - back)
        if length is not None and length < len(self.committed):  # late: the token after that much text is known
            kept = self.committed[length] == token
            if kept:
                self._written[number] = length + 1
        else:
            kept = self._grow(
                number, self.tree.root if length is not None else self._nodes.get(number - back), token, log_probability
            )
        if not kept:
            self.counters.stale += 1
            self._stale_to_report += 1

    def _length_at(self, number: int) -> int | None:
        """Length of the text just after node `number`, if the node is part of the text."""
        if number in self._written:
            return self._written[number]
        node = self._nodes.get(number)
        if node is None or self.tree.state(node) is not State.COMMITTED:
            return None
        return self.tree.position(node) + 1

    def _grow(self, number: int, parent: int | None, token: int, log_probability: float) -> bool:
        """Put a node below a live `parent`. False if that place is gone, or there is no room."""
        if parent is None or self.tree.state(parent) is not State.LIVE:
            return False
        node = self.tree.child(parent, token)  # after a resume the edge sends again what is still here
        if node is None:
            if len(self.tree) >= self._limits.nodes:
                self._refused += 1
                return False
            node = self.tree.add(parent, token, log_probability)
        self._nodes[number] = node
        return True

    def _let_go_of_old_numbers(self) -> None:
        if len(self._nodes) + len(self._written) > 2 * NODE_WINDOW:
            oldest = self._next_number - NODE_WINDOW
            self._nodes = {k: v for k, v in self._nodes.items() if k >= oldest}
            self._written = {k: v for k, v in self._written.items() if k >= oldest}

    # ---- the step

    def plan(self, width: int) -> Plan:
        """The likeliest connected subtree of at most `width` nodes. Its leaves stop short of `max_tokens`."""
        deepest = min(self.max_tokens, len(self.committed) + MAX_COMMIT) - 1  # the target's own token comes after it
        nodes = self.tree.best(width, exclude_from=deepest)
        index = {node: i for i, node in enumerate(nodes)}
        parents = tuple(index.get(self.tree.parent(node), -1) for node in nodes)
        return Plan(tuple(nodes), tuple(map(self.tree.token, nodes)), parents, len(self.committed), len(self.tree))

    def apply(self, plan: Plan, walk: Walk, step: float = 0.0) -> Commit:
        """Commit what the target chose in a step that took `step` seconds; ends the session where it must end."""
        base = len(self.committed)
        assert self.finish in ("", "cancelled"), "nothing follows the end"
        assert plan.base in (None, base), "the text grew while the step ran"
        assert [plan.parents[i] for i in walk.accepted] == [-1, *walk.accepted][: len(walk.accepted)], "not a path"
        tokens = self._cut([plan.tokens[i] for i in walk.accepted] + [walk.token])
        self.committed.extend(tokens)
        if self.history is not None:
            self.history.extend(tokens)
        self.tree.advance(tokens)
        self.tree.forget(max(self.acknowledged, len(self.committed) - NODE_WINDOW) - 1)
        accepted = min(len(walk.accepted), len(tokens))
        self._count(plan, accepted)
        self._keep_logprobs(walk.logprobs[: len(tokens)])
        stale, self._stale_to_report = self._stale_to_report, 0
        return Commit(
            sid=self.sid,
            base=base,
            tokens=tuple(tokens),
            accepted=accepted,
            held=plan.held,
            verified=len(plan.nodes),
            stale=stale,
            step=step,
            finish=self.finish,
            logprobs=walk.logprobs[: len(tokens)],
        )

    def _keep_logprobs(self, fresh: tuple[Logprobs, ...]) -> None:
        if self.logprobs is not None:
            self._logprobs.extend(fresh)
            del self._logprobs[: self.acknowledged - (len(self.committed) - len(self._logprobs))]

    # ---- after a cut

    def continues(self, opened: Open) -> bool:
        """Is this the request that the session serves, and what the edge holds the beginning of its text?"""
        return _request(opened) == self._request and self.committed[: len(opened.held)] == list(opened.held)

    def resume(self, opened: Open) -> list[Commit]:
        """Go on under the sid of `opened`, and bring the edge up to date. Nodes are numbered anew; those held stay."""
        assert self.continues(opened)
        self.sid, self.acknowledged = opened.sid, len(opened.held)
        self._number_anew()
        return self.catch_up(len(opened.held))

    def catch_up(self, held: int) -> list[Commit]:
        """Commits that bring an edge which holds `held` tokens up to date, with the finish if there was one."""
        size = MAX_COMMIT
        starts = range(held, len(self.committed), size) or ([held] if self.finish else [])
        first = len(self.committed) - len(self._logprobs)
        return [
            Commit(
                sid=self.sid,
                base=i,
                tokens=tuple(self.committed[i : i + size]),
                finish=self.finish if i + size >= len(self.committed) else "",
                logprobs=tuple(self._logprobs[i - first : i - first + size]) if i >= first else (),
            )
            for i in starts
        ]

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

    def _count(self, plan: Plan, accepted: int) -> None:
        c = self.counters
        c.steps += 1
        c.hits += plan.held > 0
        c.verified += len(plan.nodes)
        c.accepted += accepted


def _request(opened: Open) -> Open:
    """`opened` without what changes from one connection to the next."""
    return msgspec.structs.replace(opened, sid=0, held=(), resume="", patience=0.0, response=0.0, row=0.0)


def _check(opened: Open, limits: Limits) -> None:
    """Refuse what cannot be generated, with the reason."""
    sid = opened.sid
    if not opened.prompt:
        raise ProtocolError(Code.BAD_PROMPT, "the prompt is empty", sid)
    if (token := max((*opened.prompt, *opened.held))) >= limits.vocabulary:
        raise ProtocolError(Code.BAD_TOKEN, f"open: token {token} is not in the vocabulary", sid)
    if len(opened.prompt) >= limits.context:
        text = f"the prompt has {len(opened.prompt)} tokens; the model's context here is {limits.context}"
        raise ProtocolError(Code.CONTEXT, text, sid)
    if len(opened.held) > opened.max_tokens:
        raise ProtocolError(Code.BAD_MESSAGE, "open: held is longer than max_tokens", sid)
    if any(t in opened.stop_ids for t in opened.held[:-1]):
        raise ProtocolError(Code.BAD_MESSAGE, "open: held goes on after a stop token", sid)
    if opened.rule != "coupled":
        raise ProtocolError(Code.UNSUPPORTED, f"rule {opened.rule!r} is not offered here; 'coupled' is", sid)
