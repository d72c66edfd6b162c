"""Policies are values: what differs between the ways of splitting a generation, so that one agent runs them all."""

from dataclasses import dataclass, replace

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
    """A policy by name, with what is to differ after a colon: stream:width=4. Raises PacelineError."""
    kind, _, rest = name.partition(":")
    if kind not in POLICIES:
        raise PacelineError(f"policy {kind!r} is not known; there are {', '.join(POLICIES)}")
    chosen = POLICIES[kind]
    for part in filter(None, rest.split(":")):
        key, _, value = part.partition("=")
        try:
            chosen = replace(chosen, **{key: int(value)})
        except (TypeError, ValueError):
            raise PacelineError(f"policy {name!r}: {part!r} is not an option with a whole number") from None
    return replace(chosen, name=name)
