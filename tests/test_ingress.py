"""The ingress with its consistent hash, as it is shipped, in front of two real verifiers: who comes back finds its session.

HAProxy comes from the system's packages; where it is not installed these tests say so and are skipped.
"""

import asyncio
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from paceline.edge.websocket import Address, connecting
from paceline.scripts.chaos.answers import Tally
from paceline.scripts.chaos.kills import Process, ask_until, free_port, real_agent, running
from paceline.scripts.visitor import comes_back

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
SHIPPED = Path(__file__).parent.parent / "cloud" / "deploy" / "ingress.yaml"
pytestmark = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="haproxy is not installed; apt-get install haproxy"
)


def manifests() -> dict[str, Any]:
    return {f"{d['kind']} {d['metadata']['name']}": d for d in yaml.safe_load_all(SHIPPED.read_text())}


def configuration() -> str:
    text: str = manifests()["ConfigMap paceline-ingress"]["data"]["haproxy.cfg"]
    return text


@asynccontextmanager
async def ingress(folder: Path, ports: list[int]) -> AsyncIterator[str]:
    """The address of the shipped configuration in front of these ports: only where it listens and whom it asks are other."""
    port = free_port()
    text, found = re.subn(
        r"server-template .*", "\n    ".join(f"server v{p} 127.0.0.1:{p}" for p in ports), configuration()
    )
    text = text.replace("bind :8765", f"bind 127.0.0.1:{port}").replace("inter 1s", "inter 100ms")
    assert found == 1
    (folder / "haproxy.cfg").write_text(text)
    process = start(folder / "haproxy.cfg")
    try:
        await until(lambda: status(f"http://127.0.0.1:{port}/readyz") == 200)
        yield f"ws://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def start(file: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["haproxy", "-f", file], stderr=file.with_suffix(".said").open("w"))


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except OSError:
        return 0


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not await asyncio.to_thread(true):  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.05)


def steps(verifier: Process) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{verifier.port}/metrics", timeout=5) as answer:
        found = re.search(rb"^paceline_steps_total (\S+)", answer.read(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_the_configuration_is_understood_as_it_is_shipped(tmp_path: Path) -> None:
    (tmp_path / "haproxy.cfg").write_text(configuration())
    command = ["haproxy", "-c", "-f", tmp_path / "haproxy.cfg"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ALERT" not in done.stderr


def test_it_asks_for_the_verifiers_by_the_names_that_they_have() -> None:
    found = manifests()
    service = found["Service paceline-verifiers"]
    [port] = service["spec"]["ports"]
    assert f"_{port['name']}._tcp.{service['metadata']['name']}." in configuration()
    assert service["spec"]["clusterIP"] == "None"
    verifiers = list(yaml.safe_load_all((SHIPPED.parent / "kubernetes.yaml").read_text()))
    [pod] = [d["spec"]["template"] for d in verifiers if d["kind"] == "Deployment"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert port["targetPort"] in [p["name"] for p in pod["spec"]["containers"][0]["ports"]]
    own = found["Deployment paceline-ingress"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service paceline-ingress"]["spec"]["selector"].items() <= own.items()


async def test_an_edge_comes_back_to_its_verifier_and_edges_are_spread(tmp_path: Path) -> None:
    async with running(2) as verifiers, ingress(tmp_path, [v.port for v in verifiers]) as url:
        for i in range(8):
            assert await comes_back(connecting([Address(url)], name=f"edge-{i}"))
        assert await comes_back(connecting([Address(url)])), "by the name that an edge gives itself"
        for verifier in verifiers:
            assert await asyncio.to_thread(steps, verifier) > 0
        # without a name of its own it is known by its key, and without one by its address
        assert await comes_back(connecting([Address(url, key="a-key-that-is-long-enough")], name=""))
        assert await comes_back(connecting([Address(url)], name=""))


async def test_where_a_verifier_is_killed_its_edges_go_on_elsewhere(tmp_path: Path) -> None:
    tally, done = Tally(), asyncio.Event()
    async with running(2) as verifiers, ingress(tmp_path, [v.port for v in verifiers]) as url:
        agents = [real_agent(connecting([Address(url)]), i) for i in range(6)]
        asking = [asyncio.create_task(ask_until(done, agent, tally, i, 200)) for i, agent in enumerate(agents)]
        await until(lambda: all(agent.generations for agent in agents))
        for verifier in verifiers:
            await verifier.kill(signal.SIGKILL)
            answers = tally.answers
            await until(lambda answers=answers: tally.answers > answers + 3)  # type: ignore[misc]
            await verifier.start()
            await until(lambda v=verifier: status(f"http://127.0.0.1:{v.port}/readyz") == 200)  # type: ignore[misc]
        done.set()
        await asyncio.gather(*asking)
    assert tally.whole, tally.reasons


async def test_what_waits_at_the_other_verifier_is_not_found() -> None:
    """The check that these tests stand on fails where it should."""
    async with running(2) as verifiers:
        assert not await comes_back(connecting([Address(v.url) for v in verifiers]))
