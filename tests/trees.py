"""Random speculation trees for tests of engines: plans with or without the target's true continuation in them."""

import random
from collections.abc import Sequence

from paceline.cloud.engine import Engine, Work
from paceline.protocol.cloud_session import Plan, Walk
from paceline.protocol.sampling import History, Sampling


def random_plan(rng: random.Random, nodes: int, vocabulary: int, truth: Sequence[int] = ()) -> Plan:
    """A tree of `nodes` nodes in the order of a walk through it; `truth` is woven in as one path, as far as it fits."""
    parents: list[int] = []
    tokens: list[int] = []
    on_truth = -1  # the last node of the true path, -1 being the root
    depth = 0
    for _ in range(nodes):
        if depth < len(truth) and rng.random() < 0.5:
            parents.append(on_truth)
            tokens.append(truth[depth])
            on_truth, depth = len(parents) - 1, depth + 1
        else:
            parents.append(rng.randrange(-1, len(parents)))
            tokens.append(rng.randrange(vocabulary))
    return Plan(tuple(range(nodes)), tuple(tokens), tuple(parents))


def generate(
    engine: Engine,
    prompt: Sequence[int],
    sampling: Sampling,
    count: int,
    rng: random.Random | None = None,
    truth: Sequence[int] = (),
    nodes: int = 0,
) -> list[int]:
    """`count` tokens after the prompt: plain, or with random trees of up to `nodes` nodes that hold some of `truth`."""
    text: list[int] = []
    handle = engine.open(prompt)
    while len(text) < count:
        sequence = [*prompt, *text]
        plan = Plan()
        if rng is not None:
            plan = random_plan(rng, rng.randint(0, nodes), engine.vocabulary.size, truth[len(text) :])
        history = History(prompt, text) if sampling.penalised else None
        work = Work(handle, tuple(sequence[engine.length(handle) :]), plan, sampling, history)
        walk = engine.verify([work])[0]
        assert isinstance(walk, Walk), walk
        text += [*(plan.tokens[i] for i in walk.accepted), walk.token]
        assert engine.length(handle) == len(prompt) + len(text) - 1
    engine.close(handle)
    return text[:count]
