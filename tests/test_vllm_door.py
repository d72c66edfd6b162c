"""The entrance in front of vLLM's own app: edges to the verifier, everybody else past it, nobody without a key."""

from pathlib import Path
from typing import Any

import pytest
from paceline.cloud import asgi
from paceline.cloud.connection import House
from paceline.cloud.engines.toy import ToyEngine
from paceline.cloud.entrance import Entrance
from paceline.cloud.front import Front
from paceline.cloud.keys import Keys
from paceline.cloud.scheduler import Scheduler
from paceline.cloud.settings import Settings
from paceline.cloud.vllm.door import Door, model_folder
from paceline.protocol.errors import EngineError
from paceline.protocol.messages import SUBPROTOCOL
from paceline.scripts.lab.virtual import run_engine

KEY = "0123456789abcdef0123"
DENIAL = {"extensions": {asgi.DENIAL: {}}}


async def theirs(scope: asgi.Message, receive: asgi.Receive, send: asgi.Send) -> None:
    """vLLM's app."""
    await send({"type": "theirs", "path": scope.get("path")})


def door_of(keys: Path | None) -> Door:
    door, engine = Door(), ToyEngine()
    house = House(Scheduler(engine, run_engine, lambda: 0.0), engine.name, engine.vocabulary, engine.context)
    door.verifier = asgi.Verifier(Front(house, None, Keys(keys) if keys else None))
    return door


async def told(door: Door, path: str, key: str = "", kind: str = "http", **more: Any) -> list[asgi.Message]:
    """What comes back to who asks for `path`, and then leaves."""
    said: list[asgi.Message] = []
    coming = iter([{"type": "websocket.connect"}, {"type": "websocket.disconnect"}])

    async def receive() -> asgi.Message:
        return dict(next(coming))

    async def send(message: asgi.Message) -> None:
        said.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    await Entrance(theirs, lambda: door.verifier)(
        {"type": kind, "path": path, "headers": headers, **more}, receive, send
    )
    return said


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    (tmp_path / "keys").write_text(f"laptop {KEY}\n")
    return tmp_path / "keys"


async def test_a_devices_paths_are_ours_and_the_others_vllms() -> None:
    door = door_of(None)
    assert b'"vocabulary_size": 12' in (await told(door, "/v1/model"))[1]["body"]
    assert (await told(door, "/healthz"))[1]["body"] == b"ok\n"
    for path in ("/health", "/v1/models", "/v1/completions", "/metrics", "/version", "/"):
        assert await told(door, path) == [{"type": "theirs", "path": path}]


async def test_with_keys_vllms_paths_are_for_those_who_have_one(keys: Path) -> None:
    door = door_of(keys)
    for path in ("/v1/completions", "/health", "/metrics", "/v1/model"):
        for wrong in ("", "x" * 20):
            assert (await told(door, path, wrong))[0]["status"] == 401
    assert (await told(door, "/v1/completions", KEY))[0]["type"] == "theirs"
    assert (await told(door, "/v1/model", KEY))[0]["status"] == 200
    assert (await told(door, "/readyz"))[0]["status"] == 200
    assert (await told(door, "/v1/realtime", "", "websocket", **DENIAL))[0]["status"] == 401


async def test_an_edge_is_let_in_at_the_root(keys: Path) -> None:
    offered = {"subprotocols": [SUBPROTOCOL], **DENIAL}
    assert (await told(door_of(keys), "/", KEY, "websocket", **offered))[0]["type"] == "websocket.accept"
    assert (await told(door_of(keys), "/", "", "websocket", **offered))[0]["status"] == 401
    assert (await told(door_of(None), "/v1/realtime", "", "websocket", **offered))[0]["type"] == "theirs"


async def test_before_the_engine_is_there_all_is_vllms() -> None:
    assert (await told(Door(), "/v1/model"))[0]["type"] == "theirs"
    assert (await told(door_of(None), "", "", "lifespan"))[0]["type"] == "theirs"


async def test_an_engine_without_our_drafter_is_refused() -> None:
    from types import SimpleNamespace as Of

    from paceline.cloud.vllm.door import _house

    client = Of(vllm_config=Of(speculative_config=None))
    with pytest.raises(EngineError, match="--engine vllm"):
        _house(client, Settings())
    several = Of(_api_process_count=2)
    client.vllm_config = Of(speculative_config=Of(method="custom_class"), parallel_config=several)
    with pytest.raises(EngineError, match="--api-server-count 1"):
        _house(client, Settings())


def test_a_folder_is_its_own_place(tmp_path: Path) -> None:
    assert model_folder(str(tmp_path)) == tmp_path
