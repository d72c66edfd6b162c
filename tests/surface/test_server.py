"""What stands around the routes: keys, origins, request ids, health, metrics, a verifier that is away."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from paceline.edge.answer import Piece
from paceline.edge.api import completions
from paceline.edge.api.app import application
from paceline.edge.api.service import Service, model_id
from paceline.edge.policies import policy
from paceline.edge.runtime import Settings, running_agent
from paceline.edge.serve import listening, notify_systemd
from paceline.edge.text import Text
from paceline.edge.websocket import Address
from paceline.protocol.errors import PacelineError

BODY = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def test_every_answer_names_its_request(system: Any) -> None:
    given = httpx.get(f"{system.url}/v1/models", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    made = [httpx.get(f"{system.url}/nothing").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(re.fullmatch(r"req_[0-9a-f]{24}", name) for name in made)


def test_health_version_and_metrics(system: Any) -> None:
    assert httpx.get(f"{system.url}/health").json() == {"status": "ok", "link": "connected", "model": "smollm2"}
    assert httpx.get(f"{system.url}/version").json() == {"version": "test"}
    httpx.post(f"{system.url}/v1/chat/completions", json=BODY, timeout=60)
    text = httpx.get(f"{system.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["paceline_tokens_total"]) >= 2
    assert float(values["paceline_link_up"]) == 1
    assert float(values['paceline_requests_total{path="/v1/chat/completions",status="200"}']) >= 1
    assert float(values["paceline_generations_running"]) == 0


def test_the_live_view_shows_an_answer_that_came_and_went_between_two_looks(system: Any) -> None:
    with httpx.stream("GET", f"{system.url}/live", timeout=60) as events:
        shots = (json.loads(line.removeprefix("data: ")) for line in events.iter_lines() if line.startswith("data: "))
        assert "speed" not in next(shots)  # what was over before is not shown
        body = BODY | {"max_tokens": 8}
        made = httpx.post(f"{system.url}/v1/chat/completions", json=body, timeout=60).json()
        shot = next(shot for shot in shots if shot["running"] == 0 and "speed" in shot)
    assert shot["speed"]["tokens"] == made["usage"]["completion_tokens"] == shot["tree"]["length"]


def test_web_pages_from_elsewhere_are_kept_out(system: Any) -> None:
    address = f"{system.url}/v1/chat/completions"
    assert httpx.post(address, json=BODY, headers={"Origin": "https://evil.example"}).status_code == 403
    rebound = {"Origin": "http://evil.example:80", "Host": "evil.example:80"}
    assert httpx.post(address, json=BODY, headers=rebound).status_code == 403
    near = httpx.post(address, json=BODY, headers={"Origin": "http://localhost:3000"}, timeout=60)
    assert near.status_code == 200
    assert near.headers["access-control-allow-origin"] == "http://localhost:3000"
    asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    preflight = httpx.options(address, headers=asked)
    assert preflight.status_code == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"]


def test_a_stream_is_not_buffered_on_its_way(system: Any) -> None:
    with httpx.stream("POST", f"{system.url}/v1/chat/completions", json=BODY | {"stream": True}, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        assert "no-transform" in answer.headers["cache-control"]
        assert answer.read().endswith(b"data: [DONE]\n\n")


async def test_a_stream_is_never_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "QUIET_SECONDS", 0.01)

    async def slow() -> AsyncIterator[Piece]:
        yield Piece("a")
        await asyncio.sleep(0.1)
        yield Piece("b")

    seen = [piece async for piece in completions._never_silent(slow())]
    assert [p.text for p in seen if p] == ["a", "b"]
    assert seen.count(None) >= 2


async def test_without_a_verifier(smollm2_path: Path, tmp_path: Path) -> None:
    """The server is up, says what is wrong, and refuses with 503 and a time to come back."""
    text = Text(smollm2_path)
    settings = Settings((Address("ws://127.0.0.1:9"),), smollm2_path, None, tmp_path, attempts=None)
    async with running_agent(settings, text, policy("ar")) as agent:
        service = Service(agent, text, "smollm2", "test", frozenset({"right"}), patience=0.3)
        async with listening(application(service), "127.0.0.1", 0) as address, httpx.AsyncClient() as http:
            health = await http.get(f"{address}/health")
            assert health.status_code == 503
            assert "paceline cloud" in health.json()["reason"]
            client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="right", max_retries=0)
            begin = time.monotonic()
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError) as e:
                    await client.chat.completions.create(model="smollm2", messages=BODY["messages"], stream=stream)  # type: ignore[call-overload]
                assert e.value.status_code == 503
                assert e.value.code == "cloud_unreachable"
                assert int(e.value.response.headers["retry-after"]) >= 1
            assert time.monotonic() - begin < 5
            with pytest.raises(openai.AuthenticationError) as refused:
                await openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0).models.list()
            assert refused.value.code == "invalid_api_key"
            assert [m.id async for m in client.models.list()] == ["smollm2"]


async def test_a_port_that_is_taken(system: Any) -> None:
    port = int(system.url.rsplit(":", 1)[1])
    with pytest.raises(PacelineError, match=f"cannot listen on 127.0.0.1:{port}"):
        async with listening(application(system.service), "127.0.0.1", port):
            pass


def test_systemd_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(str(tmp_path / "notify"))
        s.settimeout(1)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify_systemd("READY=1")
        assert s.recv(64) == b"READY=1"


def test_a_model_has_a_name_one_can_type() -> None:
    assert model_id("Smollm2 135M 8k (mix)") == "smollm2-135m-8k-mix"
    assert model_id("  ") == "target"
