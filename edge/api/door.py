"""What stands before every route: request ids, the origins of web pages, keys, the count of requests."""

import hmac
import ipaddress
import re
import secrets
from urllib.parse import urlsplit

from paceline.edge.api.errors import ApiError
from paceline.edge.api.service import Service
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Door:
    """ASGI middleware. `origins`: web pages from elsewhere that may use the server, "*" for any."""

    def __init__(self, app: ASGIApp, service: Service, origins: tuple[str, ...]) -> None:
        self._app, self._service, self._origins = app, service, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if _ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
                self._count(scope, message["status"])
            await send(message)

        try:
            self._demand_origin(headers)
            if scope["path"].startswith("/v1/") or scope["path"] == "/live":
                self._demand_key(headers)
        except ApiError as e:
            await e.response()(scope, receive, send_named)
        else:
            await self._app(scope, receive, send_named)

    def _count(self, scope: Scope, status: int) -> None:
        route = scope.get("route")
        self._service.metrics.requests.labels(getattr(route, "path", "other"), str(status)).inc()

    def _demand_origin(self, headers: Headers) -> None:
        """A web page from elsewhere must not use somebody's local server behind their back."""
        origin = headers.get("origin")
        if origin is None or {"*", origin} & set(self._origins) or re.fullmatch(LOCAL_ORIGIN, origin):
            return
        parts = urlsplit(origin)
        if parts.netloc == headers.get("host") and _is_address(parts.hostname or ""):
            return  # this server's own page, seen from another machine; a name could be anybody's
        text = f"Pages from {origin} may not use this server; start it with --origin {origin} to allow it."
        raise ApiError(403, text, code="origin_not_allowed")

    def _demand_key(self, headers: Headers) -> None:
        keys = self._service.keys
        scheme, _, key = headers.get("authorization", "").partition(" ")
        known = scheme.lower() == "bearer" and any(hmac.compare_digest(key.strip().encode(), k.encode()) for k in keys)
        if keys and not known:
            text = "Incorrect API key provided: this server wants `Authorization: Bearer` with one of its keys."
            raise ApiError(401, text, code="invalid_api_key")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.endswith(".local")
    return True
