"""Policies are values: what differs between the ways of splitting a generation, so that one agent runs them all."""

from dataclasses import dataclass, replace

from paceline.edge.rounds import Rounds
from paceline.protocol.errors import PacelineError
from paceline.protocol.messages import COUPLED, REJECTION

RULES = (COUPLED, REJECTION)
FAVOUR = 85  # below it, what is gained in outcomes prepared is lost in tokens accepted

THRIFT = 20  # percent, where power is low


@dataclass(frozen=True)
class Policy:
    """`drafts`: whether the device drafts at all. `width`: rows of a draft step; None: as many as pay, by measurement.

    `rounds`: tokens of a round, 0 as many as pay; None: no rounds. `outcomes`: how many outcomes of a round are prepared
    while it is on its way. `candidates`: of a row that become nodes, at most. `repeats`: whether repeats of the text join
    the tree beside the draft's nodes; `ngrams`: and, where the draft has none, what the target is known to write. `waits`:
    whether the cloud may wait for nodes instead of stepping without. `backup`: what the verifier drafts by itself where it
    holds too little (none, ngram, draft, both), `backup_length` tokens of it for a step, 0 as many as pay. `recycles`: whether
    the verifier offers again what was drafted for places that the target left; rounds are measured without, as the literature
    has them. `thrift`: percent of chance to become text that a row must have to be run; 0: any that helps the speed. `rule`:
    how drafted tokens are accepted. `favour`, in rounds under the rule `rejection`: the percentage to which the likelihood of
    the prepared outcomes' tokens is reduced when one is drawn (Saguaro sampling).
    """

    name: str
    drafts: bool
    width: int | None = None
    rounds: int | None = None
    outcomes: int = 0
    candidates: int = 8
    waits: bool = True
    repeats: bool = True
    ngrams: bool = True
    backup: str = "none"
    backup_length: int = 0
    recycles: bool = True
    thrift: int = 0
    rule: str = COUPLED
    favour: int = 100

    def new_rounds(self) -> Rounds | None:
        return None if self.rounds is None else Rounds(self.rounds, self.outcomes, self.favour / 100)


POLICIES = {
    "ar": Policy("ar", drafts=False),  # the cloud decodes alone and streams: the baseline
    "colo": Policy("colo", drafts=False, backup="draft"),  # a draft beside the target: no link in the way, no overlap
    "sync": Policy("sync", drafts=True, rounds=0, recycles=False),  # draft here, send, wait for the verdict
    # the same, with the verdict's outcomes drafted meanwhile
    "ssd": Policy("ssd", drafts=True, rounds=4, outcomes=8, recycles=False, favour=FAVOUR),
    "stream": Policy("stream", drafts=True),  # the tree is sent before it is needed, and eaten where it lies
}


def with_power(name: str, power: str) -> str:
    """The policy `name` as it is to be run at that power, full or low. Raises PacelineError where there is no such thing."""
    if power not in ("full", "low"):
        raise PacelineError(f"--power {power} is not known; there are full and low")
    chosen = policy(name)
    if power == "full" or not chosen.drafts:
        return name
    if chosen.rounds is not None:
        raise PacelineError(
            f"--power low chooses among the rows of --policy stream; {name} runs the rows of its rounds"
        )
    return f"{name}:thrift={THRIFT}"


def policy(name: str) -> Policy:
    """A policy by name, with what is to differ after a colon: stream:width=4. Raises PacelineError."""
    kind, _, rest = name.partition(":")
    if kind not in POLICIES:
        raise PacelineError(f"policy {kind!r} is not known; there are {', '.join(POLICIES)}")
    chosen = POLICIES[kind]
    for part in filter(None, rest.split(":")):
        key, _, value = part.partition("=")
        try:
            chosen = replace(chosen, **{key: value if key in ("backup", "rule") else int(value)})  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise PacelineError(f"policy {name!r}: {part!r} is not an option with a whole number") from None
    if not 0 <= chosen.thrift < 100:
        raise PacelineError(f"policy {name!r}: thrift is a percentage from 0 to 99")
    if chosen.rule not in RULES:
        raise PacelineError(f"rule {chosen.rule!r} is not known; there are {' and '.join(RULES)}")
    if not 0 <= chosen.favour <= 100:
        raise PacelineError(f"policy {name!r}: favour is a percentage from 0 to 100")
    return replace(chosen, name=name)


def with_rule(name: str, rule: str) -> str:
    """The policy `name` under another rule, unless it names one itself, or the device drafts nothing that could be drawn."""
    if rule not in RULES:
        raise PacelineError(f"rule {rule!r} is not known; there are {' and '.join(RULES)}")
    if rule == COUPLED or ":rule=" in name or not policy(name).drafts:
        return name
    return f"{name}:rule={rule}"
