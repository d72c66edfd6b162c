"""The sweep under the real clock: an edge and a verifier process, each on a core of its own, and a real link between them.

The target is a recording (its compute is not this machine's to give twice), paced to the floor; the draft, the agent, the
sockets and the link are real, at this machine's own speed. A round trip that was measured is kept.
"""

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from paceline.protocol.errors import PacelineError
from paceline.protocol.messages import COUPLED, REJECTION
from paceline.scripts.lab.experiment import Run
from paceline.scripts.lab.network import LinkSpec
from paceline.scripts.lab.prepare import prepared
from paceline.scripts.lab.real_link import child, end, first_line, link_between
from paceline.scripts.lab.sweep import Entry, Results, continued

if TYPE_CHECKING:
    from paceline.scripts.lab.command_rtt import Question

REAL = ("ar", "sync", "ssd", "stream")


def measure_real(question: "Question", threads: int | None, out: Path | None) -> Results:
    """Raises PacelineError, naming it, for a policy that needs what a real verifier here does not have."""
    from paceline.scripts.lab.command_rtt import bar

    if question.rule != COUPLED or any(f"rule={REJECTION}" in name for name in question.policies):
        raise PacelineError(
            "the real clock's verifier plays a recording, which cannot verify draws; use --clock virtual"
        )
    for name in question.policies:
        if name.partition(":")[0] not in REAL or "backup" in name:
            raise PacelineError(
                f"the real clock measures {', '.join(REAL)}; {name} needs a draft model at the verifier"
            )
    with bar() as step, tempfile.TemporaryDirectory() as folder:
        workshop, cases, _, learned, about = prepared(question, threads, step)
        about |= {
            "clock": "real",
            "edge": "native",
            "note": "the target's text is recorded and paced; all else is real",
        }
        results = continued(about, out)
        table = Path(folder) / "learned.json"
        learned.save(table)
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        job = {
            "cases": [msgspec.to_builtins(asdict(c) | {"sampling": None}) for c in cases],
            "sampling": msgspec.to_builtins(cases[0].sampling),
            "vocabulary": asdict(workshop.vocabulary),
            "target": workshop.pair.target.name,
            "draft": str(workshop.pair.draft),
            "learned": str(table) if question.predictor else "",
            "policies": list(question.policies),
            "verify": question.verify_floor,
            "width": question.width,
            "edge_core": cores[0] if cores else None,
            "verifier_core": cores[-1] if cores else None,
        }
        step("measuring", len(cases) * len(question.policies) * len(question.round_trips))
        for rtt in question.round_trips:
            if all(e.round_trip != rtt for e in results.entries):
                spec = LinkSpec(rtt, question.jitter, question.up, question.down, question.loss)
                results.entries += _at(job, spec, Path(folder) / "job.json", results.about, step)
                if out is not None:
                    results.save(out)
    return results


def _at(job: dict[str, Any], spec: LinkSpec, file: Path, about: dict[str, Any], step: Any) -> list[Entry]:
    """All prompts and policies over one link."""
    file.write_text(json.dumps(job))
    program = [sys.executable, "-m"]
    with ExitStack() as stack:
        ends = stack.enter_context(link_between(spec))
        verifier = child([*ends.cloud, *program, "paceline.scripts.lab.verifier", str(file), ends.host])
        stack.callback(end, verifier)
        host, port = ends.reach(int(first_line(verifier).rpartition(":")[2]))
        url = f"ws://{host}:{port}"
        device = child([*ends.edge, *program, "paceline.scripts.lab.device", str(file), url])
        stack.callback(end, device)
        about["link"] = ends.kind
        about.setdefault("step_cost", json.loads(first_line(device))["step_cost"])
        entries = []
        for _ in range(len(job["cases"]) * len(job["policies"])):
            found = json.loads(first_line(device))
            run = Run(**found["run"])
            entries.append(
                Entry(found["policy"], found["policy"], spec.round_trip, found["case"], found["category"], run)
            )
            step("measuring", None)
        return entries
