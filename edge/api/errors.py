"""Errors of the local server, in the shape and with the status codes that OpenAI's clients know."""

from typing import Any

from paceline.protocol.errors import Code, EngineError, LinkError, PacelineError, ProtocolError
from starlette.responses import JSONResponse

#: What the cloud's refusals are over HTTP: status, and the code clients look at.
_OF_CODE: dict[Code, tuple[int, str]] = {
    Code.CONTEXT: (400, "context_length_exceeded"),
    Code.BAD_PROMPT: (400, "invalid_prompt"),
    Code.BAD_PARAMS: (400, "invalid_value"),
    Code.UNSUPPORTED: (400, "unsupported_value"),
    Code.SESSION_LIMIT: (429, "rate_limit_exceeded"),
    Code.OVERLOADED: (503, "overloaded"),
    Code.VERSION: (502, "cloud_version"),
    Code.VOCABULARY: (502, "cloud_vocabulary"),
}


class ApiError(PacelineError):
    """An answer that is an error: `status` over HTTP, `param` the field at fault, `code` for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        names = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        return names.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(round(self.retry_after) or 1)} if self.retry_after is not None else None
        return JSONResponse(self.body(), self.status, headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of any failure; what is not meant for people stays in the log."""
    match error:
        case ApiError():
            return error
        case ProtocolError():
            status, code = _OF_CODE.get(error.code, (502, str(error.code)))
            return ApiError(status, error.message, code=code, retry_after=error.retry_after)
        case LinkError():
            return ApiError(503, str(error), code="cloud_unreachable", retry_after=5)
        case EngineError():
            return ApiError(500, str(error), code="engine")
        case PacelineError():
            return ApiError(400, str(error))
    return ApiError(500, "The server ran into an error of its own; its log says which.", code="internal")


def refused(message: str, param: str, code: str = "unsupported_parameter") -> ApiError:
    """A field that cannot be honoured: saying so beats an answer that ignores it."""
    return ApiError(400, message, param=param, code=code)
