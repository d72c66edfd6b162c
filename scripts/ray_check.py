"""What only a running Ray can tell: two replicas on this machine's CPU, under load, killed and replaced, and the text unchanged.

    scripts/test_ray [--json FILE]

The replicas run the toy target, whose right answers are known without asking, and in the last part a real model. The edges are
real agents over real sockets, each under a name of its own (`x-session-id`). Every part waits for what it waits for; a part that
fails is reported, and the exit status says whether all passed.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from paceline.cloud.ray_serve import NAME
from paceline.edge.agent import Agent
from paceline.edge.websocket import Address, connecting
from paceline.protocol.errors import PacelineError
from paceline.scripts.chaos.answers import Tally
from paceline.scripts.chaos.kills import ask_until, free_port, real_agent
from paceline.scripts.ray_app import app
from paceline.scripts.visitor import comes_back

SLOTS = 4  # sessions a replica runs
LIMIT = 180.0  # seconds after which what did not happen is taken for a fault
SETTINGS = {"engine": "toy", "slots": SLOTS, "verify_floor": 0.02, "drain_timeout": 5, "cpus": 0.1, "upscale_delay": 1}
MODEL = {"model": "smollm2", "slots": 2, "context": 1024, "threads": 1, "drain_timeout": 2, "cpus": 0.1}
TOLD = ("going away", "going on elsewhere")  # how a link ends that was told to
CONFIG = Path(__file__).resolve().parents[1] / "cloud" / "deploy" / "ray.yaml"
Figures = dict[str, Any]


@dataclass
class Crowd:
    """Edges that ask question after question until they are told to stop."""

    url: str
    tally: Tally = field(default_factory=Tally)
    agents: list[Agent] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)  # why links ended

    def __post_init__(self) -> None:
        self._done, self._asking = asyncio.Event(), list[asyncio.Task[None]]()

    def grow(self, count: int) -> None:
        for i in range(len(self.agents), count):
            agent = real_agent(connecting([Address(self.url)]), i)
            setattr(agent, "link_down", self._noting(agent.link_down))  # noqa: B010 - a method is replaced
            self.agents.append(agent)
            self._asking.append(asyncio.create_task(ask_until(self._done, agent, self.tally, i, 200)))

    def _noting(self, heard: Callable[[str], None]) -> Callable[[str], None]:
        def link_down(reason: str) -> None:
            if not self._done.is_set():  # at the end they hang up themselves
                self.reasons.append(reason)
            heard(reason)

        return link_down

    @property
    def running(self) -> int:
        """Answers that are on their way."""
        return sum(bool(agent.generations) for agent in self.agents)

    async def end(self) -> None:
        self._done.set()
        await asyncio.gather(*self._asking)


async def until(what: str, true: Callable[[], bool]) -> float:
    """Seconds that it took. Raises PacelineError if it never happens."""
    begin = time.monotonic()
    while not await asyncio.to_thread(true):
        if time.monotonic() - begin > LIMIT:
            raise PacelineError(f"waited {LIMIT:.0f} s in vain: {what}")
        await asyncio.sleep(0.1)
    return time.monotonic() - begin


def replicas(state: str = "RUNNING") -> int:
    from ray import serve

    found = serve.status().applications["default"].deployments.get(NAME)
    return found.replica_states.get(state, 0) if found else 0


def pids() -> list[int]:
    """Of the replicas' processes on this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdecimal()
                and f"ray::ServeReplica:default:{NAME}".encode() in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended
    return found


def deploy(least: int, most: int, settings: Mapping[str, Any] = SETTINGS) -> None:
    from ray import serve

    serve.run(app({**settings, "min_replicas": least, "max_replicas": most}))


# ---- the parts


async def shipped(url: str) -> Figures:
    """Ray takes the config file that is shipped, and the settings in it."""
    from ray.serve.schema import ServeDeploySchema
    from yaml import safe_load

    [application] = ServeDeploySchema(**safe_load(CONFIG.read_text())).applications
    made = app(application.args)._bound_deployment  # nothing is started
    return {"max_ongoing_requests": made.max_ongoing_requests, "import_path": application.import_path}


async def scale_up(url: str) -> Figures:
    """One replica, more edges than it has places for: a second one comes, and everybody is answered."""
    crowd = Crowd(url)
    crowd.grow(2)
    await until("an answer with one replica", lambda: crowd.tally.answers >= 1)
    before = replicas()
    crowd.grow(SLOTS + 2)
    seconds = await until("a second replica", lambda: replicas() == 2)
    await until("answers of all edges at once", lambda: crowd.running > SLOTS)
    await crowd.end()
    return figures(crowd, replicas_before=before, replicas_after=replicas(), seconds=round(seconds, 1))


async def come_back(url: str) -> Figures:
    """An edge whose link was cut finds its very session again, where Ray brings it back to the same replica."""
    same = [await comes_back(connecting([Address(url)])) for _ in range(8)]
    if not all(same):
        raise PacelineError(f"{same.count(False)} of {len(same)} edges came back to another replica")
    return {"edges": len(same), "same_replica": sum(same)}


async def kill(url: str) -> Figures:
    """kill -9 of a replica in mid-answer: its edges go on at the other one, and Ray brings another."""
    crowd = Crowd(url)
    crowd.grow(SLOTS)
    killed = 0
    while not crowd.reasons:  # until one was hit that somebody was talking to
        await until("answers on their way", lambda: crowd.running == SLOTS and replicas() == 2)
        os.kill(pids()[killed % 2], signal.SIGKILL)
        killed += 1
        await until("a new replica", lambda: replicas() < 2 or bool(crowd.reasons))
        await until("a new replica", lambda: replicas() == 2)
    answers = crowd.tally.answers
    await until("answers after it", lambda: crowd.tally.answers > answers + SLOTS)
    await crowd.end()
    return figures(crowd, killed=killed, links_cut=dict(Counter(crowd.reasons)))


async def roll(url: str) -> Figures:
    """Other replicas, and one instead of two, under load: the edges are told to go (`goaway`), and go where there is room."""
    crowd = Crowd(url)
    crowd.grow(SLOTS - 1)
    await until("answers on their way", lambda: crowd.running == SLOTS - 1)
    before = set(pids())
    await asyncio.to_thread(deploy, 1, 1)
    await until("one replica", lambda: replicas() == 1 and not replicas("STOPPING") and not before & set(pids()))
    answers = crowd.tally.answers
    await until("answers after it", lambda: crowd.tally.answers > answers + SLOTS)
    await crowd.end()
    cut = [reason for reason in crowd.reasons if not any(told in reason for told in TOLD)]
    if cut or not crowd.reasons:
        raise PacelineError(f"{len(crowd.reasons)} links ended, {len(cut)} of them without a goaway: {cut}")
    return figures(crowd, told_to_go=len(crowd.reasons))


async def real_model(url: str) -> Figures:
    """SmolLM2 on two replicas and its draft on the edge; each answer loses its replica in the middle."""
    from paceline.scripts.ray_model import ask_and_kill

    await asyncio.to_thread(deploy, 2, 2, MODEL)
    await until("two replicas of the model", lambda: replicas() == 2 and not replicas("STOPPING"))
    return await ask_and_kill(str(MODEL["model"]), connecting([Address(url)]), pids)


def figures(crowd: Crowd, **more: object) -> Figures:
    if not crowd.tally.whole:
        raise PacelineError("; ".join(crowd.tally.reasons[:5]))
    return {"edges": len(crowd.agents), "answers": crowd.tally.answers, "tokens": crowd.tally.tokens, **more}


PARTS = (shipped, scale_up, come_back, kill, roll, real_model)


def main(out: Annotated[Path | None, typer.Option("--json", help="Keep the figures here.")] = None) -> None:
    """Run every part against a Ray of its own on this machine."""
    import ray
    from ray import serve

    port, found, failed = free_port(), dict[str, Figures](), False
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
    deploy(1, 2)
    for part in PARTS:
        try:
            found[part.__name__] = asyncio.run(part(f"ws://127.0.0.1:{port}"))
            print(f"ok      {part.__name__}: {found[part.__name__]}", flush=True)
        except PacelineError as e:
            failed = True
            print(f"FAILED  {part.__name__}: {e}", flush=True)
    serve.shutdown()
    ray.shutdown()
    if out is not None:
        out.write_text(json.dumps({"ray": ray.__version__, **found}, indent=1))
    sys.exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
