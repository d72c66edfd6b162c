"""What clients ask for: JSON bodies, read straight into types with bounds, and turned into a `GenerationRequest`.

Fields that are not known are ignored, as OpenAI's own servers of other makers do; fields that are known and cannot be
honoured are refused, because an answer that silently ignores one would be a wrong answer.
"""

import re
import secrets
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from paceline.edge.api.errors import ApiError, refused
from paceline.edge.text import Text, Turn
from paceline.protocol.messages import GRAMMAR, MAX_GRAMMAR, MAX_LOGPROBS, Welcome
from paceline.protocol.request import GenerationRequest
from paceline.protocol.sampling import Sampling, TokenId

T = TypeVar("T")
_AT = re.compile(r"(?: - at `(?:key in )?\$\.?(?P<field>[^`]*)`)?$")

MAX_STOPS = 16
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
TokenLimit = Annotated[int, Meta(ge=1, le=1_000_000)]


class Part(Struct):
    type: str
    text: str = ""


class ChatMessage(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    tool_calls: list[Any] | None = None


class StreamOptions(Struct):
    include_usage: bool = False


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class Common(Struct, kw_only=True):
    """What both kinds of completion take. Ranges that are the sampling's own are checked with it."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    seed: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    max_tokens: TokenLimit | None = None
    paceline_marks: bool | None = None  # this server's own: say of each token whether it was drafted

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Common, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None


class TextRequest(Common, kw_only=True):
    prompt: str | list[TokenId | str | list[TokenId]] = ""  # text or token ids; in a list only if it is the only one
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


def read(body: bytes, kind: type[T]) -> T:
    """A body as a request. Raises ApiError (400) naming the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as e:
        message = str(e)
        found = _AT.search(message)
        assert found is not None
        field = found["field"] or None
        if missing := re.search(r"missing required field `(\w+)`", message):
            field = ".".join(filter(None, [field, missing[1]]))
        text = message[: found.start()]
        raise ApiError(400, f"{field}: {text}" if field else text, param=field, code="invalid_value") from None
    except msgspec.DecodeError as e:
        raise ApiError(400, f"The body is not JSON: {e}") from None


def chat_generation(request: ChatRequest, text: Text, cloud: Welcome) -> GenerationRequest:
    """What a chat asks of that verifier. Raises ApiError, PacelineError."""
    _demand_one(request.n, "n")
    if request.functions or (request.tools and request.tool_choice != "none"):
        raise refused('This server calls no tools; leave `tools` out, or set `tool_choice` to "none".', "tools")
    if request.top_logprobs is not None and not request.logprobs:
        raise refused("`top_logprobs` needs `logprobs` to be true.", "top_logprobs", "invalid_value")
    prompt = text.prompt([_turn(m, i) for i, m in enumerate(request.messages)])
    limit = request.max_completion_tokens or request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    room = max(cloud.context - len(prompt), 1)
    grammar = _grammar(request.response_format, cloud)
    return _generation(request, text, prompt, limit or room, logprobs, grammar)


def text_generation(request: TextRequest, text: Text) -> GenerationRequest:
    """What a completion of bare text asks for. Raises ApiError."""
    _demand_one(request.n, "n")
    _demand_one(request.best_of, "best_of")
    if request.suffix:
        raise refused("This server does not fill in the middle; leave `suffix` out.", "suffix")
    if request.echo and request.logprobs is not None:
        raise refused("`echo` together with `logprobs` is not offered.", "echo")
    return _generation(request, text, _prompt(request, text), request.max_tokens or 16, request.logprobs)


def _generation(
    request: Common, text: Text, prompt: list[int], max_tokens: int, logprobs: int | None, grammar: str = ""
) -> GenerationRequest:
    if not prompt:
        raise ApiError(400, "The prompt is empty.", param="prompt", code="invalid_prompt")
    return GenerationRequest(tuple(prompt), _sampling(request), max_tokens, text.end_tokens, logprobs, grammar)


def _grammar(form: ResponseFormat | None, cloud: Welcome) -> str:
    """The JSON schema that the answer has to keep to; empty: it is free."""
    if form is None or form.type == "text":
        return ""
    if GRAMMAR not in cloud.features:
        text = "This verifier cannot keep its text to a grammar; leave `response_format` out, or ask for JSON in words."
        raise refused(text, "response_format")
    if form.type == "json_object":
        return '{"type": "object"}'
    schema = (form.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        raise refused(
            "`json_schema` has no `schema` that is an object.", "response_format.json_schema", "invalid_value"
        )
    encoded = msgspec.json.encode(schema).decode()
    if len(encoded) > MAX_GRAMMAR:
        raise refused(f"The schema is longer than {MAX_GRAMMAR} characters.", "response_format", "invalid_value")
    return encoded


def _sampling(request: Common) -> Sampling:
    """OpenAI's defaults, where nothing is said: temperature 1 and no filters. A seed may be any integer; -1 is one too."""
    given = request.temperature
    top_k, top_p = request.top_k or 0, request.top_p
    return Sampling(
        seed=secrets.randbits(32) if request.seed is None else request.seed % 2**63,
        temperature=1.0 if given is None else given,
        top_k=max(top_k, 0) if top_p != 0 else 1,  # top_p 0 keeps the likeliest token alone
        top_p=top_p or 1.0,
        min_p=request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_bias(request.logit_bias or {}),
    )


def _bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if len(given) > 1024:
        raise ApiError(400, "logit_bias: more than 1024 tokens", param="logit_bias", code="invalid_value")
    if bad := next((key for key in given if not key.isascii() or not key.isdigit() or len(key) > 9), None):
        raise ApiError(400, f"logit_bias: {bad!r} is not a token id", param="logit_bias", code="invalid_value")
    return tuple((int(key), value) for key, value in given.items())


def _turn(message: ChatMessage, index: int) -> Turn:
    where = f"messages[{index}]"
    if message.role in ("tool", "function") or message.tool_calls:
        raise refused(f"{where}: this server calls no tools.", f"{where}.role")
    content = message.content
    if isinstance(content, list):
        if other := next((p.type for p in content if p.type != "text"), None):
            raise refused(f"{where}: this model reads text, not {other!r} parts.", f"{where}.content")
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content or ""}


def _prompt(request: TextRequest, text: Text) -> list[int]:
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]  # type: ignore[assignment]
    if isinstance(prompt, str):
        return text.plain(prompt)
    ids = [token for token in prompt if isinstance(token, int)]
    if len(ids) != len(prompt):
        raise refused("One prompt a request; send several requests, they share a step.", "prompt")
    return ids


def _demand_one(value: int | None, name: str) -> None:
    if value not in (None, 1):
        raise refused(f"One choice a request: `{name}` is 1 here.", name)
