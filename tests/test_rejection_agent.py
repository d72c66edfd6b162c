"""The rule `rejection` with the whole agent and verifier, in virtual time: each policy, with cuts; and Saguaro sampling."""

import asyncio
import itertools
import math
from dataclasses import replace as dataclass_replace

import numpy as np
import pytest
from msgspec.structs import replace
from paceline.cloud.engines.replay import ReplayEngine
from paceline.cloud.engines.toy import ToyEngine
from paceline.edge.candidates import FAN_OUT
from paceline.edge.draft import Candidates, Choice
from paceline.edge.drawing import Drawing, drawn
from paceline.edge.generation import Generation
from paceline.edge.policies import policy, with_rule
from paceline.edge.predictor import Predictor
from paceline.edge.rounds import Rounds, fan_out
from paceline.protocol.edge_session import EdgeSession
from paceline.protocol.errors import Code, PacelineError, ProtocolError
from paceline.protocol.philox import Floats
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling
from paceline.protocol.tree import Tree
from paceline.scripts.lab.virtual import run
from rig import Verifier, agent_of, answer
from test_rejection import fits
from toy_draft import ToyDraft

TEXTS, TOKENS, LENGTH = 250, 2, 4
ENGINE = ToyEngine(3, seed=2, sharpness=1.3)
WARM = Sampling(temperature=1.0)
PROMPT = (1, 2, 0)


def joint() -> Floats:
    out = np.ones((3,) * TOKENS)
    for text in itertools.product(range(3), repeat=TOKENS):
        for i, token in enumerate(text):
            p = np.exp(ENGINE.logits([*PROMPT, *text[:i]]).astype(np.float64))
            out[text] *= p[token] / p.sum()
    return out


async def texts(name: str, cuts: bool) -> tuple[Floats, int]:
    """How often each text was written, and how many drafted tokens were accepted."""
    verifier, accepted = Verifier(ENGINE), 0
    counts = np.zeros((3,) * TOKENS)
    made: list[Generation] = []
    cutting: list[asyncio.Task[None]] = []
    async with agent_of(verifier, ToyDraft(ENGINE, noise=1.0), name=with_rule(name, "rejection")) as agent:
        for seed in range(TEXTS):
            if cuts and seed % 3 == 0:
                cutting.append(asyncio.create_task(cut_after(0.05 + 0.011 * (seed % 16), verifier)))
            counts[
                tuple(await answer(agent, PROMPT, replace(WARM, seed=seed), LENGTH, report=made.append))[:TOKENS]
            ] += 1
            accepted += made[-1].figures.accepted
    for task in cutting:
        task.cancel()
    await verifier.stop()
    return counts, accepted


async def cut_after(seconds: float, verifier: Verifier) -> None:
    await asyncio.sleep(seconds)
    await verifier.cut()


@pytest.mark.parametrize(("name", "cuts"), [("stream", False), ("stream", True), ("sync", False), ("ssd", True)])
def test_texts_have_the_targets_distribution(name: str, cuts: bool) -> None:
    counts, accepted = run(texts(name, cuts))
    assert accepted > TEXTS / 2, "draws were accepted"
    assert fits(counts, joint())


@pytest.fixture
def coupled_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The edge sends the likeliest tokens, in order, as if they had been drawn."""

    def likeliest(logits: np.ndarray, choice: Choice, drawing: Drawing) -> Candidates:  # type: ignore[type-arg]
        found = drawn(logits, choice, drawing)
        order = sorted(zip(found.counts, found.support, strict=True), reverse=True)
        tokens = [*(t for _, t in order)][: found.drawn] + found.tokens[found.drawn :].tolist()
        return Candidates(np.array(tokens), found.confidence, found.support, found.counts, found.drawn)

    monkeypatch.setattr("paceline.edge.candidates.drawn", likeliest)


def test_candidates_that_were_not_drawn_are_noticed(coupled_draws: None) -> None:
    counts, _ = run(texts("ssd", False))
    assert not fits(counts, joint())


def test_a_greedy_target_writes_its_own_text_under_either_rule() -> None:
    async def main() -> list[list[int]]:
        verifier = Verifier(ToyEngine(12, seed=1))
        out = []
        for name in ("ar", "stream:rule=rejection", "ssd:rule=rejection"):
            async with agent_of(verifier, ToyDraft(ToyEngine(12, seed=1), noise=1.0), name=name) as agent:
                out.append(await answer(agent, (3, 1), Sampling(), 40))
        await verifier.stop()
        return out

    plain, *others = run(main())
    assert all(text == plain for text in others)


def test_an_engine_that_cannot_verify_draws_refuses_at_open() -> None:
    async def main() -> None:
        engine = ReplayEngine("toy", ENGINE.vocabulary, {(PROMPT, WARM): (0, 1, 2)})
        verifier = Verifier(engine)
        async with agent_of(verifier, ToyDraft(ENGINE), name="stream:rule=rejection") as agent:
            with pytest.raises(ProtocolError, match="cannot verify draws") as e:
                await answer(agent, PROMPT, WARM, 3)
            assert e.value.code is Code.UNSUPPORTED
            assert agent.link.welcome is not None
            assert "rejection" not in agent.link.welcome.features
        await verifier.stop()

    run(main())


# ---- rounds


def test_a_rule_is_part_of_a_policy() -> None:
    assert policy("ssd").rule == "coupled"
    assert policy(with_rule("ssd:outcomes=4", "rejection")).rule == "rejection"
    assert with_rule("ssd:rule=coupled", "rejection") == "ssd:rule=coupled"
    with pytest.raises(PacelineError, match="rule 'other' is not known"):
        policy("ssd:rule=other")
    with pytest.raises(PacelineError, match="favour is a percentage"):
        policy("ssd:favour=101")


def test_a_rounds_draws_avoid_the_outcomes_prepared_at_their_place() -> None:
    random, rounds = np.random.default_rng(0), Rounds(3, outcomes=8, favour=0.5)
    tree, chain = Tree(0), list[int]()
    for token in range(3):
        chain.append(tree.add(chain[-1] if chain else tree.root, token, math.log(0.9)))
        tree.add(tree.parent(chain[-1]), 100 + token, math.log(0.05))
    outcome = tree.children(chain[0])[1]
    below = tree.add(outcome, 7, math.log(0.9))
    counts = fan_out(3, 8, rounds.acceptance)
    for place, node in enumerate([tree.root, *chain]):
        found = rounds.drawing(tree, node, random)
        assert (found.favoured, found.factor, found.guesses) == (counts[place], 0.5, FAN_OUT - 1)
        assert found.draws == (place < 3)  # the last place is the target's own
    assert rounds.drawing(tree, outcome, random).favoured == counts[0]  # where a round would begin anew
    assert rounds.drawing(tree, below, random).favoured == counts[1]
    assert Rounds(0).drawing(tree, tree.root, random).favoured == 0


def generation(rounds: Rounds | None) -> Generation:
    session = EdgeSession(GenerationRequest(PROMPT, WARM, 64), rule="rejection", vocabulary_size=12)
    session.open(1)
    predictor = Predictor()
    many = Candidates(np.arange(8), np.full(8, 0.5))
    for token in range(400):
        predictor.learn(many, token % 8, seeded=True)
        predictor.learn(many, 0, seeded=True)
    return Generation(session, predictor, 0.0, handle=1, rounds=rounds, random=np.random.default_rng(4))


@pytest.mark.parametrize("rounds", [None, Rounds(4, outcomes=8, favour=0.7)], ids=["stream", "ssd"])
def test_a_draws_weight_and_company_do_not_depend_on_its_token(rounds: Rounds | None) -> None:
    logits = np.log(np.array([0.3, 0.2, 0.15, 0.1, 0.08, 0.06, 0.05, 0.03, 0.02, 0.01], dtype=np.float32))
    seen, tokens = set(), set()
    for seed in range(60):
        g = generation(rounds)
        root, tree = g.session.tree.root, g.session.tree
        g.ran(root, drawn(logits, g.row(root).choice, replace_random(g, root, seed)))
        family = g.session.whole(tree.children(root)[:1])
        seen.add(tuple(tree.weight(n) for n in family))
        tokens.add(tuple(tree.token(n) for n in family))
        weights = [tree.weight(n) for n in tree.children(root)]
        assert weights == sorted(weights, reverse=True)
    assert len(tokens) > 3
    assert len(seen) == 1


def replace_random(g: Generation, node: int, seed: int) -> Drawing:
    found = g.row(node).choice.drawing
    assert found is not None
    return dataclass_replace(found, random=np.random.default_rng(seed))


def test_saguaro_sampling_turns_refusals_into_hits() -> None:
    """Draft and target alike: drawing the prepared tokens less often costs acceptance, and what is refused hits them."""
    q = np.array([0.4, 0.3, 0.2, 0.1])
    hits = {}
    for factor in (1.0, 0.5, 0.2):
        weight = q * np.where(np.arange(4) < 2, factor, 1)
        other = weight / weight.sum()
        residual = np.maximum(q - other, 0)
        hits[factor] = (1 - np.minimum(q, other).sum(), residual[:2].sum(), residual.sum())
    assert hits[1.0][0] == pytest.approx(0)
    assert 0 < hits[0.5][0] < hits[0.2][0]
    assert all(on_prepared == pytest.approx(total) for _, on_prepared, total in hits.values())
