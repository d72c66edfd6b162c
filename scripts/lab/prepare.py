"""From a question to what the sweep needs: the workshop, the cases, what the predictor knows, the tuned entrants."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from paceline.edge.policies import Policy, with_rule
from paceline.edge.policies import policy as policy_named
from paceline.edge.predictor import Predictor
from paceline.edge.text import Text
from paceline.protocol.messages import REJECTION
from paceline.protocol.sampling import Sampling
from paceline.scripts.lab.cases import Case, read_prompts, spread
from paceline.scripts.lab.experiment import Setting
from paceline.scripts.lab.network import LinkSpec
from paceline.scripts.lab.sweep import Entrant, code_digest
from paceline.scripts.lab.tuning import best
from paceline.scripts.lab.workshop import Workshop
from paceline.scripts.models import cache_folder
from paceline.scripts.pairs import files_of, vocabulary_of

if TYPE_CHECKING:
    from paceline.scripts.lab.command_rtt import Question

Step = Callable[[str, int | None], None]


def prepared(
    question: "Question", threads: int | None, step: Step
) -> tuple[Workshop, list[Case], list[Case], Predictor, dict[str, Any]]:
    """The workshop, the cases to measure, those to learn and tune on, what was learned, and a description."""
    files = files_of(question.pair, None, None)
    workshop = Workshop(files, Text(vocabulary_of(files.target)), cache_folder() / "lab", threads)
    prompts = read_prompts(question.prompts)
    sampling = Sampling(temperature=question.temperature, seed=question.seed)
    chosen = spread(prompts, question.count, question.skip)
    others = spread(prompts, question.learn, question.skip + question.count) if question.learn else []
    step("recording", len(chosen) + len(others))

    def cases(part: list[Any]) -> list[Case]:
        return workshop.cases(part, sampling, question.tokens, lambda: step("recording", None))

    measured, learning = cases(chosen), cases(others)
    about = {**asdict(question), "prompts": question.prompts.name, "target": files.target.name}
    about |= {"draft": files.draft.name, "clock": "virtual", "code": code_digest(), "cases": [c.name for c in measured]}
    about["note"] = "the target's text is recorded; times are modelled: see `edge`, `verify_floor` and the link"
    return workshop, measured, learning, workshop.taught(learning), about


def entrants(
    question: "Question",
    workshop: Workshop,
    others: list[Case],
    predictor: Predictor,
    about: dict[str, Any],
    step: Step,
) -> list[Entrant]:
    """Each policy at each round trip, with the parameters that are best there. What was tuned before is taken from `about`.

    `others` are the cases to learn and tune on.
    """
    found: list[Entrant] = []
    drawn: dict[str, Predictor] = {}
    tuning = others[: question.tune]
    chosen: dict[str, str] = about.setdefault("tuned", {})
    step("tuning", len(question.round_trips) * len(question.policies))
    for rtt in question.round_trips:
        for name in question.policies:
            name = with_rule(name, question.rule)
            setting = setting_of(workshop, question, name, rtt)
            key = f"{name} at {rtt:g}"
            chosen[key] = chosen.get(key) or best(workshop, tuning, name, setting, predictor)
            policy = _limited(question, policy_named(chosen[key]))
            setting = replace(setting, policy=policy)
            if policy.rule == REJECTION and policy.drafts and name not in drawn:
                drawn[name] = workshop.taught_by_draws(others, setting)
            found.append(Entrant(name, chosen[key], setting, drawn.get(name)))
            step("tuning", None)
    return found


def setting_of(workshop: Workshop, question: "Question", name: str, round_trip: float) -> Setting:
    link = LinkSpec(round_trip, question.jitter, question.up, question.down, question.loss)
    policy = _limited(question, policy_named(name))
    edge = workshop.edge(question.edge)
    return Setting(policy, edge, link, question.verify_floor, question.predictor, question.width)


def _limited(question: "Question", policy: Policy) -> Policy:
    if question.candidates is None:
        return policy
    return replace(policy, candidates=min(policy.candidates, question.candidates))
