"""A verifier's settings: where they come from and which wins, what a wrong one says, and what --check and logs show."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paceline.cloud.keys import KeyFileError, Keys
from paceline.cloud.limits import Allowance
from paceline.cloud.logs import JsonLines, TextLines, set_up
from paceline.cloud.serve import check_engine, load_engine
from paceline.cloud.settings import effective, listing
from paceline.protocol.errors import PacelineError

KEY = "0123456789abcdef0123"


def test_flags_win_over_the_environment_over_the_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cloud.toml"
    file.write_text('port = 1\nslots = 2\ncontext = 100\nkeys = "k"\n')
    monkeypatch.setenv("PACELINE_CLOUD_PORT", "3")
    monkeypatch.setenv("PACELINE_CLOUD_SLOTS", "4")
    settings, sources = effective({"port": 5}, file)
    assert (settings.port, settings.slots, settings.context, settings.queue) == (5, 4, 100, 256)
    assert settings.keys == Path("k")
    assert [sources[n] for n in ("port", "slots", "context", "queue")] == [
        *("--port", "PACELINE_CLOUD_SLOTS", str(file), "default")
    ]


def test_what_check_shows_could_be_the_file(tmp_path: Path) -> None:
    settings, sources = effective({"host": 'a"b\\c', "verify_floor": 0.25, "keep_order": False, "slots": 3})
    file = tmp_path / "cloud.toml"
    file.write_text(listing(settings, sources))
    assert effective({}, file)[0] == settings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port = 70000", r"port \(.*cloud\.toml\): input should be less than or equal to 65535"),
        ("slots = 'many'", r"slots \(.*cloud\.toml\): input should be a valid integer"),
        ("prot = 1", "there is no setting 'prot'"),
        ("port", "not TOML"),
    ],
)
def test_a_wrong_file_names_the_setting(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "cloud.toml"
    file.write_text(text)
    with pytest.raises(PacelineError, match=says):
        effective({}, file)


def test_a_wrong_variable_and_a_missing_file_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PacelineError, match="nowhere"):
        effective({}, Path("nowhere.toml"))
    monkeypatch.setenv("PACELINE_CLOUD_DRAIN_TIMEOUT", "-1")
    with pytest.raises(PacelineError, match=r"drain_timeout \(PACELINE_CLOUD_DRAIN_TIMEOUT\)"):
        effective({})


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = [sys.executable, "-m", "paceline.scripts.cli", "cloud", *arguments]
    env = os.environ | environment
    return subprocess.run(code, capture_output=True, text=True, env=env, check=False)


def test_check_shows_what_is_in_force_and_no_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"laptop {KEY} sessions=2\n")
    done = command("--check", "--keys", str(keys), PACELINE_CLOUD_QUEUE="7")
    assert done.returncode == 0, done.stderr
    assert "queue = 7" in done.stdout
    assert "holds 1 keys" in done.stdout
    assert KEY not in done.stdout + done.stderr
    done = command("--check", "--slots", "0")
    assert done.returncode
    assert "slots" in done.stderr


def test_limits_of_a_key_stand_behind_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"a {KEY} sessions=2 tokens_a_minute=600\nb {KEY}b  context=9 connections=3\nc {KEY}c\n")
    keys = Keys(file)
    assert keys.allowance_of("a") == Allowance(sessions=2, tokens_a_minute=600)
    assert keys.allowance_of("b") == Allowance(context=9, connections=3)
    assert keys.allowance_of("c") == keys.allowance_of("nobody") == Allowance()
    for wrong in ("session=2", "sessions=0", "sessions=x", "sessions=1 sessions=2"):
        file.write_text(f"a {KEY} {wrong}\n")
        with pytest.raises(KeyFileError, match="line 1: session"):
            Keys(file)


def test_logs_are_objects_with_figures() -> None:
    record = logging.LogRecord("paceline.audit", logging.INFO, "", 0, "session %s", ("stop",), None)
    record.figures = {"key": "laptop", "tokens": 5}
    line = json.loads(JsonLines().format(record))
    assert line["message"] == "session stop"
    assert (line["key"], line["tokens"], line["level"]) == ("laptop", 5, "info")
    assert TextLines("%(message)s").format(record) == "session stop key=laptop tokens=5"


def test_strangers_fill_no_logs() -> None:
    """websockets has a traceback to tell of everybody who comes to the port and speaks something else."""
    levels = {name: logging.getLogger(name).level for name in ("", "websockets")}
    handlers = logging.getLogger().handlers[:]
    try:
        set_up("json", "info")
        assert not logging.getLogger("websockets.server").isEnabledFor(logging.ERROR)
        assert logging.getLogger("paceline.audit").isEnabledFor(logging.INFO)
    finally:
        logging.basicConfig(handlers=handlers, force=True)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"exact": True}, "--exact is for the torch engine, this is llamacpp"),
        ({"quant": "nf4"}, "--quant is for the torch engine"),
        ({"device": "cuda", "engine": "toy"}, "--device is for the torch engine, this is toy"),
        ({"vllm_args": "--seed 1", "engine": "torch"}, "--vllm-args is for the vllm engine"),
    ],
)
def test_a_setting_that_the_engine_would_ignore_is_refused(given: dict[str, object], says: str) -> None:
    settings, _ = effective(given)
    with pytest.raises(PacelineError, match=says):
        load_engine(settings, None)
    check_engine(effective({"exact": True, "quant": "w4", "device": "cpu", "engine": "torch"})[0])
