"""Many sessions on one verifier: everybody gets a fair share, whatever the others send. Virtual time, recorded target."""

import json
from dataclasses import replace

import pytest
import typer
from paceline.scripts.lab.load import Setting, command, load
from typer.testing import CliRunner

SETTING = Setting(sessions=16, seconds=5.0, width=64)


@pytest.mark.parametrize("liars", [0, 3])
def test_everybody_gets_a_fair_share(liars: int) -> None:
    made = load(replace(SETTING, liars=liars))
    assert made.fairness >= 0.95
    assert made.step == pytest.approx(0.03)
    assert made.p99_between_commits == pytest.approx(0.03)  # everybody is in every step
    assert made.tokens_a_step > 1.5


def test_all_of_64_sessions_get_theirs() -> None:
    made = load(Setting(sessions=64, seconds=2.0))
    assert made.fairness >= 0.95
    assert made.sessions == 64


def test_the_command_prints_a_line_a_run() -> None:
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, ["--sessions", "1,2", "--seconds", "2", "--json"])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["sessions"] for line in lines] == [1, 2]
    assert all(line["engine_seconds_per_1000"] < line["plain_engine_seconds_per_1000"] for line in lines)
