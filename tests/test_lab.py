"""The lab: the recording against the real engine, the memo against the real draft, the clock, and a run that was cut."""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from paceline.cloud.engine import Work
from paceline.cloud.engines.llamacpp import LlamaEngine
from paceline.cloud.engines.replay import ReplayEngine
from paceline.edge.draft import Choice, Extended, Row
from paceline.edge.drafts.llamacpp import LlamaDraft
from paceline.edge.policies import policy
from paceline.edge.text import Text
from paceline.protocol.cloud_session import CloudSession, Limits, Walk
from paceline.protocol.errors import PacelineError
from paceline.protocol.messages import Commit, Draft, Open
from paceline.protocol.sampling import Sampling
from paceline.scripts.lab.cases import Case, Prompt, read_prompts, spread
from paceline.scripts.lab.edges import EDGES, edge_named, measured
from paceline.scripts.lab.experiment import Bench, Events, Setting, answer
from paceline.scripts.lab.memo import MemoDraft
from paceline.scripts.lab.network import LinkSpec
from paceline.scripts.lab.report import lines
from paceline.scripts.lab.sweep import Entrant, continued, sweep
from paceline.scripts.lab.trace import perfetto, spans
from paceline.scripts.lab.workshop import Workshop, outcomes
from paceline.scripts.models import Pair

TOKENS = 24
PROMPTS = [Prompt("1", "qa", "What is the capital of France?"), Prompt("2", "list", "Count from one to ten.")]


@pytest.fixture(scope="module")
def workshop(
    smollm2_path: Path, smollm2_draft_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workshop]:
    made = Workshop(Pair(smollm2_path, smollm2_draft_path), Text(smollm2_path), tmp_path_factory.mktemp("lab"), 1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def cases(workshop: Workshop) -> list[Case]:
    return workshop.cases(PROMPTS, Sampling(), TOKENS)


@pytest.fixture(scope="module")
def bench(workshop: Workshop, cases: list[Case]) -> Bench:
    return workshop.bench(cases[0], workshop.taught(cases[1:]))


def setting(name: str, round_trip: float = 0.05) -> Setting:
    return Setting(policy(name), EDGES["small-gpu"], LinkSpec(round_trip))


def commits(engine: LlamaEngine | ReplayEngine, case: Case) -> list[Commit]:
    """All commits of a session that is fed the right tokens, with wrong ones beside and at the end of them."""
    opened = Open(sid=1, prompt=case.prompt, sampling=case.sampling, max_tokens=len(case.text))
    session = CloudSession(opened, Limits(engine.vocabulary.size, engine.context), "token")
    handle, number, made = engine.open(session.sequence), 0, list[Commit]()
    while not session.finish:
        at = len(session.committed)
        ahead = [*case.text[at : at + at % 4], 5]
        tokens, parents = [7, *ahead], [0, 0, *[1] * (len(ahead) - 1)]
        session.receive(Draft(1, at, number, tuple(parents), tuple(tokens)))
        number += len(tokens)
        plan = session.plan(8)
        new = tuple(session.sequence[engine.length(handle) :])
        [walk] = engine.verify([Work(handle, new, plan, session.sampling)])
        assert isinstance(walk, Walk)
        made.append(session.apply(plan, walk))
    engine.close(handle)
    return made


def test_a_recording_commits_what_the_real_engine_commits(smollm2_path: Path, cases: list[Case]) -> None:
    case = cases[0]
    real = LlamaEngine(smollm2_path, context=512, slots=1, threads=1)
    recorded = ReplayEngine("target", real.vocabulary, {(case.prompt, case.sampling): case.text})
    assert commits(recorded, case) == commits(real, case)
    real.shut()


def test_the_memo_answers_and_counts_as_the_real_draft(workshop: Workshop, cases: list[Case], bench: Bench) -> None:
    """Both run the same rows; their candidates agree but for near-ties, which rounding may turn."""
    case = cases[0]
    real = LlamaDraft(workshop.pair.draft, workshop.vocabulary, cells=512, threads=1)
    memo = MemoDraft("draft", workshop.vocabulary, bench.memo, case, [(1, 0.005)])
    choice, p = Choice(case.sampling), len(case.prompt)
    for draft in (real, memo):
        draft.open(case.prompt)
    wrong = next(t for t in range(5, 50) if t != case.text[0])
    root = Row(1, 0, -1, case.prompt[-1], p - 1, choice)
    children = [Row(1, 1, 0, case.text[0], p, choice), Row(1, 2, 0, wrong, p, choice)]
    real.extend([root]), memo.extend([root])
    steps = [children, [Row(1, 3, 1, case.text[1], p + 1, choice), Row(1, 4, 2, 9, p + 1, choice)]]
    for rows in steps:
        a, b = real.extend(rows), memo.extend(rows)
        assert (a.ran, len(a.found)) == (b.ran, len(b.found))
        for x, y in zip(a.found, b.found, strict=True):
            assert x is not None
            assert y is not None
            assert set(x.tokens[:3]) & set(y.tokens[:3])
            assert x.confidence[0] == pytest.approx(
                y.confidence[0], abs=0.15
            )  # as between any two batches of a draft, on any CPU
    for draft in (real, memo):
        draft.commit(1, case.text[:3], [1, 3], [1, 3])
    again = [Row(1, 5, -1, case.text[2], p + 2, choice)]
    assert real.extend(again).ran == memo.extend(again).ran == 1
    real.shut()


@pytest.mark.parametrize("name", ["ar", "colo", "sync", "ssd", "stream", "stream:backup=ngram", "stream:backup=both"])
@pytest.mark.parametrize("round_trip", [0.0, 0.05])
def test_every_policy_writes_the_targets_text(cases: list[Case], bench: Bench, name: str, round_trip: float) -> None:
    run = answer(bench, cases[0], setting(name, round_trip))
    assert run.same
    assert run.tokens == len(cases[0].text)
    assert run.largest < 1024
    assert answer(bench, cases[0], setting(name, round_trip)) == run  # to the last digit


def test_virtual_time_is_the_arithmetic_of_its_costs(cases: list[Case], bench: Bench) -> None:
    """Plain decoding: half a round trip to ask, a verification for each token, half a round trip for the last one."""
    run = answer(bench, cases[0], setting("ar", 0.1))
    assert run.seconds == pytest.approx(0.1 + 0.03 * len(cases[0].text), abs=1e-6)
    assert run.first_token == pytest.approx(0.13, abs=1e-6)


def test_a_round_costs_drafting_link_and_verification(cases: list[Case], bench: Bench) -> None:
    run = answer(bench, cases[0], setting("sync:rounds=1", 0.1))
    assert run.seconds == pytest.approx(0.1 + run.steps * (0.1 + 0.03 + 0.005), rel=0.06)


def test_a_narrow_uplink_costs_time(cases: list[Case], bench: Bench) -> None:
    wide, base = setting("sync:rounds=4", 0.05), answer(bench, cases[0], setting("sync:rounds=4", 0.05))
    narrow = answer(bench, cases[0], replace(wide, link=LinkSpec(0.05, up=50e3)))
    assert narrow.seconds > base.seconds
    assert narrow.same
    shaky = answer(bench, cases[0], replace(wide, link=LinkSpec(0.05, jitter=0.01, loss=0.05)))
    assert shaky.seconds > base.seconds
    assert shaky.same


def test_a_trace_covers_the_answer(cases: list[Case], bench: Bench) -> None:
    events = Events()
    run = answer(bench, cases[0], setting("stream"), events)
    found = spans(events)
    verified = [s for s in found if s.lane == "verify"]
    assert len(verified) == run.steps
    assert sum(s.kind == "hit" for s in verified) == run.hits
    assert all(s.end <= run.seconds + 1e-9 for s in found if s.lane == "commits")
    trace = json.loads(json.dumps(perfetto(found, "t")))
    assert {e["ph"] for e in trace["traceEvents"]} == {"M", "X", "i"}


def test_a_cut_run_goes_on_where_it_stopped(workshop: Workshop, cases: list[Case], tmp_path: Path) -> None:
    out, learned = tmp_path / "r.json", workshop.taught(cases)
    entrants = [Entrant(name, name, setting(name, r)) for r in (0.0, 0.05) for name in ("ar", "stream")]
    about: dict[str, object] = {"what": "a test"}
    first = continued(dict(about), out)
    first.about["tuned"] = {"sync": "sync:rounds=4"}  # found out on the way
    sweep(workshop, cases[:1], entrants, learned, first, out)
    again = continued(about, out)
    assert again.entries == first.entries
    assert again.about["tuned"] == first.about["tuned"]
    done: list[None] = []
    sweep(workshop, cases, entrants, learned, again, out, lambda: done.append(None))
    assert len(done) == 2 * len(entrants)
    assert again.entries[: len(entrants)] == first.entries
    assert len({(e.label, e.round_trip, e.case) for e in again.entries}) == 2 * len(entrants)
    with pytest.raises(PacelineError, match="what"):
        continued({"what": "something else"}, out)
    out.write_text("{")
    with pytest.raises(PacelineError, match="not a file of results"):
        continued(about, out)
    table = {(line.policy, line.round_trip): line for line in lines(again.entries)}
    assert table[("ar", 0.0)].ratio == 1
    assert table[("stream", 0.05)].prompts == 2


def test_a_damaged_recording_or_memo_is_made_anew(workshop: Workshop, cases: list[Case]) -> None:
    for path in (workshop.cache / "recordings").glob("*.json"):
        path.write_text("{")
    assert workshop.cases(PROMPTS, Sampling(), TOKENS) == cases
    memo = workshop.memo(cases[0])
    known = outcomes(memo, cases[0])
    memo.save()
    for path in (workshop.cache / "memo").rglob("*.npz"):
        path.write_bytes(path.read_bytes()[:100])
    again = outcomes(workshop.memo(cases[0]), cases[0])
    assert [list(c.tokens) for c, _ in again] == [list(c.tokens) for c, _ in known]


def test_prompts_take_turns_between_categories(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"id": i, "category": "ab"[i > 2], "turns": [str(i)]}) for i in range(5)))
    assert [p.name for p in spread(read_prompts(path), 3)] == ["0", "3", "1"]
    assert [p.name for p in spread(read_prompts(path), 2, skip=2)] == ["1", "4"]
    with pytest.raises(PacelineError, match="9 prompts"):
        spread(read_prompts(path), 9)
    path.write_text('{"turns": []}')
    with pytest.raises(PacelineError, match="not lines of JSON"):
        read_prompts(path)


def test_an_edge_is_named_or_given() -> None:
    assert edge_named("pi").first == 0.06
    assert edge_named("5,0.5")(3) == pytest.approx(0.006)
    for wrong in ("toaster", "5", "0,1", "a,b", "-1,0"):
        with pytest.raises(PacelineError, match="not known"):
            edge_named(wrong)


@pytest.mark.parametrize("name", ["stream", "ssd"])
def test_draws_are_measured_with_the_real_target(workshop: Workshop, name: str) -> None:
    [case] = workshop.cases(PROMPTS[1:], Sampling(temperature=0.8, seed=3), TOKENS)
    drawn = setting(f"{name}:rule=rejection", 0.0)
    taught = workshop.taught_by_draws([case], drawn)
    run = answer(workshop.bench(case, taught), case, drawn)
    assert (run.tokens, run.same) == (TOKENS, None)
    assert run.accepted > TOKENS / 4
    assert run.largest <= 1024
    assert answer(workshop.bench(case, taught), case, drawn) == run, "the same draws, the same choices"
    with pytest.raises(PacelineError, match="only a recording"):
        answer(replace(workshop.bench(case, taught), target=None), case, drawn)


def test_a_measured_step_is_the_whole_of_it(workshop: Workshop) -> None:
    """What is charged for `native` holds the search for candidates, too."""
    forwards: dict[int, list[float]] = {}

    class Watched(LlamaDraft):
        def extend(self, rows: Sequence[Row]) -> Extended:
            done = super().extend(rows)
            if rows[0].parent == 0:
                forwards.setdefault(len(rows), []).append(done.forward)
            return done

    draft = Watched(workshop.pair.draft, workshop.vocabulary, cells=512, threads=1)
    table = measured(draft)
    draft.shut()
    assert [rows for rows, _ in table] == list(forwards)
    for rows, seconds in table:
        assert seconds > statistics.median(forwards[rows]) > 0
