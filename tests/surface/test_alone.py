"""The local server while the verifier is away and the draft may answer alone: every answer and every chunk says so."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from paceline.edge.api.app import application
from paceline.edge.api.service import ALONE, Service
from paceline.edge.policies import policy
from paceline.edge.runtime import Settings, running_agent
from paceline.edge.serve import listening
from paceline.edge.text import Text
from paceline.edge.websocket import Address
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling
from paceline.scripts.pairs import vocabulary_of

ASK: dict[str, Any] = {
    "model": "mine", "messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 8, "temperature": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def settings(smollm2_path: Path, smollm2_draft_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Of an agent whose verifier is away: nobody listens on port 1."""
    cache = tmp_path_factory.mktemp("cache")
    address = Address("ws://127.0.0.1:1")
    return Settings((address,), vocabulary_of(smollm2_path), smollm2_draft_path, cache, threads=1, attempts=None)


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    text = Text(settings.vocabulary)
    async with running_agent(settings, text, policy("stream")) as agent:
        service = Service(agent, text, "mine", "test", patience=0.2, alone=True)
        async with (
            listening(application(service), "127.0.0.1", 0) as url,
            httpx.AsyncClient(base_url=url, timeout=120) as http,
        ):
            yield http


async def test_the_draft_answers_and_says_so(client: httpx.AsyncClient) -> None:
    whole = (await client.post("/v1/chat/completions", json=ASK)).json()
    assert whole["system_fingerprint"] == ALONE
    assert whole["usage"]["completion_tokens"] == 8
    said = whole["choices"][0]["message"]["content"]
    assert said.strip()
    lines = (await client.post("/v1/chat/completions", json=ASK | {"stream": True})).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert {chunk["system_fingerprint"] for chunk in chunks} == {ALONE}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == said
    bare = (
        await client.post("/v1/completions", json={"model": "mine", "prompt": "The sea is", "max_tokens": 4})
    ).json()
    assert bare["system_fingerprint"] == ALONE
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "draft alone")
    assert "paceline_alone_answers_total 3.0" in (await client.get("/metrics")).text


async def test_a_draft_that_failed_for_good_answers_nobody(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(settings.vocabulary)

    def fail(*_: object) -> None:
        raise RuntimeError("the draft's file is gone")

    async with running_agent(settings, text, policy("stream")) as agent:
        service = Service(agent, text, "mine", "test", patience=0.2, alone=True)
        assert agent.draft is not None
        monkeypatch.setattr(agent.draft, "open", fail)
        begun: list[object] = []
        asking = asyncio.create_task(anext(agent.generate(GenerationRequest((1, 2, 3), Sampling(), 8), begun.append)))
        async with asyncio.timeout(120):
            while agent.draft is not None:
                await asyncio.sleep(0.01)
                if begun:
                    asking.cancel()  # what it left for the draft to do is done then
        async with (
            listening(application(service), "127.0.0.1", 0) as url,
            httpx.AsyncClient(base_url=url, timeout=120) as http,
        ):
            health = await http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "no verifier")
            assert (await http.post("/v1/chat/completions", json=ASK)).status_code == 503


async def test_what_only_a_verifier_can_do_is_refused(client: httpx.AsyncClient) -> None:
    for more, param in (
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ):
        refused = await client.post("/v1/chat/completions", json=ASK | more)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_where_the_verifier_is_there_the_answer_is_the_targets(system: Any) -> None:
    system.service.alone = True
    try:
        answer = httpx.post(f"{system.url}/v1/chat/completions", json=ASK | {"model": "smollm2"}, timeout=120).json()
    finally:
        system.service.alone = False
    assert answer["system_fingerprint"] is None
