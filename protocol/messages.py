"""The messages of protocol version 1, typed, every field bounded. PROTOCOL.md is the written specification.

Positions: `committed_len`, `base` and the like count generated tokens, the prompt not among them. Times are seconds.
"""

from typing import Annotated, ClassVar

from msgspec import Meta, Struct
from paceline.protocol.errors import Code, ProtocolError
from paceline.protocol.proposal import MAX_PROPOSAL as MAX_PROPOSAL
from paceline.protocol.proposal import MAX_SIBLINGS as MAX_SIBLINGS
from paceline.protocol.proposal import Proposal
from paceline.protocol.sampling import Sampling, TokenId

VERSION = 1
COUPLED, REJECTION = "coupled", "rejection"  # rules of `open`; the second is a feature of a cloud as well
GRAMMAR = "grammar"  # the feature of a cloud that keeps the text to the grammar of `open`
BACKUP = "backup"  # the feature of a cloud that drafts with a model where it holds too little
UNSEEDED = "unseeded"  # of a cloud whose text, above temperature 0, is drawn without the seed's noise
SUBPROTOCOL = "paceline.v1"

MAX_OPEN_BYTES = 4 * 1024 * 1024  # `open` carries a whole prompt; the transport's limit for a frame
MAX_SMALL_BYTES = 16 * 1024  # every message that does not carry a whole text, a resumed one, or logprobs
MAX_MESSAGE_BYTES = 1024  # what either end sends after `open` in normal running
MAX_TOKENS = 1_000_000  # in a prompt, a text, or a limit
MAX_NODES_A_DRAFT = 128  # nodes in one `draft` message
MAX_COMMIT = 512  # tokens in one `commit` message
MAX_LOGPROBS = 20
MAX_STOP_IDS = 64
MAX_GRAMMAR = 65_536  # characters
MAX_TEXT = 2048  # characters of a sentence for people
MAX_PROPOSALS = 32  # families in one `draft` message
NODE_WINDOW = 4096  # a parent lies at most this many node numbers back
WEIGHT_UNIT = 1 / 16  # nats a step of the one-byte weights of a draft

Sid = Annotated[int, Meta(ge=0, lt=2**32)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Number = Annotated[int, Meta(ge=0, lt=2**48)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Name = Annotated[str, Meta(max_length=256)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Tokens = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS)]
MaxTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
StopIds = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_IDS)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Grammar = Annotated[str, Meta(max_length=MAX_GRAMMAR)]


class Message(Struct, frozen=True, omit_defaults=True, tag_field="type", tag=str.lower):
    """One MessagePack map; `type` names the class. Fields at their defaults do not travel; unknown ones are ignored."""

    large: ClassVar[bool] = False  # may be as large as MAX_OPEN_BYTES


# ---- from the edge to the cloud


class Hello(Message, frozen=True):
    versions: Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**16)], ...], Meta(min_length=1, max_length=16)]
    vocabulary: Name  # its name, for messages to people
    vocabulary_size: Annotated[int, Meta(ge=1, lt=2**31)]
    fingerprint: Digest
    agent: Name = ""
    features: Annotated[tuple[Name, ...], Meta(max_length=32)] = ()


class Open(Message, frozen=True):
    """Start a generation, or go on with one: `held` are the tokens of it that the edge already has."""

    sid: Sid
    prompt: Tokens
    sampling: Sampling
    max_tokens: MaxTokens
    stop_ids: StopIds = ()
    rule: Annotated[str, Meta(max_length=16)] = "coupled"
    held: Tokens = ()
    resume: Annotated[str, Meta(max_length=64)] = ""  # the token `opened` gave, if any
    logprobs: TopLogprobs | None = None
    grammar: Grammar = ""  # a JSON schema; the text is an instance of it
    # A step that would begin with no node waits for one, if it is due within `patience`: `response` seconds after the commit
    # that left the tree, and `row` seconds later for each token committed since. An ack of the whole text ends the wait.
    patience: Seconds = 0.0
    response: Seconds = 0.0
    row: Seconds = 0.0

    large: ClassVar[bool] = True


class Draft(Message, frozen=True):
    """Nodes `first`, `first + 1`, ... of a session's tree.

    `parents[i]` is how many numbers back the parent of node `first + i` lies; 0 means the committed text of length
    `base_committed_len`. `weights[i]` is -16 ln(probability of the token once its parent was taken), capped at 255.
    `proposals`, under the rule `rejection`, say of all nodes in turn how many siblings were drawn from which distribution.
    """

    sid: Sid
    base_committed_len: Count
    first: Number
    parents: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=NODE_WINDOW)], ...], Meta(min_length=1, max_length=MAX_NODES_A_DRAFT)
    ]
    tokens: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_NODES_A_DRAFT)]
    weights: Annotated[bytes, Meta(max_length=MAX_NODES_A_DRAFT)] = b""
    proposals: Annotated[tuple[Proposal, ...], Meta(max_length=MAX_PROPOSALS)] = ()


class Cancel(Message, frozen=True):
    sid: Sid


class Ack(Message, frozen=True):
    sid: Sid
    committed_len: Count


class Ping(Message, frozen=True):
    time: Seconds


# ---- from the cloud to the edge


class Welcome(Message, frozen=True):
    version: Annotated[int, Meta(ge=0, lt=2**16)]
    model: Name
    vocabulary_size: Annotated[int, Meta(ge=1, lt=2**31)]
    fingerprint: Digest
    context: Count  # tokens a session may hold, prompt and text
    width: Annotated[int, Meta(ge=0, le=65536)]  # nodes verified in one step, at most
    nodes: Annotated[int, Meta(ge=1, le=2**20)]  # live nodes a session may hold
    sessions: Annotated[int, Meta(ge=1, le=2**20)]  # sessions of this connection
    session_ttl: Seconds  # how long a session outlives its connection
    verify_floor: Seconds = 0.0  # a step is paced to take at least this long (benchmarks say so)
    features: Annotated[tuple[Name, ...], Meta(max_length=32)] = ()


class Opened(Message, frozen=True):
    sid: Sid
    committed_len: Count
    resume: Annotated[str, Meta(max_length=64)]
    max_tokens: Count  # what is left of the asked-for number after the context was taken into account


class Commit(Message, frozen=True):
    """Tokens [base, base + len(tokens)) of the text, and figures of the step that chose them."""

    sid: Sid
    base: Count
    tokens: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_COMMIT)]
    accepted: Count = 0  # how many of `tokens` were drafted nodes
    held: Count = 0  # nodes held when the step began; 0 is a miss
    verified: Count = 0  # nodes that went through the target
    stale: Count = 0  # nodes dropped since the last commit because they came late or disagreed
    step: Seconds = 0.0  # duration of the step
    finish: Annotated[str, Meta(max_length=16)] = ""  # "stop", "length", "cancelled", or "" (goes on)
    logprobs: Annotated[
        tuple[Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=MAX_LOGPROBS + 1)], ...],
        Meta(max_length=MAX_COMMIT),
    ] = ()

    large: ClassVar[bool] = True  # with logprobs, or after a resume


class Error(Message, frozen=True):
    code: Code
    message: Text
    sid: Sid | None = None
    retryable: bool = False
    retry_after: Seconds | None = None

    @classmethod
    def of(cls, error: ProtocolError) -> "Error":
        """The message that carries `error`, its text cut to what a message may hold."""
        return cls(error.code, error.message[:MAX_TEXT], error.sid, error.retryable, error.retry_after)


class Goaway(Message, frozen=True):
    reason: Text
    drain: Seconds = 0.0  # running sessions may go on for this long


class Pong(Message, frozen=True):
    time: Seconds


FromEdge = Hello | Open | Draft | Cancel | Ack | Ping
FromCloud = Welcome | Opened | Commit | Error | Goaway | Pong
FROM_EDGE: dict[str, type[Message]] = {c.__name__.lower(): c for c in (Hello, Open, Draft, Cancel, Ack, Ping)}
FROM_CLOUD: dict[str, type[Message]] = {c.__name__.lower(): c for c in (Welcome, Opened, Commit, Error, Goaway, Pong)}
