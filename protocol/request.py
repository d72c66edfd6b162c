"""What one generation is asked for. Made once, where somebody asks, and passed on to whoever writes and to the session."""

from msgspec import Struct
from paceline.protocol.messages import Grammar, MaxTokens, StopIds, Tokens, TopLogprobs
from paceline.protocol.sampling import Sampling


class GenerationRequest(Struct, frozen=True):
    """All that the target's text depends on. Its bounds are those of `open`, and hold where one is read from a file."""

    prompt: Tokens
    sampling: Sampling
    max_tokens: MaxTokens
    stop_ids: StopIds = ()  # each ends the text, as its last token
    logprobs: TopLogprobs | None = None  # how many of the likeliest tokens to tell beside each that is taken
    grammar: Grammar = ""  # a JSON schema that the text is an instance of
