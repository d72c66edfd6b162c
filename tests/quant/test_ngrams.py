"""Counting a target's text into a table, as `paceline draft ngrams` does it."""

from pathlib import Path

from paceline.protocol.ngrams import Ngrams
from paceline.quant import shipped
from paceline.quant.cli import app
from paceline.quant.target import open_target, vocabulary
from typer.testing import CliRunner


def test_a_table_is_made_beside_a_draft_or_where_it_is_asked_for(tiny: Path, tmp_path: Path) -> None:
    folder, file, cache = tmp_path / "draft", tmp_path / "table.npz", tmp_path / "text"
    folder.mkdir()
    for out in (folder, file):
        asked = ["ngrams", str(tiny), "-o", str(out), "--conversations", "12", "--cache", str(cache)]
        done = CliRunner().invoke(app, asked)
        assert done.exit_code == 0, done.output
        assert "contexts" in done.stdout
    made = Ngrams.load(folder / shipped.NGRAMS)
    assert made.vocabulary == vocabulary(open_target(tiny)).fingerprint
    assert len(made) == len(Ngrams.load(file)) > 0


def test_what_cannot_be_counted_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"nothing")
    done = CliRunner().invoke(app, ["ngrams", str(tmp_path / "no.gguf"), "-o", str(tmp_path / "t.npz")])
    assert done.exit_code == 1
    assert "no.gguf" in done.output
    assert not (tmp_path / "t.npz").exists()
