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
Under the rule `rejection` the choice also depends on what the edge drew at random; there the tree decides which, and it is
the text's distribution that it cannot change: see `rejection`.
"""

from collections.abc import Sequence

import msgspec
from paceline.protocol.cost import Patience
from paceline.protocol.errors import Code, ProtocolError
from paceline.protocol.intake import Counters, Intake, Limits
from paceline.protocol.messages import COUPLED, MAX_COMMIT, NODE_WINDOW, REJECTION, Commit, Draft, Open
from paceline.protocol.sampling import History
from paceline.protocol.step import Logprobs, Plan, Walk
from paceline.protocol.tree import Tree

__all__ = ["CloudSession", "Counters", "Limits", "Logprobs", "Plan", "Walk"]


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
        self.intake = Intake(self.tree, self.committed, limits, self.counters, drawn=opened.rule == REJECTION)
        self._request = _request(opened)
        self._limits = limits
        self._logprobs: list[Logprobs] = []  # of the last tokens: of those that were not acknowledged, for `catch_up`
        self._stale_reported = 0

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
        self.intake.check(draft, self.sid)
        self.acknowledge(draft.base_committed_len)
        if refused := self.intake.take(draft):
            text = f"{refused} nodes dropped: the session holds {self._limits.nodes}, as many as it may"
            raise ProtocolError(Code.TREE_LIMIT, text, self.sid)

    def acknowledge(self, committed_len: int) -> None:
        """The edge has the first `committed_len` tokens."""
        if committed_len > len(self.committed):
            text = f"{committed_len} tokens claimed, but {len(self.committed)} are committed"
            raise ProtocolError(Code.BAD_BASE, text, self.sid)
        self.acknowledged = max(self.acknowledged, committed_len)
        self._forget()

    def _forget(self) -> None:
        self.tree.forget(max(self.acknowledged, len(self.committed) - NODE_WINDOW) - 1)

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

    # ---- the step

    def plan(self, width: int) -> Plan:
        """The likeliest connected subtree of at most `width` nodes. Its leaves stop short of `max_tokens`."""
        nodes = self.tree.best(width, exclude_from=self.deepest)
        index = {node: i for i, node in enumerate(nodes)}
        parents = tuple(index.get(parent, -1) for parent in self.tree.parents(nodes))
        drawn = self.intake.draws
        draws = tuple(drawn.get(node) for node in nodes) if drawn else ()
        return Plan(tuple(nodes), tuple(self.tree.tokens(nodes)), parents, len(self.committed), len(self.tree), draws)

    @property
    def deepest(self) -> int:
        """Position from which on no node goes along: the target's own token comes after the last one."""
        return min(self.max_tokens, len(self.committed) + MAX_COMMIT) - 1

    def apply(self, plan: Plan, walk: Walk, step: float = 0.0) -> Commit:
        """Commit what the target chose in a step that took `step` seconds; ends the session where it must end."""
        return self.report(plan, walk, self.grow(plan, walk), step)

    def grow(self, plan: Plan, walk: Walk) -> list[int]:
        """The part of `apply` that the next step waits for: the text is longer by these tokens, and the tree is eaten."""
        committed, finish, base = self.committed, self.finish, plan.base
        assert not finish or finish == "cancelled", "nothing follows the end"
        assert base is None or base == len(committed), "the text grew while the step ran"
        if walked := walk.accepted:
            assert (-1, *walked[:-1]) == tuple(map(plan.parents.__getitem__, walked)), "not a path"
            tokens = [*map(plan.tokens.__getitem__, walked), walk.token]
        else:
            tokens = [walk.token]
        if len(tokens) >= self.max_tokens - len(committed) or not self.stop_ids.isdisjoint(tokens):
            tokens = self._cut(tokens)
        committed += tokens
        if self.history is not None:
            self.history.extend(tokens)
        self.tree.advance(tokens)
        return tokens

    def report(self, plan: Plan, walk: Walk, tokens: Sequence[int], step: float = 0.0) -> Commit:
        """The rest of it: what the edge is told of the `tokens` by which the text has just grown."""
        accepted = min(len(walk.accepted), len(tokens))
        self._count(plan, accepted)
        self._keep_logprobs(walk.logprobs[: len(tokens)])
        if len(self.committed) - self.acknowledged > NODE_WINDOW:  # else `acknowledge` sees to it
            self._forget()
        stale, self._stale_reported = self.counters.stale - self._stale_reported, self.counters.stale
        return Commit(
            sid=self.sid,
            base=len(self.committed) - len(tokens),
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
        self.intake.number_anew()
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

    def _cut(self, tokens: list[int]) -> list[int]:
        """`tokens` up to the first stop token or the limit, whichever comes first; a stop on the limit counts as a stop."""
        room = self.max_tokens - len(self.committed)
        for i, token in enumerate(tokens[:room]):
            if token in self.stop_ids:
                self.finish = "stop"
                return tokens[: i + 1]
        if len(tokens) >= room:
            self.finish = "length"
        return tokens[:room]

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
    if opened.rule not in (COUPLED, REJECTION):
        text = f"rule {opened.rule!r} is not offered here; {COUPLED!r} and {REJECTION!r} are"
        raise ProtocolError(Code.UNSUPPORTED, text, sid)
