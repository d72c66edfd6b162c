"""The engine benchmark: its workload, its figures, its command."""

import json
import random
from pathlib import Path

import pytest
import typer
from paceline.cloud.bench_engine import Load, command, measure, read_counts, tree
from paceline.cloud.engines.torch import TorchEngine
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.torch_target import Options, bring_up
from paceline.protocol.errors import EngineError
from small_models import write_folder
from typer.testing import CliRunner

LOAD = Load(prompt=10, steps=5, nodes=6, right=1.0)


def small_engine(folder: Path) -> TorchEngine:
    return bring_up(write_folder(folder, "llama2"), Options(device="cpu", cache_bytes=2**22, free_width=0, exact=True))


def test_trees_that_are_always_right_are_accepted_to_their_main_paths_end(tmp_path: Path) -> None:
    """Six nodes are four of the main path with two siblings beside it."""
    report = measure(small_engine(tmp_path), "small", [1, 3], LOAD)
    assert [r.sessions for r in report.sessions] == [1, 3]
    assert [r.accepted for r in report.sessions] == [4.0, 4.0]
    assert [r.rows for r in report.sessions] == [7.0, 21.0]
    assert all(r.outside is not None and r.outside > 0 for r in report.sessions)
    assert [rows for rows, _ in report.curve] == [1, 2, 4, 8, 16, 32, 64, 128]


def test_trees_that_are_always_wrong_are_not_accepted() -> None:
    report = measure(ToyEngine(), "toy", [2], Load(prompt=4, steps=5, nodes=6, right=0.0))
    assert report.sessions[0].accepted == 0
    assert report.sessions[0].outside is None, "an engine without timing has no such figure"


def test_a_tree_has_as_many_nodes_as_asked_for_or_as_the_truth_allows() -> None:
    plan = tree(random.Random(0), [5, 6, 7], Load(nodes=8, right=1.0), 50)
    assert [t for t in plan.tokens if t in (5, 6, 7)] == [5, 6, 7]
    assert all(parent < i for i, parent in enumerate(plan.parents))
    assert len(tree(random.Random(0), list(range(40)), Load(nodes=8, right=1.0), 50).tokens) == 8


def test_the_command_prints_one_json_object(tmp_path: Path) -> None:
    asked: list[object] = []

    def make(engine: str, model: Path, *, exact: bool, quant: str | None, device: str) -> ToyEngine:
        asked.append((engine, model, exact, quant, device))
        return ToyEngine()

    app = typer.Typer()
    app.command()(command(lambda name: tmp_path / name, make))
    result = CliRunner().invoke(app, ["--model", "m", "--engine", "toy", "--sessions", "1,2", "--steps", "2", "--json"])
    assert result.exit_code == 0, result.output
    assert [r["sessions"] for r in json.loads(result.output)["sessions"]] == [1, 2]
    assert asked == [("toy", tmp_path / "m", False, None, "auto")]


@pytest.mark.parametrize("text", ["", "1,x", "0,4", "-1"])
def test_counts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(EngineError, match="--sessions"):
        read_counts(text)
