"""What a plan says: that it is the lab's own measurement of the samples, what a live verifier adds, and the bounds beside it."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from paceline.edge.websocket import Address
from paceline.protocol.errors import PacelineError
from paceline.scripts.cli import app
from paceline.scripts.lab.calibration import Outcomes
from paceline.scripts.lab.command_plan import LEARN, TOKENS, as_lines, speed_of_light
from paceline.scripts.lab.live import measured
from paceline.scripts.local import local_verifier
from typer.testing import CliRunner

TEXTS = ["What is the capital of France?", "Count from one to ten.", "Why is the sky blue?", "Name three rivers."]
FLOOR = 0.08


@pytest.fixture(scope="module")
def url(smollm2_path: Path) -> Iterator[str]:
    with local_verifier(["--model", str(smollm2_path), "--threads", "1", "--verify-floor", str(FLOOR)]) as address:
        yield address


def test_a_live_verifier_is_measured(url: str, smollm2_path: Path) -> None:
    round_trip, step = measured(Address(url), smollm2_path)
    assert 0 < round_trip < 10
    assert step >= FLOOR
    with pytest.raises(PacelineError):
        measured(Address("ws://127.0.0.1:9"), smollm2_path)


def test_a_plan_predicts_every_policy(url: str, smollm2_draft_path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    texts = [f"{t} Answer in {n} words." for n in range(5, 8) for t in TEXTS][: LEARN + 1]
    prompts.write_text("\n".join(json.dumps({"id": i, "turns": [t]}) for i, t in enumerate(texts)))
    asked = [
        "plan",
        "--prompts",
        str(prompts),
        "--measure",
        url,
        "--count",
        "1",
        "--max-tokens",
        "16",
        "--threads",
        "1",
    ]
    asked += ["--policies", "ar,stream", "--edge", "fast"]
    done = CliRunner().invoke(app, [*asked, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    plain, stream = (found["policies"][name] for name in ("ar", "stream"))
    assert found["verify_seconds"] >= FLOOR
    assert plain["forwards"] == TOKENS
    assert plain["gpu_seconds"] == pytest.approx(TOKENS * found["verify_seconds"], rel=1e-3)
    assert plain["tokens_per_second"] <= 1 / FLOOR
    assert stream["tokens_per_second"] > 0.9 * plain["tokens_per_second"]
    assert stream["nodes_sent"] > 0 == plain["nodes_sent"]
    assert all(name in as_lines(found) for name in ("ar", "stream", "GPU s", "P = 16"))


def test_the_speed_of_light_is_the_formulas_of_a_known_distribution() -> None:
    """Eight candidates of 1/8 each and nothing else: the entropy is ln 8, and sum p ln^2 p its square."""
    p = np.full((50, 8), 1 / 8)
    found = speed_of_light(Outcomes(p, p, np.zeros_like(p)), 64)
    mu = math.log(8)
    assert found["entropy"] == pytest.approx(mu, abs=1e-3)
    assert found["ln P / mu"] == pytest.approx(2, abs=1e-3)
    assert found["ln P / mu + mu2 / mu^2"] == pytest.approx(3, abs=1e-3)
    assert found["(mu + mu2) ln P / mu^2"] == pytest.approx((mu + mu**2) * math.log(64) / mu**2, abs=1e-3)
    sure = np.full((50, 8), 1e-5)
    sure[:, 0] = 0.99993
    assert speed_of_light(Outcomes(sure, sure, sure), 4)["ln P / mu"] is None  # more than there are nodes
