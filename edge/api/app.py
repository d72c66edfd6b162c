"""The routes of the local server, and how an error in one of them reaches the client."""

import logging
from collections.abc import Sequence
from pathlib import Path

from paceline.edge.api import shapes
from paceline.edge.api.completions import chat_completions, completions
from paceline.edge.api.door import LOCAL_ORIGIN, Door
from paceline.edge.api.errors import ApiError, as_api_error
from paceline.edge.api.live import live
from paceline.edge.api.service import ClientGone, Service
from paceline.edge.link import State
from paceline.protocol.errors import PacelineError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

log = logging.getLogger(__name__)
PAGE = Path(__file__).resolve().parent.parent / "web"
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def application(service: Service, origins: Sequence[str] = ()) -> Starlette:
    """The server as an ASGI application. `origins`: web pages from elsewhere that may use it, "*" for any."""
    anywhere = "*" in origins
    cors = Middleware(
        CORSMiddleware,
        allow_origins=["*"] if anywhere else list(origins),
        allow_origin_regex=None if anywhere else LOCAL_ORIGIN,
        allow_methods=["GET", "POST", "OPTIONS"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )
    app = Starlette(
        routes=[
            Route("/v1/models", _models),
            Route("/v1/models/{model:path}", _model),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/health", _health),
            Route("/metrics", _metrics),
            Route("/version", _version),
            Route("/live", live),
            Route("/", _page),
            Route("/{name:str}", _page_part),
        ],
        middleware=[cors, Middleware(Door, service=service, origins=tuple(origins))],
        exception_handlers={Exception: _fail, HTTPException: _refuse, PacelineError: _refuse, ClientGone: _refuse},
    )
    app.state.service = service
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        text = {404: f"There is nothing at {request.url.path}.", 405: f"{request.method} does not work here."}
        error = ApiError(error.status_code, text.get(error.status_code, error.detail), code="unknown_url")
    return as_api_error(error).response()


async def _fail(request: Request, error: Exception) -> Response:
    told = as_api_error(error)
    if told.status == 500:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return told.response()


# ---- small routes


async def _models(request: Request) -> Response:
    service: Service = request.app.state.service
    return JSONResponse({"object": "list", "data": [shapes.model(service.model, service.created)]})


async def _model(request: Request) -> Response:
    service: Service = request.app.state.service
    name = request.path_params["model"]
    if name not in (service.model, "paceline"):
        raise ApiError(404, f"The model {name!r} does not exist.", param="model", code="model_not_found")
    return JSONResponse(shapes.model(service.model, service.created))


async def _health(request: Request) -> Response:
    """200 while answers can be had, 503 while the verifier is away and no draft may answer alone."""
    service: Service = request.app.state.service
    link = service.agent.link
    up, alone = link.state is State.UP, service.answers_alone and link.state is not State.REFUSED
    status = "ok" if up else "draft alone" if alone else "no verifier"
    body = {"status": status, "link": link.state.value, "model": service.model}
    return JSONResponse(body if up else body | {"reason": link.last_error}, 200 if up or alone else 503)


async def _metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    service.observe_link()
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _version(request: Request) -> Response:
    return JSONResponse({"version": request.app.state.service.version})


async def _page(request: Request) -> Response:
    return FileResponse(PAGE / "index.html", headers=_PAGE_HEADERS)


async def _page_part(request: Request) -> Response:
    path = PAGE / request.path_params["name"]
    if path.suffix not in (".css", ".js", ".svg") or path.parent != PAGE or not path.is_file():
        raise HTTPException(404)
    return FileResponse(path, headers=_PAGE_HEADERS)
