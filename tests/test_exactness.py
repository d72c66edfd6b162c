"""The claim: speculative text is the target's own text, token for token, whatever is drafted and whatever the network does.

`plain` writes a text with the target alone. `Wire` is a state machine that Hypothesis drives: an EdgeSession and a CloudSession
over frames that are delayed, reordered, doubled and lost, with cuts after which the edge reconnects to the session that was kept
or to another verifier that has never heard of it. After every rule both ends must hold a beginning of the plain text; at the end,
all of it. A drafter that guesses well and one that never does must both come out the same.

The last tests break the rule on purpose, each in a way seen in practice, and demand that the machine notices.
"""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from paceline.cloud.engine import Work
from paceline.cloud.engines.toy import ToyEngine
from paceline.protocol import edge_session
from paceline.protocol.cloud_session import CloudSession, Limits, Plan, Walk
from paceline.protocol.codec import decode_from_cloud, decode_from_edge, encode
from paceline.protocol.edge_session import EdgeSession
from paceline.protocol.errors import HARMLESS, Code, ProtocolError
from paceline.protocol.messages import Draft, Open, Opened
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import History, Sampling, choose

RUNS = 400  # for each drafter
LIMITS = Limits(vocabulary=12, context=200, nodes=24)

samplings = st.one_of(
    st.just(Sampling()),
    st.builds(
        Sampling,
        seed=st.integers(0, 2**63 - 1),
        temperature=st.sampled_from([1e-6, 0.3, 0.8, 1.5]),
        top_k=st.sampled_from([0, 0, 3]),
        top_p=st.sampled_from([1.0, 1.0, 0.8]),
        min_p=st.sampled_from([0.0, 0.0, 0.05]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        logit_bias=st.sampled_from([(), ((1, 2.0), (99, 5.0))]),
        temperature_last=st.booleans(),
    ),
)


def target(engine: ToyEngine, request: Open, text: list[int]) -> int:
    """The target's own next token after `text`."""
    history = History(request.prompt, text) if request.sampling.penalised else None
    sequence = [*request.prompt, *text]
    return choose(engine.logits(sequence), request.sampling, len(sequence), history)


def plain(engine: ToyEngine, request: Open) -> tuple[list[int], str]:
    """The text that the target writes alone, and why it ends."""
    text: list[int] = []
    while True:
        text.append(target(engine, request, text))
        if text[-1] in request.stop_ids:
            return text, "stop"
        if len(text) == request.max_tokens:
            return text, "length"


class Drafters:
    """Candidates for the token after `text`, which begins with the committed text and goes on along a path of the tree."""

    @staticmethod
    def exact(m: "Wire", text: list[int]) -> list[int]:
        return [target(m.engine, m.request, text)]

    @staticmethod
    def noisy(m: "Wire", text: list[int]) -> list[int]:
        return [
            target(m.engine, m.request, text) if m.random.random() < 0.7 else m.random.randrange(12),
            m.random.randrange(12),
        ]

    @staticmethod
    def random(m: "Wire", text: list[int]) -> list[int]:
        return [m.random.randrange(12) for _ in range(3)]  # one token twice, now and then

    @staticmethod
    def adversarial(m: "Wire", text: list[int]) -> list[int]:
        right = target(m.engine, m.request, text)
        return [t for t in range(12) if t != right][:4]

    @staticmethod
    def empty(m: "Wire", text: list[int]) -> list[int]:
        return []


class Wire(RuleBasedStateMachine):
    drafter = staticmethod(Drafters.exact)
    totals: Counter[str]

    @initialize(
        sampling=samplings,
        seed=st.integers(0, 999),
        max_tokens=st.integers(1, 40),
        stop=st.integers(0, 40),
        width=st.integers(0, 9),
    )
    def start(self, sampling: Sampling, seed: int, max_tokens: int, stop: int, width: int) -> None:
        self.random, self.engine, self.width = random.Random(seed), ToyEngine(12, seed=seed % 7), width
        self.request = Open(0, (seed % 12, 3), sampling, max_tokens, (stop,) if stop < 12 else ())
        self.edge = EdgeSession(GenerationRequest(self.request.prompt, sampling, max_tokens, self.request.stop_ids))
        self.text, self.finish = plain(self.engine, self.request)
        self.up: list[bytes] = []  # frames under way, oldest first
        self.down: list[bytes] = []
        self.arrived: list[bytes] = []  # frames that came down, to come again
        self.step: tuple[Plan, Walk] | None = None  # the verification that is running
        self.sids = 0
        self.connect(kept=False)

    # ---- the edge

    @rule(count=st.integers(1, 6))
    def draft(self, count: int) -> None:
        tree, new = self.edge.tree, []
        if self.edge.phase is not edge_session.Phase.RUNNING:
            return
        for _ in range(count):
            parent = (
                new[-1] if new and self.random.random() < 0.7 else self.random.choice(list(tree.subtree(tree.root)))
            )
            text = self.edge.committed + [tree.token(n) for n in tree.path(parent)]
            new += [tree.add(parent, token, -self.random.random()) for token in self.drafter(self, text)]
        self.up += map(encode, self.edge.send(new))

    # ---- the cloud

    @precondition(lambda self: self.step is None and not self.cloud.finish)
    @rule()
    def begin_step(self) -> None:
        plan = self.cloud.plan(self.width)
        self.step = plan, self.verify(plan)

    @precondition(lambda self: self.step is not None)
    @rule()
    def end_step(self) -> None:
        (plan, walk), self.step = self.step, None
        commit = self.cloud.apply(plan, walk)
        self.totals["accepted"] += commit.accepted
        self.totals["stale"] += commit.stale
        self.down.append(encode(commit))

    def verify(self, plan: Plan) -> Walk:
        new = tuple(self.cloud.sequence[self.engine.length(self.handle) :])
        (walk,) = self.engine.verify([Work(self.handle, new, plan, self.cloud.sampling, self.cloud.history)])
        assert isinstance(walk, Walk)
        return walk

    # ---- the network

    @rule(nth=st.integers(0, 3), again=st.booleans())
    def arrive_up(self, nth: int, again: bool) -> None:
        if self.up:
            frame = self.up[nth % len(self.up)] if again else self.up.pop(nth % len(self.up))
            message = decode_from_edge(frame)
            assert isinstance(message, Draft)
            if message.sid == self.cloud.sid and not self.cloud.finish:
                try:
                    self.cloud.receive(message)
                except ProtocolError as e:
                    assert e.code in HARMLESS  # noqa: PT017
                    self.totals[e.code] += 1

    @rule(again=st.booleans())
    def arrive_down(self, again: bool) -> None:
        """A gap, left by a lost or overtaken frame, is noticed by the edge, which reconnects."""
        frame = self.random.choice(self.arrived) if again and self.arrived else self.down.pop(0) if self.down else None
        if frame is not None:
            self.arrived.append(frame)
            try:
                self.edge.receive(decode_from_cloud(frame))
            except ProtocolError as e:
                assert e.code in (Code.BAD_BASE, Code.BAD_STATE)  # noqa: PT017
                self.totals["noticed"] += 1
                self.connect(kept=self.random.random() < 0.5)

    @rule(nth=st.integers(0, 3))
    def lose_up(self, nth: int) -> None:
        if self.up:
            self.up.pop(nth % len(self.up))

    @rule()
    def lose_down(self) -> None:
        if self.down:
            self.down.pop(0)

    @rule(steps=st.integers(1, 4), drafts=st.integers(0, 6))
    def calm(self, steps: int, drafts: int) -> None:
        """A stretch in which all that is under way arrives."""
        for _ in range(steps):
            while self.down:
                self.arrive_down(again=False)
            self.draft(drafts)
            while self.up:
                self.arrive_up(0, again=False)
            if self.step is None and not self.cloud.finish:
                self.begin_step()
            if self.step is not None:
                self.end_step()

    @rule(kept=st.booleans(), seldom=st.sampled_from([False, False, False, True]))
    def cut(self, kept: bool, seldom: bool) -> None:
        if seldom and self.edge.phase is not edge_session.Phase.DONE:
            self.connect(kept)

    def connect(self, kept: bool) -> None:
        """Frames of the old connection stay under way: under a fresh sid they can do no harm."""
        self.sids += 1
        opened = decode_from_edge(encode(self.edge.open(self.sids)))
        assert isinstance(opened, Open)
        if kept and self.cloud.continues(opened):
            self.totals["resumed"] += 1
            commits = self.cloud.resume(opened)  # a running step runs on
        else:
            self.cloud, self.handle, self.step = CloudSession(opened, LIMITS, "token"), self.engine.open(()), None
            commits = self.cloud.catch_up(len(opened.held))
        welcome = Opened(self.cloud.sid, len(self.cloud.committed), self.cloud.resume_token, self.cloud.max_tokens)
        self.down += map(encode, (welcome, *commits))

    # ---- the claim

    @invariant()
    def both_hold_a_beginning(self) -> None:
        if hasattr(self, "edge"):
            for committed in (self.edge.committed, self.cloud.committed):
                assert committed == self.text[: len(committed)]

    def teardown(self) -> None:
        if not hasattr(self, "edge"):
            return
        while self.edge.phase is not edge_session.Phase.DONE:
            self.calm(steps=1, drafts=3)
            if self.cloud.finish and not self.down:  # its last word may have been lost
                self.cut(kept=True, seldom=True)
        assert self.edge.committed == self.text
        assert self.edge.finish == self.finish
        self.totals["runs"] += 1


def drive(machine: type[Wire], runs: int, shrink: bool = True) -> Counter[str]:
    machine.totals = Counter()
    quick = settings(
        max_examples=runs, stateful_step_count=30, deadline=None, database=None, print_blob=False,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate], suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=quick)
    return machine.totals


@pytest.mark.parametrize("drafter", ["exact", "noisy", "random", "adversarial", "empty"])
def test_speculative_text_is_plain_text(drafter: str) -> None:
    machine = type("Wire_" + drafter, (Wire,), {"drafter": staticmethod(getattr(Drafters, drafter))})
    totals = drive(machine, RUNS)
    assert totals["runs"] >= RUNS
    assert totals["resumed"] > RUNS / 10
    assert totals["noticed"] > RUNS / 40
    if drafter in ("adversarial", "empty"):
        assert totals["accepted"] == 0
    else:  # the claim is about texts in which drafted nodes were accepted, and came late
        assert totals["accepted"] > RUNS / 2
        assert totals["stale"] > RUNS / 2 or drafter == "exact"


# ---- negative controls: each breaks one thing, and the machine must notice


class Broken(Wire):
    """A verifier with a rule of its own for the choice after `text`; nodes are followed where they equal the choice."""

    drafter = staticmethod(Drafters.noisy)
    position_shift = 0

    def own(self, text: list[int], position: int) -> int:
        history = History(self.request.prompt, text) if self.request.sampling.penalised else None
        return choose(self.engine.logits([*self.request.prompt, *text]), self.request.sampling, position, history)

    def right(self, text: list[int]) -> int:
        return self.own(text, len(self.request.prompt) + len(text))

    def verify(self, plan: Plan) -> Walk:
        accepted: list[int] = []
        while True:
            text = self.cloud.committed + [plan.tokens[i] for i in accepted]
            below = [i for i, p in enumerate(plan.parents) if p == (accepted[-1] if accepted else -1)]
            node, token = self.decide(text, {plan.tokens[i]: i for i in below})
            if node is None:
                return Walk(tuple(accepted), token)
            accepted.append(node)

    def decide(self, text: list[int], below: dict[int, int]) -> tuple[int | None, int]:
        token = self.right(text)
        return below.get(token), token


class AlwaysAccepts(Broken):
    def decide(self, text: list[int], below: dict[int, int]) -> tuple[int | None, int]:
        return next(iter(below.values()), None), self.right(text)


class NoiseByStep(Broken):
    """Noise keyed by the number of the verification, not by the position."""

    def decide(self, text: list[int], below: dict[int, int]) -> tuple[int | None, int]:
        token = self.own(text, self.sids + len(self.down) + len(self.arrived))
        return below.get(token), token


class VerifiesOtherTokens(Broken):
    """The nodes that the target saw are not those that were drafted."""

    def decide(self, text: list[int], below: dict[int, int]) -> tuple[int | None, int]:
        token = self.right(text)
        return {(t + 1) % 12: i for t, i in below.items()}.get(token), token


class DrawsAgain(Broken):
    """After a rejection it draws afresh instead of keeping the choice that rejected: the coupled rule's missing residual."""

    def decide(self, text: list[int], below: dict[int, int]) -> tuple[int | None, int]:
        token = self.right(text)
        fresh = self.own(text, 10**6 + len(text)) if below and token not in below else token
        return below.get(token), fresh


class ForgetsDraftedHistory(Broken):
    """Penalties that see the committed text, but not the drafted tokens in between."""

    def right(self, text: list[int]) -> int:
        history = History(self.request.prompt, self.cloud.committed) if self.request.sampling.penalised else None
        sequence = [*self.request.prompt, *text]
        return choose(self.engine.logits(sequence), self.request.sampling, len(sequence), history)


def test_the_honest_rule_passes_where_the_broken_ones_fail() -> None:
    assert drive(Broken, 200)["accepted"] > 100


@pytest.mark.parametrize("broken", [AlwaysAccepts, NoiseByStep, VerifiesOtherTokens, DrawsAgain, ForgetsDraftedHistory])
def test_a_broken_rule_is_noticed(broken: type[Broken]) -> None:
    with pytest.raises(AssertionError, match=r"^assert \[.*\] == \["):  # two texts that differ, and nothing else
        drive(broken, 200, shrink=False)
