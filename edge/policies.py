"""Policies are values: what differs between the ways of splitting a generation, so that one agent runs them all."""

from dataclasses import dataclass

from paceline.protocol.errors import PacelineError


@dataclass(frozen=True)
class Policy:
    """`drafts`: whether the device drafts at all. `width`: rows of a draft step; None: as many as pay, by measurement."""

    name: str
    drafts: bool
    width: int | None = None


POLICIES = {
    "ar": Policy("ar", drafts=False),  # the cloud decodes alone and streams: the baseline
    "stream": Policy("stream", drafts=True),  # the tree is sent before it is needed, and eaten where it lies
}


def policy(name: str) -> Policy:
    if name not in POLICIES:
        raise PacelineError(f"policy {name!r} is not known; there are {', '.join(POLICIES)}")
    return POLICIES[name]
