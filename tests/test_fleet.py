"""Many edges on many verifiers in virtual time: the cost table, the book, the text, the sums, the command."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import typer
from paceline.edge.predictor import Predictor
from paceline.edge.text import Text
from paceline.protocol.errors import PacelineError
from paceline.protocol.sampling import Sampling
from paceline.protocol.vocabulary import Vocabulary
from paceline.scripts.lab.book import Book, Page, write_book
from paceline.scripts.lab.cases import Case, Prompt
from paceline.scripts.lab.command_fleet import Pair, bend, fleet_command, paired
from paceline.scripts.lab.crowd import CrowdEdge
from paceline.scripts.lab.edges import EDGES
from paceline.scripts.lab.experiment import answer
from paceline.scripts.lab.fleet import Made, Setting, fleet, place
from paceline.scripts.lab.memo import begin, digest_of
from paceline.scripts.lab.steps import A100, StepTable, step_table
from paceline.scripts.lab.workshop import Workshop, outcomes
from paceline.scripts.models import Pair as Models
from paceline.scripts.options import whole_numbers
from test_lab import setting as lab_setting
from typer.testing import CliRunner

VOCABULARY = Vocabulary.of("words", [f"w{i}" for i in range(1000)])
FLAT = StepTable("flat", "a test", ((1, 0.03),))
SMALL = StepTable("small", "a tenth of an A100", ((1, 0.03), (15, 0.03), (30, 0.06)))


def book(seed: int, length: int = 60, right: float = 0.8) -> Book:
    """A text, and a draft whose first choice is right that often; its second is right where the first is not."""
    random = Random(seed)
    text = tuple(random.choices(range(500), k=length))
    case = Case(f"{seed}", "all", (seed,), Sampling(), text)
    along = [Page([]) for _ in range(length + 1)]
    for i in reversed(range(length)):
        wrong, first = 500 + i, random.random() < right
        order = (text[i], wrong) if first else (wrong, text[i])
        along[i] = Page(
            [(order[0], math.log(right)), (order[1], math.log(0.95 - right))],
            {text[i]: along[i + 1], wrong: Page([(600 + i, -0.1)])},
        )
    return Book(case, along)


BOOKS = [book(seed) for seed in range(4)]
SETTING = Setting(1, 4, FLAT, EDGES["small-gpu"], seconds=4.0)


def made(setting: Setting, books: Sequence[Book] = BOOKS) -> Made:
    return fleet(setting, books, VOCABULARY, lambda: None)


# ---- what a step costs


def test_a_step_costs_what_the_table_says() -> None:
    table = step_table("1:30,64:31,128:40")
    assert [table(n) for n in (1, 64, 96, 128, 192)] == pytest.approx([0.030, 0.031, 0.0355, 0.040, 0.049])
    assert [A100(n) for n in (1, 100, 153, 306)] == pytest.approx([0.03, 0.03, 0.03, 0.06])
    assert FLAT(1000) == 0.03
    assert table.measured_at_start[0] == (1, 0.030)


def test_a_table_is_read_from_what_bench_engine_printed(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({"engine": "toy", "model": "m", "curve": [[1, 0.01], [8, 0.02]]}))
    assert step_table(str(path))(8) == 0.02
    assert "toy" in step_table(str(path)).source
    for wrong in ("h100", "1:x", "8:30,1:20", "0:1", "1:0"):
        with pytest.raises(PacelineError, match="--costs"):
            step_table(wrong)
    path.write_text("{}")
    with pytest.raises(PacelineError, match="not the JSON"):
        step_table(str(path))


# ---- what the draft says


def test_a_book_holds_what_the_real_draft_says(smollm2_path: Path, smollm2_draft_path: Path, tmp_path: Path) -> None:
    workshop = Workshop(Models(smollm2_path, smollm2_draft_path), Text(smollm2_path), tmp_path, 1)
    [case] = workshop.cases([Prompt("1", "qa", "What is the capital of France?")], Sampling(), 16)
    bench = workshop.bench(case, Predictor())
    run = answer(bench, case, lab_setting("stream"))
    written = write_book(bench.memo, case, bench.predictor)
    workshop.close()
    along = outcomes(bench.memo, case)
    assert len(written.along) == len(case.text) + 1
    pages, beside = {id(page) for page in written.along}, 0
    for i, (found, token) in enumerate(along):
        page = written.along[i]
        chances = bench.predictor.probabilities(found, seeded=False)
        assert [t for t, _ in page.candidates] == found.tokens[: len(page.candidates)].tolist()
        assert [math.exp(c) for _, c in page.candidates] == pytest.approx(chances[: len(page.candidates)])
        if token in dict(page.candidates):
            assert page.next[token] is written.along[i + 1]
        for other, below in page.next.items():
            digest = digest_of(case, (*case.text[:i], other))
            assert bench.memo.held(digest) is not None
            beside += id(below) not in pages
    assert beside > 0
    assert bench.memo.held(begin(case)) is not None
    # one edge that reads it alone makes about what the real agent makes, which also looks for repeats and learns on
    alone = fleet(Setting(1, 1, FLAT, EDGES["small-gpu"], seconds=20.0), [written], workshop.vocabulary, lambda: None)
    assert alone.altered == 0
    assert alone.tokens_a_second_an_edge == pytest.approx(run.tokens / run.seconds, rel=0.25)


# ---- what a fleet makes


def test_every_answer_is_the_targets_and_the_run_can_be_repeated() -> None:
    first, again = made(SETTING), made(SETTING)
    assert first.whole > 4
    assert first.altered == 0
    assert replace(first, own_in_step=0.0) == replace(again, own_in_step=0.0)
    assert first.own_in_step > 0


def test_plain_edges_make_a_token_a_step() -> None:
    plain = made(replace(SETTING, drafts=False))
    assert plain.tokens_a_step == 1
    assert (plain.step, plain.nodes) == (pytest.approx(0.03), 0)
    assert plain.p50_between_commits == pytest.approx(0.03)
    assert plain.gpu_seconds_per_1000 == pytest.approx(1000 * 0.03 / plain.rows, rel=1e-6)
    drafting = made(SETTING)
    assert drafting.gpu_seconds_per_1000 < 0.6 * plain.gpu_seconds_per_1000
    assert drafting.tokens_a_second > 1.5 * plain.tokens_a_second


def test_where_rows_cost_a_step_takes_what_its_rows_cost_and_fewer_of_them() -> None:
    dear = StepTable("dear", "a test", ((1, 0.01), (101, 0.41)))
    plain, drafting = (made(replace(SETTING, costs=dear, drafts=drafts)) for drafts in (False, True))
    assert plain.step == pytest.approx(dear(1) + 0.004 * (plain.rows - 1))
    assert drafting.step == pytest.approx(dear(1) + 0.004 * (drafting.rows - 1))
    assert drafting.nodes < made(SETTING).nodes
    assert drafting.altered == 0


@pytest.mark.parametrize("edges", [2, 8, 16, 32])
def test_drafting_is_never_below_plain_however_many_share_a_verifier(edges: int) -> None:
    """From 15 rows on nothing can be better than plain."""
    plain, drafting = (made(replace(SETTING, edges=edges, costs=SMALL, drafts=drafts)) for drafts in (False, True))
    assert drafting.tokens_a_second > (1.5 if edges < 4 else 1.15 if edges < 15 else 0.99) * plain.tokens_a_second
    assert drafting.gpu_seconds_per_1000 < 1.002 * plain.gpu_seconds_per_1000
    assert drafting.p50_between_commits < 1.3 * plain.p50_between_commits
    assert drafting.altered == 0


def test_who_drafts_does_not_slow_down_who_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other edge is plain; alone they would get a token each 30 ms."""
    edges: list[CrowdEdge] = []

    class EveryOther(CrowdEdge):
        def __init__(self, *given: Any, drafts: bool) -> None:
            super().__init__(*given, drafts=drafts and len(edges) % 2 == 0)
            edges.append(self)

    monkeypatch.setattr("paceline.scripts.lab.fleet.CrowdEdge", EveryOther)
    made(replace(SETTING, edges=12, costs=SMALL))
    drafting, plain = (
        sum(n for edge in part for at, n in edge.diary.commits if at > 1) / 6 / (SETTING.seconds - 1)
        for part in (edges[::2], edges[1::2])
    )
    assert plain > 0.9 / 0.03
    assert drafting > 1.2 / 0.03


def test_verifiers_share_nothing_and_edges_are_placed() -> None:
    one, two = made(SETTING), made(replace(SETTING, verifiers=2, edges=8))
    assert two.fullest == 4
    assert two.tokens_a_second == pytest.approx(2 * one.tokens_a_second, rel=0.2)
    hashed = replace(SETTING, verifiers=4, edges=200, balance="hash")
    before = [place(hashed, i) for i in range(200)]
    after = [place(replace(hashed, verifiers=5), i) for i in range(200)]
    assert set(before) == set(range(4))
    assert all(b == a or a == 4 for b, a in zip(before, after, strict=True)), "only to the new one"
    assert before != after


def test_it_says_where_it_bends_and_why() -> None:
    base = made(replace(SETTING, drafts=False))
    light, heavy = (
        replace(base, edges=n, fullest=n, tokens_a_second_an_edge=rate) for n, rate in ((4, 80.0), (64, 50.0))
    )
    slow = replace(heavy, step=0.06, rows=200)
    runs = paired([(base, light), (base, slow)])
    assert [run.linear for run in runs] == [1.0, 0.625]
    assert "200 rows and takes 60.0 ms, against 30.0 ms" in bend(runs, 0.03)
    assert "a session gets" in bend([Pair(base, heavy, 0.6)], 0.03)
    assert "up to 4 edges" in bend(runs[:1], 0.03)


# ---- the command


def test_numbers_are_whole_and_above_0() -> None:
    assert whole_numbers("1,4,16") == [1, 4, 16]
    for wrong in ("", "0", "a", "1;2", "-1"):
        with pytest.raises(PacelineError, match="whole numbers"):
            whole_numbers(wrong)


@pytest.fixture
def arguments(smollm2_draft_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("paceline.scripts.lab.prepare.cache_folder", lambda: tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["Count from one to ten."]}\n')
    small = [
        "--count",
        "1",
        "--learn",
        "0",
        "--max-tokens",
        "12",
        "--seconds",
        "2",
        "--verifiers",
        "1,2",
        "--edges",
        "2",
    ]
    return ["--prompts", str(prompts), *small]


def test_the_command_shows_and_prints_and_draws(arguments: list[str], tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(fleet_command)
    picture = tmp_path / "fleet.png"
    done = CliRunner().invoke(app, [*arguments, "--json", "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(run["made"]["verifiers"], run["made"]["edges"]) for run in found["runs"]] == [(1, 2), (2, 4)]
    assert found["alone"] > 0
    assert found["costs"] == "a100"
    assert "recorded" in found["note"]
    assert not any(run["made"]["altered"] for run in found["runs"])
    assert asdict(Made(**found["runs"][0]["made"])) == found["runs"][0]["made"]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    done = CliRunner().invoke(app, [*arguments, "--costs", "1:10,8:20"])
    assert done.exit_code == 0, done.output
    assert "virtual clock" in done.stdout
    assert "given" in done.stdout
