"""A draft model beside the target: it says what the draft says, keeps sequences apart, and a real verifier runs with it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline.cloud.backup import Ngram, TopUp
from paceline.cloud.engines.llamacpp import LlamaEngine
from paceline.cloud.llama_backup import CHUNK, KEPT, DraftBackup
from paceline.edge.draft import Choice, Row
from paceline.edge.drafts.llamacpp import LlamaDraft
from paceline.edge.generation import Generation
from paceline.edge.policies import policy
from paceline.edge.runtime import Settings, running_agent
from paceline.edge.text import Text
from paceline.edge.websocket import Address
from paceline.protocol.errors import EngineError, PacelineError
from paceline.protocol.messages import BACKUP
from paceline.protocol.sampling import Sampling
from paceline.protocol.vocabulary import Vocabulary
from paceline.scripts.lab.virtual import run
from paceline.scripts.local import local_verifier
from paceline.scripts.pairs import backup_of
from rig import Verifier, agent_of, answer

GREEDY, SEEDED = Sampling(), Sampling(seed=7, temperature=0.9)


@pytest.fixture(scope="module")
def text(smollm2_path: Path) -> Text:
    return Text(smollm2_path)


@pytest.fixture(scope="module")
def backup(smollm2_draft_path: Path, text: Text) -> Iterator[DraftBackup]:
    made = DraftBackup(smollm2_draft_path, text.vocabulary, context=1024, threads=1, clock=lambda: 0.0)  # costs nothing
    yield made
    made.shut()


def asked(text: Text, question: str) -> list[int]:
    return text.prompt([{"role": "user", "content": question}])


def written(backup: DraftBackup, tokens: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    """What the backup alone would write, asked token by token."""
    out: list[int] = []
    while len(out) < count:
        found = backup.follow([*tokens, *out], sampling, None)
        assert found is not None
        assert 0 < found[1] <= 1
        out.append(found[0])
    return out


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_it_says_what_the_edges_draft_says(
    backup: DraftBackup, smollm2_draft_path: Path, text: Text, sampling: Sampling
) -> None:
    prompt = asked(text, "Name three rivers.")
    draft = LlamaDraft(smollm2_draft_path, text.vocabulary, cells=512, threads=1)
    handle = draft.open(prompt)
    [found] = draft.extend([Row(handle, 0, -1, prompt[-1], len(prompt) - 1, Choice(sampling))]).found
    draft.shut()
    assert found is not None
    mine = backup.follow(prompt, sampling, None)
    assert mine is not None
    assert mine[0] == found.tokens[0]
    assert mine[1] == pytest.approx(found.confidence[0], abs=0.02)  # a batch of another shape is rounded otherwise


def test_refused_guesses_and_other_sequences_leave_no_trace(backup: DraftBackup, text: Text) -> None:
    first, second = asked(text, "Count from one to ten."), asked(text, "What is the capital of France?")
    want = written(backup, first, 8), written(backup, second, 8)
    for wrong in range(3):
        backup.follow([*first, *want[0][:3], 1000 + wrong, 5], GREEDY, None)
        backup.follow([*second, 2000 + wrong], GREEDY, None)
    assert (written(backup, first, 8), written(backup, second, 8)) == want
    for i in range(2 * KEPT):  # more than it keeps
        backup.follow(
            [*asked(text, f"Say {i} in words, please, and then count down from there."), *range(40, 80)], GREEDY, None
        )
    assert (written(backup, first, 8), written(backup, second, 8)) == want


def test_a_long_prompt_is_read_a_chunk_a_question_and_too_long_a_one_not_at_all(
    smollm2_draft_path: Path, text: Text
) -> None:
    backup = DraftBackup(smollm2_draft_path, text.vocabulary, context=2 * CHUNK + 8, threads=1)
    long = [*asked(text, "Name three rivers."), *range(100, 100 + 2 * CHUNK)][: 2 * CHUNK]
    assert [backup.follow(long, GREEDY, None) is None for _ in range(2)] == [True, False]
    assert backup.follow([*long, *range(200, 220)], GREEDY, None) is None
    assert backup.follow(long[:CHUNK], GREEDY, None) is not None
    assert backup.seconds > 1e-5
    other = [7, *range(300, 300 + CHUNK)]  # only fits when the first is forgotten
    assert [backup.follow(other, GREEDY, None) is None for _ in range(2)] == [True, False]
    backup.shut()


def test_a_draft_of_another_vocabulary_is_refused(smollm2_draft_path: Path) -> None:
    with pytest.raises(EngineError, match="another vocabulary"):
        DraftBackup(smollm2_draft_path, Vocabulary("other", 10, "0" * 64), threads=1)
    with pytest.raises(PacelineError, match="--backup-draft"):
        backup_of("somewhere/model.gguf", None)


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[LlamaEngine]:
    made = LlamaEngine(smollm2_path, context=512, slots=2, threads=1)
    made.step_cost = [(1, 0.0), (8, 0.0)]  # in virtual time a step costs its floor
    yield made
    made.shut()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_the_text_is_the_same_in_fewer_steps(
    engine: LlamaEngine, backup: DraftBackup, text: Text, sampling: Sampling
) -> None:
    """Nobody drafts at the edge, so every token above one a step is the backup's. Two sessions take turns."""
    prompts = [asked(text, "Write the numbers from 1 to 30, with commas between."), asked(text, "Name three rivers.")]

    async def main(top_ups: list[TopUp]) -> tuple[list[list[int]], int, tuple[str, ...]]:
        verifier, made = Verifier(engine, top_ups=top_ups), list[Generation]()
        async with agent_of(verifier) as agent:
            found = await asyncio.gather(*(answer(agent, p, sampling, 40, report=made.append) for p in prompts))
            assert agent.link.welcome is not None
            features = agent.link.welcome.features
        await verifier.stop()
        assert all(g.figures.hits == 0 for g in made)  # a hit is what an edge has sent
        return list(found), sum(g.figures.steps for g in made), features

    plain, steps, features = run(main([]))
    assert BACKUP not in features
    for top_ups in ([TopUp(backup)], [TopUp(backup), TopUp(Ngram())]):
        found, fewer, features = run(main(top_ups))
        assert found == plain
        assert fewer < 0.8 * steps
        assert BACKUP in features
    found, _, features = run(main([TopUp(Ngram())]))
    assert found == plain
    assert BACKUP not in features


def test_a_real_verifier_runs_with_it(smollm2_path: Path, smollm2_draft_path: Path, text: Text, tmp_path: Path) -> None:
    prompt = asked(text, "Write the numbers from 1 to 30, with commas between.")

    def answered(arguments: list[str]) -> tuple[list[int], tuple[str, ...]]:
        with local_verifier(["--model", str(smollm2_path), "--threads", "1", *arguments]) as url:
            return asyncio.run(main(url))

    async def main(url: str) -> tuple[list[int], tuple[str, ...]]:
        settings = Settings((Address(url),), smollm2_path, None, tmp_path, attempts=3)
        async with running_agent(settings, text, policy("ar")) as agent:
            tokens = await answer(agent, prompt, GREEDY, 24)
            assert agent.link.welcome is not None
            return tokens, agent.link.welcome.features

    plain, _ = answered([])
    tokens, features = answered(["--backup", "both", "--backup-draft", str(smollm2_draft_path)])
    assert tokens == plain
    assert BACKUP in features
