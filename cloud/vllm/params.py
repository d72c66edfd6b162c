"""What a session asks for, in vLLM's words; and what vLLM cannot do while it verifies drafts, which is refused by name.

With drafts, vLLM leaves out min-p and logit biases without a word. Penalties over the text alone would be wrong where a text goes
on after a cut or a pause, as what is held of it is a prompt to vLLM.
"""

from typing import Any

from paceline.protocol.cloud_session import CloudSession
from paceline.protocol.errors import Code, ProtocolError
from paceline.protocol.messages import Open
from paceline.protocol.sampling import Sampling

COLDEST, HOTTEST = 0.01, 2.0  # temperatures above 0 that vLLM takes as they are


def demand(opened: Open, *, on_cpu: bool = False) -> None:
    """Raises ProtocolError (`unsupported`) for a request that vLLM would not honour to the letter.

    `on_cpu`: vLLM 0.32 verifies drafts above temperature 0 by kernels that a CPU does not run. What it draws there instead
    fails a chi-square test against its own text without drafts, and `top_k` ends its engine.
    """
    if (what := _missing(opened.sampling, on_cpu)) is not None:
        raise ProtocolError(
            Code.UNSUPPORTED, f"this verifier runs vLLM, which {what} while drafts are verified", opened.sid
        )


def _missing(s: Sampling, on_cpu: bool) -> str | None:
    if s.logit_bias:
        return "has no logit_bias"
    if s.presence_penalty or s.frequency_penalty:
        return "cannot go on with a text under presence_penalty or frequency_penalty"
    if s.greedy:
        return None
    if on_cpu:
        return "takes no temperature above 0 on a CPU"
    if s.min_p:
        return "has no min_p"
    if s.temperature_last and s.top_p < 1:
        return "filters after the temperature only"
    if not COLDEST <= s.temperature <= HOTTEST:
        return f"takes temperatures of 0 and from {COLDEST:g} to {HOTTEST:g} only"
    return None


def arguments(session: CloudSession) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams for what is left of a session's text.

    The seed is not among them: a text that goes on would draw the same numbers again.
    """
    s = session.sampling
    drawn = {} if s.greedy else {"top_k": s.top_k, "top_p": s.top_p}
    return {
        "temperature": 0.0 if s.greedy else s.temperature,
        "repetition_penalty": s.repetition_penalty,
        "max_tokens": session.max_tokens - len(session.committed),
        "stop_token_ids": sorted(session.stop_ids),
        "ignore_eos": True,  # the edge says where a text ends
        "detokenize": False,
        "logprobs": session.logprobs,
        **drawn,
    }
