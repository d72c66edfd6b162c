"""Two real verifiers behind a real proxy, restarted one after the other under load: no token lost or altered.

The proxies run with the configurations that are shipped, with other ports. They come from the system's packages (haproxy,
nginx-light); where they are not installed the tests say so and are skipped.
"""

import asyncio
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from paceline.cloud.engines.toy import ToyEngine
from paceline.edge.websocket import Address, connecting
from paceline.protocol.channel import Channel
from paceline.scripts.chaos.answers import Question, Tally
from paceline.scripts.chaos.kills import ask, ask_until, free_port, real_agent, running

DEPLOY = Path(__file__).parent.parent / "cloud" / "deploy"
COMMANDS = {
    "haproxy": lambda file: ["haproxy", "-f", str(file)],
    "nginx": lambda file: ["nginx", "-p", str(file.parent), "-c", str(file), "-g", "daemon off;"],
}
FILES = {"haproxy": "haproxy.cfg", "nginx": "nginx.conf"}


@contextmanager
def proxy(name: str, folder: Path, ports: list[int], changed: tuple[str, str] | None = None) -> Iterator[str]:
    """The address of a proxy in front of these two ports, with one setting `changed` from what is shipped."""
    port = free_port()
    text = (DEPLOY / FILES[name]).read_text()
    for shipped, used in zip((8765, 8766, 8767), (port, *ports), strict=True):
        assert f"127.0.0.1:{shipped}" in text
        text = text.replace(f"127.0.0.1:{shipped}", f"127.0.0.1:{used}")
    if changed is not None:
        assert changed[0] in text
        text = text.replace(*changed)
    file = folder / FILES[name]
    file.write_text(text)
    process = subprocess.Popen(COMMANDS[name](file), cwd=folder, stderr=(folder / "said").open("w"))
    try:
        yield f"ws://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


async def listening(url: str) -> None:
    host, port = url.removeprefix("ws://").split(":")
    for _ in range(100):
        with socket.socket() as s:
            if s.connect_ex((host, int(port))) == 0:
                return
        await asyncio.sleep(0.05)
    raise AssertionError(f"nothing listens at {url}")


@pytest.mark.parametrize("name", ["haproxy", "nginx"])
async def test_a_rolling_restart_loses_and_alters_nothing(name: str, tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed; apt-get install {name if name == 'haproxy' else 'nginx-light'}")
    tally, done = Tally(), asyncio.Event()
    async with running(2, "--drain-timeout", "1") as verifiers:
        with proxy(name, tmp_path, [v.port for v in verifiers]) as url:
            await listening(url)
            agents = [real_agent(connecting([Address(url)]), i) for i in range(4)]
            asking = [asyncio.create_task(ask_until(done, agent, tally, i, 600)) for i, agent in enumerate(agents)]
            await asyncio.sleep(1)
            for verifier in verifiers:
                before = sum(agent.link.traffic.frames_down for agent in agents)
                assert await verifier.kill(signal.SIGTERM) == 0
                await verifier.start()
                await asyncio.sleep(0.7)
                assert sum(agent.link.traffic.frames_down for agent in agents) > before
            done.set()
            await asyncio.gather(*asking)
    assert tally.answers >= 4
    assert tally.whole, tally.reasons


async def test_a_proxy_that_closes_idle_connections_costs_no_answer(tmp_path: Path) -> None:
    """nginx, less patient than the pings are frequent: it closes the link again and again, and every answer is right."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed; apt-get install nginx-light")
    tally, drawn, target = Tally(), Random(1), ToyEngine()
    async with running(1) as [verifier]:
        changed = ("proxy_read_timeout 60s", "proxy_read_timeout 700ms")
        with proxy("nginx", tmp_path, [verifier.port, free_port()], changed) as url:
            await listening(url)
            connections: list[Channel] = []
            reach = connecting([Address(url)])

            async def connect() -> Channel:
                connections.append(await reach())
                return connections[-1]

            async with real_agent(connect) as agent:
                for _ in range(3):
                    before = len(connections)
                    while len(connections) < before + 2:  # noqa: ASYNC110 - closed by another process
                        await asyncio.sleep(0.05)
                    question = Question.drawn(drawn, target.vocabulary.size, 100)
                    await ask(agent, question, question.answer(target), tally)
    assert tally.answers == 3
    assert tally.whole, tally.reasons


async def test_a_second_signal_ends_a_drain_at_once() -> None:
    tally, done = Tally(), asyncio.Event()
    async with running(1, "--drain-timeout", "60") as [verifier]:
        agent = real_agent(connecting([Address(verifier.url)]))
        asking = asyncio.create_task(ask_until(done, agent, tally, 0, 900))
        while not agent.link.traffic.frames_down > 8:  # noqa: ASYNC110 - an answer is on its way
            await asyncio.sleep(0.01)
        done.set()
        ending = asyncio.create_task(verifier.kill(signal.SIGTERM))
        _, pending = await asyncio.wait([ending], timeout=0.5)
        assert pending, "it waits for the answer"
        assert await asyncio.wait_for(verifier.kill(signal.SIGTERM), 30) == await ending == 0
        await verifier.start()
        await asyncio.wait_for(asking, 120)
    assert tally.tokens
    assert tally.whole, tally.reasons
