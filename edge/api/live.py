"""/live: what the agent is doing, a few times a second, as a stream of events for the page.

Each event is a snapshot of the link, of the newest generation's tree, and of what happened since the event before.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import astuple

from paceline.edge.agent import Agent
from paceline.edge.api.service import Service
from paceline.edge.api.shapes import Json
from paceline.edge.figures import speed
from paceline.edge.generation import Generation
from paceline.edge.text import Text
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

SECONDS = 0.1  # between two snapshots while something happens
IDLE_SECONDS = 1.0
NODES = 160  # of a tree, the likeliest
TAIL = 12  # tokens of the text that are sent along with the tree


async def live(request: Request) -> Response:
    service: Service = request.app.state.service
    headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
    return StreamingResponse(_snapshots(service), media_type="text/event-stream", headers=headers)


async def _snapshots(service: Service) -> AsyncIterator[bytes]:
    agent, number = service.agent, 0
    before = None if agent.generations else agent.newest  # was over before anybody looked
    while True:
        entries = agent.timeline.since(number)
        number = entries[-1].number + 1 if entries else number
        last = agent.newest if agent.newest is not before else None
        shown = snapshot(agent, last, service.text)
        shown["entries"] = [[round(x, 5) if isinstance(x, float) else x for x in astuple(e)] for e in entries]
        yield b"data: " + json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
        await asyncio.sleep(SECONDS if entries or agent.generations else IDLE_SECONDS)


def snapshot(agent: Agent, generation: Generation | None, text: Text) -> Json:
    """The link and, if there is one, a generation: figures, the end of its text, its tree."""
    link = agent.link
    out: Json = {
        "now": round(agent.clock(), 5),
        "running": len(agent.generations),
        "policy": agent.policy.name,
        "link": {
            "state": link.state.value,
            "reason": link.last_error,
            "round_trip": link.round_trip.seconds,
            "up": link.traffic.up,
            "down": link.traffic.down,
        },
    }
    if generation is not None:
        s = speed(generation, link.round_trip.seconds)
        out["speed"] = {name: getattr(s, name) for name in s.__dataclass_fields__}
        out["speed"] |= {"drafted": generation.figures.drafted, "taken": generation.figures.accepted}
        out["tree"] = _tree(generation, text)
    return out


def _tree(generation: Generation, text: Text) -> Json:
    """`nodes` are [id, parent's id or -1, text, log-probability, whether the cloud has it], parents first."""
    tree, session = generation.session.tree, generation.session
    ids = tree.best(NODES)
    nodes = [
        [n, tree.parent(n) if tree.parent(n) != tree.root else -1, _spelt(text, tree.token(n)),
         round(tree.reach(n), 3), session.sent(n)]
        for n in ids
    ]  # fmt: skip
    tail = [_spelt(text, t) for t in session.committed[-TAIL:]]
    return {"sid": session.sid, "length": len(session.committed), "tail": tail, "live": len(tree), "nodes": nodes}


def _spelt(text: Text, token: int) -> str:
    return text.piece(token).decode("utf-8", "replace")
