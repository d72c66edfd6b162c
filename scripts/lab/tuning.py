"""The parameters with which each policy is at its best, found on other prompts than those it is then measured on."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.edge.policies import policy as policy_named
from paceline.edge.predictor import Predictor
from paceline.scripts.lab.cases import Case
from paceline.scripts.lab.experiment import Setting, answer
from paceline.scripts.lab.workshop import Workshop

#: What is tried for each policy, beside its defaults. `stream` and `ar` have nothing to choose: they adapt by themselves.
CHOICES: dict[str, tuple[str, ...]] = {
    "colo": ("colo", *(f"colo:backup_length={n}" for n in (4, 8, 10))),
    "sync": ("sync", *(f"sync:rounds={n}" for n in (3, 5, 8, 12))),
    "ssd": tuple(f"ssd:rounds={k}:outcomes={f}" for k in (4, 6) for f in (8, 14)),
}


def best(workshop: Workshop, cases: Sequence[Case], name: str, setting: Setting, predictor: Predictor) -> str:
    """The name, with parameters, under which the policy `name` makes most tokens a second over `cases` in `setting`."""
    choices = CHOICES.get(name.partition(":")[0], ())
    if ":" in name or not choices or not cases:
        return name
    seconds = dict.fromkeys(choices, 0.0)
    for case in cases:
        bench = workshop.bench(case, predictor)
        for choice in choices:
            run = answer(bench, case, replace(setting, policy=policy_named(choice)))
            seconds[choice] += run.seconds
        bench.memo.save()
    return min(choices, key=lambda c: seconds[c])
