"""/v1/chat/completions and /v1/completions: an answer as one body or as a stream of events."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

from paceline.edge.answer import Answer, Piece, Writer
from paceline.edge.api.errors import ApiError, as_api_error, refused
from paceline.edge.api.requests import ChatRequest, Common, TextRequest, chat_generation, read, text_generation
from paceline.edge.api.service import Service, unless_gone
from paceline.edge.api.shapes import Shape
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 8 * 1024 * 1024
QUIET_SECONDS = 15.0  # a stream is never silent for longer: reverse proxies cut at 60 s
#: Buffering by a reverse proxy would turn a stream into one late block.
STREAM_HEADERS = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
_OVER = object()


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    asked = read(await body_of(request), ChatRequest)
    _demand_model(service, asked.model)
    writer, bounds = await service.writer()
    answer = Answer(service.text, chat_generation(asked, service.text, bounds), asked.stops)
    return await _answer(request, service, asked, answer, writer, chat=True)


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    asked = read(await body_of(request), TextRequest)
    _demand_model(service, asked.model)
    writer, _ = await service.writer()
    answer = Answer(service.text, text_generation(asked, service.text), asked.stops)
    echo = service.text.decode(answer.request.prompt) if asked.echo else ""
    return await _answer(request, service, asked, answer, writer, chat=False, echo=echo)


async def body_of(request: Request) -> bytes:
    """The request's body. Raises ApiError (413) when it is longer than anybody's prompt."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise ApiError(413, f"The body is longer than {MAX_BODY_BYTES} bytes.", code="request_too_large")
    return bytes(data)


def _demand_model(service: Service, name: str) -> None:
    if name not in (service.model, "paceline"):
        text = f"The model {name!r} does not exist; this server has {service.model!r} (also by the name 'paceline')."
        raise ApiError(404, text, param="model", code="model_not_found")


async def _answer(
    request: Request, service: Service, asked: Common, answer: Answer, writer: Writer, *, chat: bool, echo: str = ""
) -> Response:
    signature, with_logprobs = service.signature(writer), answer.request.logprobs is not None
    if signature and with_logprobs:
        raise refused("The draft answers alone for now, and gives no log-probabilities.", "logprobs")
    name = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
    shape = Shape(
        chat,
        name,
        service.model,
        int(time.time()),
        service.text,
        with_logprobs,
        asked.with_usage,
        bool(asked.paceline_marks),
        signature,
    )
    if asked.stream:
        return await _stream(request, service, answer, writer, shape, echo)

    async def whole() -> list[Piece]:
        async with service.running(answer, writer) as pieces:
            return [piece async for piece in pieces]

    return JSONResponse(shape.whole(answer, await unless_gone(request, whole), echo))


async def _stream(
    request: Request, service: Service, answer: Answer, writer: Writer, shape: Shape, echo: str
) -> Response:
    """A stream whose status is only decided when the first piece, or the refusal, is there."""
    stack = AsyncExitStack()
    try:
        pieces = await stack.enter_async_context(service.running(answer, writer))
        first = await unless_gone(request, lambda: anext(pieces, None))
    except BaseException:
        await stack.aclose()
        raise
    events = _events(stack, _with_first(first, echo, pieces), answer, shape)
    return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)


async def _with_first(first: Piece | None, echo: str, pieces: AsyncGenerator[Piece, None]) -> AsyncIterator[Piece]:
    if echo:
        yield Piece(echo)
    if first is not None:
        yield first
    async for piece in pieces:
        yield piece


async def _events(
    stack: AsyncExitStack, pieces: AsyncIterator[Piece], answer: Answer, shape: Shape
) -> AsyncIterator[bytes]:
    async with stack:
        try:
            if (opening := shape.first()) is not None:
                yield _event(opening)
            async for piece in _never_silent(pieces):
                yield _event(shape.piece(piece)) if piece is not None else b": waiting for the verifier\n\n"
            yield _event(shape.last(answer))
            if shape.with_usage:
                yield _event(shape.usage(answer))
        except Exception as e:
            if not isinstance(error := as_api_error(e), ApiError) or error.status == 500:
                log.exception("an answer ended in an error")
            yield _event(error.body())
            return
        yield b"data: [DONE]\n\n"


async def _never_silent(pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece | None]:
    """`pieces`, with a None whenever none has come for a while."""
    coming: asyncio.Future[Any] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(pieces, _OVER))
            done, _ = await asyncio.wait([coming], timeout=QUIET_SECONDS)
            if not done:
                yield None
                continue
            piece, coming = await coming, None
            if piece is _OVER:
                return
            yield piece
    finally:
        if coming is not None:
            coming.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await coming


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
