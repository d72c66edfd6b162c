"""The errors of Paceline.

PacelineError            anything a person can act on; its text is one sentence that says what to do
  ProtocolError          a peer sent, or was refused, something; carries a code that travels on the wire
  EngineError            a model cannot be loaded or run
  LinkError              the cloud cannot be reached
"""

from enum import StrEnum


class Code(StrEnum):
    """Error codes of protocol version 1; PROTOCOL.md says when each is sent."""

    BAD_FRAME = "bad_frame"
    TOO_LARGE = "too_large"
    UNKNOWN_TYPE = "unknown_type"
    BAD_MESSAGE = "bad_message"
    BAD_STATE = "bad_state"
    VERSION = "version"
    VOCABULARY = "vocabulary"
    UNKNOWN_SESSION = "unknown_session"
    DUPLICATE_SESSION = "duplicate_session"
    SESSION_LIMIT = "session_limit"
    RATE_LIMIT = "rate_limit"
    IDLE = "idle"
    BAD_PROMPT = "bad_prompt"
    CONTEXT = "context"
    BAD_PARAMS = "bad_params"
    UNSUPPORTED = "unsupported"
    BAD_TOKEN = "bad_token"
    BAD_BASE = "bad_base"
    BAD_PARENT = "bad_parent"
    BAD_PROPOSAL = "bad_proposal"
    TREE_LIMIT = "tree_limit"
    DIVERGED = "diverged"
    OVERLOADED = "overloaded"
    ENGINE = "engine"
    INTERNAL = "internal"


#: Codes after which the same request may succeed later, unchanged.
RETRYABLE = frozenset(
    {
        Code.SESSION_LIMIT,
        Code.RATE_LIMIT,
        Code.IDLE,
        Code.OVERLOADED,
        Code.ENGINE,
        Code.INTERNAL,
        Code.UNKNOWN_SESSION,
    }
)

#: Codes that say no to a peer that did nothing wrong.
REFUSALS = RETRYABLE - {Code.UNKNOWN_SESSION}

#: Codes after which the session goes on: what did not fit was dropped, and nothing else.
HARMLESS = frozenset({Code.TREE_LIMIT})

#: Codes that end the connection: the peer does not speak this protocol, or not this vocabulary.
FATAL = frozenset({Code.VERSION, Code.VOCABULARY})


class PacelineError(Exception):
    """Something a person can act on. The text is one clear sentence."""


class ProtocolError(PacelineError):
    """A violation of the protocol, or a refusal by the peer.

    `sid` names the session it concerns (None: the connection). `retry_after` is in seconds.
    """

    def __init__(self, code: Code, message: str, sid: int | None = None, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.sid = sid
        self.retry_after = retry_after

    @property
    def retryable(self) -> bool:
        return self.code in RETRYABLE


class EngineError(PacelineError):
    """A model cannot be loaded or run."""


class LinkError(PacelineError):
    """The cloud cannot be reached."""
