"""Who may come in, and the plain HTTP paths, whatever carries them: `server` and `asgi` put it behind a socket.

GET /healthz          ok
GET /readyz           ok, or 503 while the verifier goes away
GET /v1/model         {"model", "vocabulary_size", "fingerprint", "context"}
GET /v1/vocabulary    the vocabulary without the weights (GGUF, or a tokenizer.json bundle): all a device needs to tokenise
GET /metrics, /version
"""

import json
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from paceline.cloud.connection import House
from paceline.cloud.keys import Keys
from paceline.cloud.limits import Owner
from paceline.cloud.metrics import exposition, own_version, registry
from prometheus_client import CONTENT_TYPE_LATEST


@dataclass(frozen=True)
class Page:
    """A plain HTTP answer. `retry_after` in seconds."""

    status: HTTPStatus
    kind: str
    body: bytes
    retry_after: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        found = {"Content-Type": self.kind, "Content-Length": str(len(self.body)), "Connection": "close"}
        if self.retry_after is not None:
            found["Retry-After"] = str(self.retry_after)
        return found


class Front:
    """What is answered before a websocket begins. `authorization` is the header of that name, if there was one."""

    def __init__(self, house: House, vocabulary: Path | None, keys: Keys | None) -> None:
        self.house, self._vocabulary, self._keys = house, vocabulary, keys
        self._metrics = registry(house)

    def answer(self, path: str, authorization: str | None, *, websocket: bool) -> Page | None:
        """A plain HTTP answer, or None to go on with the websocket."""
        match path:
            case "/healthz":
                return _text(HTTPStatus.OK, b"ok\n")
            case "/readyz" if self.house.draining:
                return _text(HTTPStatus.SERVICE_UNAVAILABLE, b"draining\n")
            case "/readyz":
                return _text(HTTPStatus.OK, b"ok\n")
        if self.locked(authorization):
            return _text(HTTPStatus.UNAUTHORIZED, b"a key is needed: Authorization: Bearer KEY\n")
        return self._no_room(authorization) if websocket else self._page(path)

    def locked(self, authorization: str | None) -> bool:
        """Whether a key is needed and this is none."""
        return self._keys is not None and self._keys.name_of(authorization) is None

    def owner(self, authorization: str | None) -> Owner:
        """Whose connection this is, with what its key may do by now."""
        name = self._keys.name_of(authorization) if self._keys else None
        allowance = self._keys.allowance_of(name) if self._keys and name else None
        return self.house.owner(name or "", allowance)

    def _no_room(self, authorization: str | None) -> Page | None:
        """Why no websocket may begin here now, if so: before any work was done for it."""
        if self.house.draining:
            return _busy(HTTPStatus.SERVICE_UNAVAILABLE, b"going away\n")
        if self.house.connections >= self.house.bounds.connections:
            return _busy(HTTPStatus.SERVICE_UNAVAILABLE, b"as many connections as there may be\n")
        owner = self.owner(authorization)
        limit = owner.allowance.connections
        if limit is not None and owner.connections >= limit:
            return _busy(HTTPStatus.TOO_MANY_REQUESTS, b"as many connections as this key may have\n")
        return None

    def _page(self, path: str) -> Page:
        match path:
            case "/metrics":
                return Page(HTTPStatus.OK, CONTENT_TYPE_LATEST, exposition(self._metrics))
            case "/version":
                return _json({"version": own_version()})
            case "/v1/model":
                own, house = self.house.vocabulary, self.house
                facts = {"model": house.model, "vocabulary_size": own.size, "fingerprint": own.fingerprint}
                return _json({**facts, "context": house.context})
            case "/v1/vocabulary" if self._vocabulary is not None:
                return Page(HTTPStatus.OK, "application/octet-stream", self._vocabulary.read_bytes())
        return _text(HTTPStatus.NOT_FOUND, b"not found\n")


def _busy(status: HTTPStatus, text: bytes, seconds: int = 1) -> Page:
    """What a proxy in front takes for a reason to ask another verifier, and an edge to come again."""
    return Page(status, "text/plain", text, seconds)


def _text(status: HTTPStatus, text: bytes) -> Page:
    return Page(status, "text/plain", text)


def _json(value: dict[str, object]) -> Page:
    return Page(HTTPStatus.OK, "application/json", json.dumps(value).encode())
