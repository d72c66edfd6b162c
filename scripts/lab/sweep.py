"""Many answers side by side: every prompt with every setting in turn, kept as it goes so that a cut run goes on.

A file of results is only continued by the same code and the same question: else it is refused rather than mixed.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.edge.predictor import Predictor
from paceline.protocol.errors import PacelineError
from paceline.scripts.lab.cases import Case, write_whole
from paceline.scripts.lab.experiment import Run, Setting, answer
from paceline.scripts.lab.workshop import Workshop


@dataclass(frozen=True)
class Entry:
    """A measured answer: which setting (its label and round trip), which case, what came of it."""

    policy: str
    label: str
    round_trip: float
    case: str
    category: str
    run: Run


@dataclass
class Results:
    """`about` says what was measured: enough to repeat it."""

    about: dict[str, Any]
    entries: list[Entry] = field(default_factory=list)

    def save(self, path: Path) -> None:
        text = json.dumps({"about": self.about, "entries": [asdict(e) for e in self.entries]}, indent=1)
        write_whole(path, text)

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Raises PacelineError if the file is not one of these."""
        try:
            data = json.loads(path.read_text())
            entries = [Entry(**{**e, "run": Run(**e["run"])}) for e in data["entries"]]
            return cls(data["about"], entries)
        except OSError as e:
            raise PacelineError(f"{path}: {e.strerror or e}") from None
        except (ValueError, KeyError, TypeError) as e:
            raise PacelineError(f"{path}: not a file of results ({e}); name another or remove it") from None


@dataclass(frozen=True)
class Entrant:
    """A setting in the sweep. `policy` is what it is compared as, `label` names its parameters.

    `predictor`: what it begins with, if not with what all do.
    """

    policy: str
    label: str
    setting: Setting
    predictor: Predictor | None = None


def code_digest() -> str:
    """Of the code that decides what is measured: results of different code are not mixed."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[2]
    for folder in ("protocol", "edge", "cloud", "scripts/lab"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def continued(about: dict[str, Any], out: Path | None) -> Results:
    """What was measured before under the same conditions. Raises PacelineError if the file has others."""
    if out is None or not out.exists():
        return Results(about)
    found = Results.load(out)
    asked = json.loads(json.dumps(about))  # what was found out on the way (tuned parameters) is kept beside it
    differs = sorted(k for k in asked if found.about.get(k) != asked[k])
    if differs:
        raise PacelineError(f"{out} was measured with other settings ({', '.join(differs)}); name another file")
    return found


def sweep(
    workshop: Workshop,
    cases: Sequence[Case],
    entrants: Sequence[Entrant],
    predictor: Predictor,
    results: Results,
    out: Path | None,
    done: Callable[[], None] = lambda: None,
) -> None:
    """Answer what `results` does not hold yet, all settings of a case after one another."""
    have = {(e.label, e.round_trip, e.case) for e in results.entries}
    for case in cases:
        bench = workshop.bench(case, predictor)
        for entrant in entrants:
            rtt = entrant.setting.link.round_trip
            if (entrant.label, rtt, case.name) not in have:
                run = answer(replace(bench, predictor=entrant.predictor or predictor), case, entrant.setting)
                entry = Entry(entrant.policy, entrant.label, rtt, case.name, case.category, run)
                results.entries.append(entry)
            done()
        bench.memo.save()
        if out is not None:
            results.save(out)
