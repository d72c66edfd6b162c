"""A verifier in front of somebody else's ASGI application: edges are its own, everybody else is let past.

With a file of keys the other application, too, is only for those who have one.
"""

from collections.abc import Awaitable, Callable

from paceline.cloud.asgi import Message, Receive, Send, Verifier, authorization

PATHS = frozenset({"/healthz", "/readyz", "/v1/model", "/v1/vocabulary"})  # beside the websocket at /


class Entrance:
    """ASGI middleware. `ask` gives the verifier once there is one; until then everything is the app's."""

    def __init__(
        self, app: Callable[[Message, Receive, Send], Awaitable[None]], ask: Callable[[], Verifier | None]
    ) -> None:
        self._app, self._ask = app, ask

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        verifier = self._ask()
        if verifier is None or scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        ours = scope["path"] == "/" if scope["type"] == "websocket" else scope["path"] in PATHS
        if ours or verifier.front.locked(authorization(scope)):
            await verifier(scope, receive, send)
        else:
            await self._app(scope, receive, send)
