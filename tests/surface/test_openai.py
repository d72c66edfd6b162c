"""The contract, with the real clients over a real socket: what OpenAI's package, langchain and llm rely on."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

ASK: list[Any] = [{"role": "user", "content": "Name three colours."}]
LONG: list[Any] = [{"role": "user", "content": "Tell me a long story about a lighthouse keeper."}]


@pytest.fixture(scope="module")
def client(system: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{system.url}/v1", api_key="anything", max_retries=0, timeout=60)


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


# ---- models


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").object == "model"
    with pytest.raises(openai.NotFoundError) as e:
        client.models.retrieve("gpt-4o")
    assert e.value.code == "model_not_found"


# ---- chat


def test_an_answer_and_its_stream_are_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(model="smollm2", messages=ASK, max_tokens=16, temperature=0.7, seed=3)
    whole = client.chat.completions.create(**asked)
    assert whole.object == "chat.completion"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 16
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({c.id for c in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks[-2:-1]] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(c.usage is None for c in chunks[:-1])


def test_a_seed_repeats_and_another_differs(client: openai.OpenAI) -> None:
    def answer(seed: int) -> str | None:
        asked = client.chat.completions.create(
            model="smollm2", messages=LONG, max_tokens=12, temperature=1.2, seed=seed
        )
        return asked.choices[0].message.content

    assert answer(1) == answer(1) != answer(2)
    assert answer(-1) == answer(-1)


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_greedy_and_all_but_greedy(client: openai.OpenAI, temperature: float) -> None:
    asked: dict[str, Any] = dict(model="paceline", messages=ASK, max_completion_tokens=8)
    plain = client.chat.completions.create(**asked, temperature=0).choices[0].message.content
    assert client.chat.completions.create(**asked, temperature=temperature).choices[0].message.content == plain


def test_an_end_token_is_a_stop(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Answer with one word: hello"}],
        temperature=0,
        max_tokens=400,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "<|" not in (answer.choices[0].message.content or "")


def test_a_stop_string_is_held_back_until_certain(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(model="smollm2", messages=LONG, temperature=0, max_tokens=24)
    whole = client.chat.completions.create(**asked).choices[0].message.content or ""
    middle = len(whole) // 2
    stop = whole[middle : middle + 7]  # spans tokens
    expected = whole[: whole.index(stop)]
    for stops in (stop, [stop, "never there"]):
        cut = client.chat.completions.create(**asked, stop=stops)
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (expected, "stop")
        assert cut.usage is not None
        assert cut.usage.completion_tokens < 24
    streamed = list(client.chat.completions.create(**asked, stop=stop, stream=True))
    assert text_of(streamed) == expected
    assert streamed[-1].choices[0].finish_reason == "stop"
    almost = whole[-3:] + "\0"  # what is held back and turns out to be none comes in the end
    assert client.chat.completions.create(**asked, stop=almost).choices[0].message.content == whole


def test_every_parameter_has_its_effect(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(model="smollm2", messages=LONG, max_tokens=10, seed=5)

    def answer(**more: Any) -> str | None:
        return client.chat.completions.create(**asked, **more).choices[0].message.content

    greedy = answer(temperature=0)
    wild = answer(temperature=2)
    assert wild != greedy
    assert answer(temperature=2, extra_body={"top_k": 1}) == greedy
    assert answer(temperature=2, top_p=0) == greedy
    assert answer(temperature=2, extra_body={"min_p": 1.0}) == greedy
    assert (
        answer(temperature=0, frequency_penalty=2, presence_penalty=2, extra_body={"repetition_penalty": 3}) != greedy
    )


def test_a_bias_decides(client: openai.OpenAI, system: Any) -> None:
    [token] = system.text.plain(" blue")
    answer = client.chat.completions.create(
        model="smollm2", messages=ASK, max_tokens=4, temperature=0, logit_bias={str(token): 100}
    )
    assert answer.choices[0].message.content == " blue" * 4


def test_logprobs(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(
        model="smollm2", messages=ASK, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert "".join(e.token for e in entries) == choice.message.content
    for e in entries:
        assert bytes(e.bytes or []).decode() == e.token
        assert [t.logprob for t in e.top_logprobs] == sorted((t.logprob for t in e.top_logprobs), reverse=True)
        assert e.top_logprobs[0].token == e.token  # greedy
        assert e.logprob == e.top_logprobs[0].logprob <= 0
    streamed = [
        e
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs is not None
        for e in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == entries


def test_text_parts_and_developer_messages(client: openai.OpenAI) -> None:
    def answer(messages: list[Any]) -> Any:
        return client.chat.completions.create(model="smollm2", messages=messages, max_tokens=6, temperature=0)

    parts = answer([{"role": "developer", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "text", "text": "Name three "},
                                             {"type": "text", "text": "colours."}]}])  # fmt: skip
    plain = answer([{"role": "system", "content": "Be brief."}, ASK[0]])
    assert parts.choices[0].message.content == plain.choices[0].message.content
    assert parts.usage == plain.usage


def test_characters_are_never_cut(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(model="smollm2", prompt="🙂🙃🙂🙃🙂🙃🙂🙃", temperature=0)
    for limit in range(1, 9):
        assert "�" not in client.completions.create(**asked, max_tokens=limit).choices[0].text
    stream = client.completions.create(**asked, max_tokens=12, stream=True)
    assert "�" not in "".join(chunk.choices[0].text for chunk in stream)


# ---- completions of bare text


def test_completions(client: openai.OpenAI, system: Any) -> None:
    asked: dict[str, Any] = dict(model="smollm2", temperature=0, max_tokens=8)
    prompt = "The capital of France is"
    answer = client.completions.create(prompt=prompt, **asked)
    assert answer.object == "text_completion"
    assert "Paris" in answer.choices[0].text
    streamed = "".join(c.choices[0].text for c in client.completions.create(prompt=prompt, **asked, stream=True))
    assert streamed == answer.choices[0].text
    assert client.completions.create(prompt=system.text.plain(prompt), **asked).choices[0].text == streamed
    assert client.completions.create(prompt=[prompt], **asked, echo=True).choices[0].text == prompt + streamed
    columns = client.completions.create(prompt=prompt, **asked, logprobs=2).choices[0].logprobs
    assert columns is not None
    assert columns.tokens is not None
    assert "".join(columns.tokens) == streamed
    assert columns.text_offset is not None
    assert [streamed[i] for i in columns.text_offset] == [t[0] for t in columns.tokens]
    assert all(len(top) == 2 for top in columns.top_logprobs or [])


def test_sixteen_tokens_where_nothing_is_said(client: openai.OpenAI) -> None:
    usage = client.completions.create(model="smollm2", prompt="Once upon a time", temperature=0).usage
    assert usage is not None
    assert usage.completion_tokens == 16


# ---- refusals


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 2}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"logit_bias": {"blue": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "emperor", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI, more: dict[str, Any], param: str) -> None:
    asked = {"model": "smollm2", "messages": ASK, "max_tokens": 4} | more
    with pytest.raises(openai.BadRequestError) as e:
        client.post("/chat/completions", body=asked, cast_to=object)
    assert e.value.param == param
    assert e.value.type == "invalid_request_error"
    assert e.value.request_id


def test_a_prompt_beyond_the_context(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as e:
            client.chat.completions.create(
                model="smollm2", messages=[{"role": "user", "content": "word " * 1500}], stream=stream
            )
        assert e.value.code == "context_length_exceeded"


def test_bodies_that_are_no_requests(system: Any) -> None:
    address = f"{system.url}/v1/chat/completions"
    for body, status in (
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b'{"model": 1}', 400),
        (b" " * 9_000_000, 413),
    ):
        answer = httpx.post(address, content=body)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    assert httpx.get(address).status_code == 405
    assert httpx.get(f"{system.url}/v1/nothing").json()["error"]["code"] == "unknown_url"


# ---- leaving, sharing


def idle(system: Any) -> bool:
    return len(system.scheduler) == 0 and not system.agent.generations


def test_a_client_that_leaves_a_stream_frees_its_place(client: openai.OpenAI, system: Any) -> None:
    stream = client.chat.completions.create(model="smollm2", messages=LONG, max_tokens=900, temperature=0, stream=True)
    next(iter(stream))
    assert not idle(system)
    stream.close()
    assert system.waits_for(lambda: idle(system), 1.0)


def test_a_client_that_does_not_wait_frees_its_place(system: Any) -> None:
    body = {"model": "smollm2", "messages": LONG, "max_tokens": 900, "temperature": 0}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{system.url}/v1/chat/completions", json=body, timeout=0.5)
    assert system.waits_for(lambda: idle(system), 1.0)


def test_several_clients_at_once_get_what_each_would_get_alone(client: openai.OpenAI, pool: ThreadPoolExecutor) -> None:
    def answer(seed: int) -> str | None:
        asked = client.chat.completions.create(
            model="smollm2", messages=LONG, max_tokens=16, temperature=0.8, seed=seed
        )
        return asked.choices[0].message.content

    together = list(pool.map(answer, range(4)))
    assert together == [answer(seed) for seed in range(4)]
    assert len(set(together)) == 4


# ---- other clients


def test_langchain(system: Any, client: openai.OpenAI) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = langchain.ChatOpenAI(
        base_url=f"{system.url}/v1", api_key="x", model="smollm2", temperature=0, max_tokens=8, seed=1
    )
    own = client.chat.completions.create(model="smollm2", messages=ASK, max_tokens=8, temperature=0)
    answer = model.invoke("Name three colours.")
    assert answer.content == own.choices[0].message.content
    assert answer.usage_metadata["output_tokens"] == 8
    assert "".join(c.content for c in model.stream("Name three colours.")) == answer.content


def test_the_llm_tool(system: Any, client: openai.OpenAI, tmp_path: Path) -> None:
    pytest.importorskip("llm", reason="llm is not installed")
    known = {"model_id": "mine", "model_name": "smollm2", "api_base": f"{system.url}/v1"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([known]))
    own = client.chat.completions.create(model="smollm2", messages=ASK, max_tokens=8, temperature=0)
    for streaming in ([], ["--no-stream"]):
        done = subprocess.run(
            [sys.executable, "-m", "llm", "prompt", "-m", "mine", "-o", "temperature", "0", "-o", "max_tokens", "8",
             "--no-log", *streaming, "Name three colours."],
            capture_output=True, text=True, check=False, env=os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "x"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == (own.choices[0].message.content or "").strip()


def test_the_chat_command_writes_the_same(system: Any, client: openai.OpenAI) -> None:
    own = client.chat.completions.create(
        model="smollm2", messages=LONG, max_tokens=20, temperature=0.9, top_p=0.9, seed=11
    )
    done = subprocess.run(
        [sys.executable, "-m", "paceline.scripts.cli", "chat", "--url", system.verifier,
         "-p", LONG[0]["content"], "--max-tokens", "20",
         "--temperature", "0.9", "--top-p", "0.9", "--seed", "11"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == (own.choices[0].message.content or "").rstrip("\n")


def test_the_example_of_the_readme(system: Any, client: openai.OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    """What stands there is run as it stands, but for the address."""
    text = (Path(__file__).resolve().parent.parent.parent / "README.md").read_text()
    [example] = re.findall(r"```python\n(from openai .*?)```", text, re.DOTALL)
    assert "http://127.0.0.1:8080" in example
    exec(example.replace("http://127.0.0.1:8080", system.url), {})
    own = client.chat.completions.create(model="smollm2", messages=ASK, temperature=0, max_tokens=24)
    assert capsys.readouterr().out == own.choices[0].message.content


# ---- what users of such systems ran into


def test_the_template_is_applied_once_and_the_text_tokenised_once(client: openai.OpenAI, system: Any) -> None:
    """The usage tells what the verifier was sent; control tokens spelt in bare text stay text."""
    for content in ("Name three colours.", " <s>[INST] a  b\n\n", "a\u00a0b 🙂"):
        messages: list[Any] = [{"role": "user", "content": content}]
        usage = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens == len(system.text.prompt(messages))
    ids = system.text.prompt(ASK)
    begin = system.text.plain("<|im_start|>")
    assert len(begin) > 1, "a control token spelt in bare text would be that token"
    assert [system.text.piece(i) for i in ids].count(b"<|im_start|>") == 3  # system, user, assistant: once each


def test_a_stop_on_the_limit_is_a_stop(client: openai.OpenAI) -> None:
    """And one token earlier the limit comes first; nothing after either is shown or counted."""
    asked: dict[str, Any] = dict(model="smollm2", messages=LONG, temperature=0, logprobs=True)
    whole = client.chat.completions.create(**asked, max_tokens=12).choices[0]
    assert whole.logprobs is not None
    tokens = [e.token for e in whole.logprobs.content or []]
    stop = "".join(tokens[8:10])
    assert "".join(tokens).index(stop) == len("".join(tokens[:8])), "the stop string comes only there"
    for limit, finish in ((9, "length"), (10, "stop"), (11, "stop")):
        cut = client.chat.completions.create(**asked, max_tokens=limit, stop=stop)
        choice = cut.choices[0]
        assert choice.finish_reason == finish
        assert choice.message.content == "".join(tokens[: 9 if finish == "length" else 8])
        assert cut.usage is not None
        assert cut.usage.completion_tokens == min(limit, 10)
        assert choice.logprobs is not None
        assert [e.token for e in choice.logprobs.content or []] == tokens[: 9 if finish == "length" else 8]


def test_what_is_accepted_is_counted_beside_what_was_drafted(client: openai.OpenAI, system: Any) -> None:
    """Not beyond the end of the text, and not as a share of the few that were sent."""

    def counts() -> dict[str, float]:
        lines = httpx.get(f"{system.url}/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {
            name: float(values[f"paceline_{name}_total"])
            for name in ("tokens", "steps", "drafted_tokens", "accepted_tokens")
        }

    before = counts()
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Answer with one word: hello"}],
        temperature=0,
        max_tokens=64,
    )
    after = counts()
    made = {name: after[name] - before[name] for name in after}
    assert answer.usage is not None
    assert made["tokens"] == answer.usage.completion_tokens
    assert made["accepted_tokens"] + made["steps"] >= made["tokens"]
    assert made["accepted_tokens"] < made["tokens"]
    assert made["drafted_tokens"] >= made["accepted_tokens"]


def test_an_answer_that_fails_midway_ends_in_an_error(
    client: openai.OpenAI, system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in silence, and not as if it were whole; and the next one is answered."""

    def broken(batch: Any) -> Any:
        raise RuntimeError("out of memory")

    stream = iter(
        client.chat.completions.create(model="smollm2", messages=LONG, max_tokens=300, temperature=0, stream=True)
    )
    seen = [next(stream) for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(system.scheduler.engine, "verify", broken)
        with pytest.raises(openai.APIError, match="the engine failed"):
            seen.extend(stream)
    assert not any(chunk.choices[0].finish_reason for chunk in seen)
    assert system.waits_for(lambda: idle(system), 2.0)
    assert client.chat.completions.create(model="smollm2", messages=ASK, max_tokens=2).choices[0].message.content
