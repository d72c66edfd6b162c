"""`paceline doctor` before a running verifier: the link is measured, and what to expect of it follows."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def test_a_running_verifier_is_measured(system: Any, smollm2_draft_path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline.scripts.cli", "doctor", "--json", "--draft", str(smollm2_draft_path)]
    environment = os.environ | {"PACELINE_URL": system.verifier, "PACELINE_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    link = found["link"]
    assert link["fingerprint"] == system.text.vocabulary.fingerprint
    assert 0 < link["round_trip"] < 10
    assert min(link["up"], link["down"]) > 0
    assert link["verify"] >= 0.05  # what this verifier is paced to
    assert set(found["expected"]) == {"ar", "sync", "ssd", "stream"}
    assert [rows for rows, _ in found["step_cost"]] == [1, 2, 4, 8]
    assert found["unreachable"] is None
