"""Answers that are instances of a JSON schema, and that do not depend on what was drafted."""

import json
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from paceline.cloud.grammar import Grammars
from paceline.edge.answer import Answer
from paceline.edge.policies import policy
from paceline.edge.runtime import Settings, running_agent
from paceline.edge.websocket import Address
from paceline.protocol.errors import PacelineError, ProtocolError
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}
ASK: list[Any] = [{"role": "user", "content": "Describe a person as JSON with name, age and favourite colour."}]


@pytest.fixture(scope="module")
def client(system: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{system.url}/v1", api_key="x", max_retries=0)


@pytest.fixture(scope="module")
def grammars(system: Any) -> Grammars:
    found = Grammars.of(Path(system.vocabulary), system.text.vocabulary.size)
    assert found is not None
    return found


def form(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_an_answer_keeps_to_its_schema(client: openai.OpenAI, temperature: float) -> None:
    asked: dict[str, Any] = dict(
        model="smollm2", messages=ASK, max_tokens=80, temperature=temperature, seed=4, response_format=form(SCHEMA)
    )
    choice = client.chat.completions.create(**asked).choices[0]
    person = json.loads(choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert list(person) == ["name", "age", "colour"]
    assert person["colour"] in ("red", "green", "blue")
    assert 0 <= person["age"] <= 120
    streamed = client.chat.completions.create(**asked, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == choice.message.content


def test_json_of_any_kind(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=ASK, max_tokens=60, temperature=0, response_format={"type": "json_object"}
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}])
def test_a_schema_that_cannot_be_kept_to_is_refused(client: openai.OpenAI, schema: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="grammar"):
        client.chat.completions.create(model="smollm2", messages=ASK, response_format=form(schema))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(seed=9, temperature=1.1, top_p=0.9, repetition_penalty=1.1)])
async def test_the_draft_changes_nothing(system: Any, tmp_path: Path, sampling: Sampling) -> None:
    """The same request with a draft, which knows nothing of the grammar, and without one."""
    prompt, ends = tuple(system.text.prompt(ASK)), system.text.end_tokens
    request = GenerationRequest(prompt, sampling, 60, ends, grammar=json.dumps(SCHEMA))

    async def written(writer: Any) -> tuple[str, list[int]]:
        answer = Answer(system.text, request)
        text = "".join([piece.text async for piece in answer.pieces(writer)])
        assert answer.generation is not None
        return text, answer.generation.session.committed

    drafted = system.do(written(system.agent))
    settings = Settings((Address(system.verifier),), Path(system.vocabulary), None, tmp_path)
    async with running_agent(settings, system.text, policy("ar")) as plain:
        assert await written(plain) == drafted


def test_a_mask_depends_on_the_text_alone(grammars: Grammars, system: Any) -> None:
    text = system.text.plain('{"name": "Al", "age": 7, "colour": "red"}')
    walked, fresh = grammars.constraint(json.dumps(SCHEMA)), grammars.constraint(json.dumps(SCHEMA))
    for length in (0, 3, len(text), 2, len(text), 0):
        again = grammars.constraint(json.dumps(SCHEMA))
        assert (walked.mask(text[:length]) == again.mask(text[:length])).all()
    assert set(fresh.mask(text).nonzero()[0]) <= set(system.text.end_tokens)
    over = [*text, system.text.end_tokens[0], *text]
    assert set(fresh.mask(over).nonzero()[0]) == set(system.text.end_tokens)


def test_a_text_that_is_none_of_the_grammars(grammars: Grammars, system: Any) -> None:
    with pytest.raises(PacelineError, match="does not go with the grammar"):
        grammars.constraint(json.dumps(SCHEMA)).mask(system.text.plain("Hello"))
    with pytest.raises(ProtocolError, match="object"):
        grammars.constraint("[1]")


def test_where_the_verifier_cannot_it_is_a_clear_400(client: openai.OpenAI, system: Any) -> None:
    welcome = system.agent.link.welcome
    try:
        system.agent.link.welcome = msgspec.structs.replace(welcome, features=())
        with pytest.raises(openai.BadRequestError, match="cannot keep its text to a grammar") as e:
            client.chat.completions.create(model="smollm2", messages=ASK, response_format={"type": "json_object"})
        assert e.value.param == "response_format"
    finally:
        system.agent.link.welcome = welcome
