"""The doctor: what it reads of a machine, what it measures of a link, what it expects, and what it says."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from paceline.edge.draft import PROBE_ROWS
from paceline.edge.drafts.files import cost_of
from paceline.edge.predictor import Predictor
from paceline.protocol.channel import Channel
from paceline.protocol.codec import decode_from_cloud, encode
from paceline.protocol.errors import PacelineError
from paceline.protocol.messages import Hello, Welcome
from paceline.scripts.doctor.advice import advice
from paceline.scripts.doctor.expected import learned, shipped, speeds
from paceline.scripts.doctor.link import Link, bandwidth_up, trip
from paceline.scripts.doctor.machine import Machine, look
from paceline.scripts.lab import virtual
from paceline.scripts.lab.edges import EDGES
from paceline.scripts.lab.network import LinkChannel, LinkSpec
from rig import Verifier

PI = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
Model\t\t: Raspberry Pi 5 Model B Rev 1.0
"""


def files(root: Path, told: dict[str, str]) -> Path:
    for name, text in told.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def pi(tmp_path: Path) -> Machine:
    """What it sees of a warm Raspberry Pi 5 whose container may use one gigabyte."""
    cpu = "sys/devices/system/cpu/cpu0/cpufreq"
    told = {
        "proc/cpuinfo": PI,
        "proc/meminfo": "MemTotal:        8245040 kB\nMemFree: 1 kB\nMemAvailable:    7000000 kB\n",
        "sys/fs/cgroup/memory.max": "1000000000\n",
        "sys/fs/cgroup/memory.current": "400000000\n",
        "sys/class/thermal/thermal_zone0/temp": "48000\n",
        "sys/class/thermal/thermal_zone1/temp": "82500\n",
        f"{cpu}/scaling_governor": "ondemand\n",
        f"{cpu}/scaling_cur_freq": "1500000\n",
        f"{cpu}/scaling_max_freq": "1500000\n",
        f"{cpu}/cpuinfo_max_freq": "2400000\n",
    }
    return look(tmp_path / "not" / "there", files(tmp_path, told))


def test_it_reads_a_machine(pi: Machine) -> None:
    assert pi.cpu == "Raspberry Pi 5 Model B Rev 1.0"
    assert pi.features == ("DOTPROD", "FP16_VA", "NEON")
    assert (pi.memory, pi.memory_free) == (1_000_000_000, 600_000_000)
    assert (pi.temperature, pi.governor) == (82.5, "ondemand")
    assert (pi.clock, pi.clock_limit, pi.clock_made_for) == (1500, 1500, 2400)
    assert pi.versions["python"].startswith("3.")


def test_what_is_not_told_is_not_guessed(tmp_path: Path) -> None:
    found = look(tmp_path, tmp_path)
    assert (found.memory, found.memory_free, found.temperature, found.governor, found.clock) == (None,) * 5
    assert found.features == ()
    assert found.disk_free > 0


def test_this_machine_uses_what_its_llama_cpp_was_built_for() -> None:
    found = look(Path.cwd())
    assert found.compiled, "llama.cpp says what it uses"
    assert found.memory is None or found.memory > (found.memory_free or 0) > 0


GOOD = Machine(
    "Linux", "CPU", 4, ("NEON",), ("NEON",), 4 * 10**9, 3 * 10**9, 10**10, 50.0, "schedutil", 2400, 2400, 2400,
    {"python": "3.11.2"},
)  # fmt: skip
STEPS = [(1, 0.01), (2, 0.012), (4, 0.016), (8, 0.024)]
LINK = Link("wss://x", "m", "0" * 64, 0.05, 0.001, 1e6, 1e7, 0.03)
SPEEDS = {"ar": 33.0, "sync": 40.0, "ssd": 45.0, "stream": 70.0}


def test_nothing_to_change_is_nothing() -> None:
    assert advice(GOOD, STEPS, LINK, SPEEDS) == []


@pytest.mark.parametrize(("change", "said"), [
    ({"features": ("DOTPROD", "NEON")}, "built without DOTPROD"),
    ({"compiled": ()}, "llama.cpp is not installed"),
    ({"memory_free": 200_000_000}, "Only 200 MB of memory"),
    ({"disk_free": 10_000_000}, "Only 10 MB are free where models are kept"),
    ({"versions": {"python": "3.11.2 32 bit"}}, "32 bits"),
    ({"governor": "powersave"}, "powersave"),
    ({"clock_limit": 1500.0}, "1500 MHz only"),
    ({"temperature": 84.0}, "84 degrees"),
])  # fmt: skip
def test_each_sentence_about_the_machine_has_its_cause(change: dict[str, object], said: str) -> None:
    [sentence] = advice(replace(GOOD, **change), STEPS, LINK, SPEEDS)  # type: ignore[arg-type]
    assert said in sentence


def test_each_sentence_about_draft_link_and_speed_has_its_cause() -> None:
    for sentences, said in (
        (advice(GOOD, None, LINK, SPEEDS), "paceline models fetch smollm2"),
        (advice(GOOD, STEPS, replace(LINK, jitter=0.03), SPEEDS), "wavers by 30 ms"),
        (advice(GOOD, STEPS, replace(LINK, up=64e3), SPEEDS), "64 kbit/s up are too little"),
        (advice(GOOD, STEPS, LINK, SPEEDS | {"stream": 33.5}), "gains less than it costs"),
        (advice(GOOD, STEPS, LINK, SPEEDS | {"sync": 77.0}), "--policy sync would be faster here than stream, by 10 %"),
        (advice(GOOD, STEPS, None, None), "Name a verifier with --url"),
    ):
        assert len(sentences) == 1, sentences
        assert said in sentences[0]


def test_speeds_follow_the_device_and_the_link() -> None:
    """The order of the policies that the design argues for; a draft too slow to help costs nothing."""
    fast = speeds(EDGES["small-gpu"].table, 0.05, 0.03, shipped(), tokens=64)
    assert fast["stream"] > fast["sync"] > fast["ar"]
    assert fast == speeds(EDGES["small-gpu"].table, 0.05, 0.03, shipped(), tokens=64)
    far = speeds(EDGES["small-gpu"].table, 0.2, 0.03, shipped(), tokens=64)
    assert far["sync"] < far["ar"] < far["stream"] < fast["stream"]
    slow = speeds([(1, 0.3), (8, 2.4)], 0.2, 0.03, shipped(), tokens=64)
    assert slow["stream"] > 0.95 * slow["ar"]


def test_agreement_is_the_pairs_own_once_it_is_known(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    assert learned(None) == learned(table) == shipped()
    assert sum(shipped()) < 1
    predictor = Predictor()
    predictor._offered[0, :2], predictor._taken[0, :2] = 1000.0, (700.0, 100.0)
    predictor.save(table)
    assert learned(table) == pytest.approx((0.7, 0.1))


@pytest.mark.parametrize(("round_trip", "up"), [(0.05, 1e6), (0.2, 5e6)])
def test_a_link_is_measured_as_it_is(round_trip: float, up: float) -> None:
    """In virtual time, against the real verifier's connection, over a link that is exactly so."""

    async def measured() -> tuple[float, float]:
        verifier, clock = Verifier(), asyncio.get_running_loop().time
        channel: Channel = LinkChannel(await verifier.connect(), LinkSpec(round_trip, up=up), Random(0), lambda c: None)
        known = verifier.engine.vocabulary
        await channel.send(encode(Hello((1,), known.name, known.size, known.fingerprint)))
        assert isinstance(decode_from_cloud(await channel.receive()), Welcome)
        trips = [await trip(channel, clock) for _ in range(3)]
        found = min(trips), await bandwidth_up(channel, min(trips), clock)
        await channel.close()
        await verifier.stop()
        return found

    found = virtual.run(measured())
    assert found == (pytest.approx(round_trip, rel=0.02), pytest.approx(up, rel=0.02))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline.scripts.cli", "doctor", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=os.environ | environment
    )


def test_the_command_where_there_is_no_draft_and_no_verifier(tmp_path: Path) -> None:
    done = run("--json", "--url", "ws://127.0.0.1:1", PACELINE_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["draft"], found["link"], found["expected"]) == (None, None, None)
    assert any("paceline models fetch" in sentence for sentence in found["advice"])
    assert "is `paceline cloud` running there?" in found["unreachable"]
    assert found["machine"]["cores"] >= 1


@pytest.mark.parametrize("kind", ["gguf", "onnx"])
def test_the_command_measures_the_draft(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    draft: Path = request.getfixturevalue({"gguf": "smollm2_draft_path", "onnx": "smollm2_onnx_path"}[kind])
    done = run("--draft", str(draft), "--rtt", "0.05", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:2]] == ["system", "CPU"]
    assert all(f"for {rows}" in done.stdout for rows in PROBE_ROWS)
    assert f"draft      {draft.name}: a step takes" in done.stdout
    assert "expected   ar 3" in done.stdout


def test_a_provider_is_for_an_onnx_draft_alone(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="--provider says what runs an ONNX draft"):
        cost_of(tmp_path / "draft.gguf", provider="cuda")
