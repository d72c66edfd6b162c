"""`paceline doctor`: what this device, its draft and its link can do, and what to change."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from paceline.scripts import options

if TYPE_CHECKING:
    from paceline.edge.websocket import Address
    from paceline.scripts.doctor.link import Link
    from paceline.scripts.doctor.machine import Machine


@dataclass(frozen=True)
class Findings:
    """Times in seconds. `link` is None where no verifier was named, or `unreachable` says why not."""

    machine: "Machine"
    draft: str | None
    step_cost: list[tuple[int, float]] | None
    link: "Link | None"
    unreachable: str | None
    expected: dict[str, float] | None
    advice: list[str]


def doctor(
    url: Annotated[str | None, typer.Option(envvar="PACELINE_URL", help="The verifier, wss://host:port.")] = None,
    key: options.Key = None,
    insecure: options.Insecure = False,
    authority: options.Authority = None,
    certificate: options.Certificate = None,
    pair: options.Pair = "smollm2",
    draft: options.Draft = None,
    threads: options.Threads = None,
    provider: options.Provider = None,
    rtt: Annotated[float | None, typer.Option(min=0, max=10, help="Without --url: seconds of the round trip.")] = None,
    verify_ms: Annotated[float, typer.Option(min=0.1, help="Without --url: milliseconds of a step there.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for people.")] = False,
) -> None:
    """Measure this device, its draft and its link, say what speed to expect, and what to change.

    Without --url nothing leaves this machine; --rtt and --verify-ms then stand for a link and a verifier.
    """
    from paceline.edge.websocket import Address

    address = Address(url, key, insecure, authority, certificate) if url else None
    found = examine(address, pair, draft, threads, provider, rtt, verify_ms / 1e3)
    typer.echo(json.dumps(asdict(found), ensure_ascii=False) if as_json else as_lines(found))


def examine(
    address: "Address | None",
    pair: str,
    draft: str | None,
    threads: int | None,
    provider: str | None,
    rtt: float | None,
    verify: float,
) -> Findings:
    """Everything, one after the other, so that nothing disturbs what is measured."""
    from paceline.edge.drafts.files import cost_of
    from paceline.edge.runtime import table_file
    from paceline.protocol.errors import LinkError
    from paceline.scripts.doctor.advice import advice
    from paceline.scripts.doctor.expected import learned, speeds
    from paceline.scripts.doctor.link import measure
    from paceline.scripts.doctor.machine import look
    from paceline.scripts.models import cache_folder

    file = _draft_file(pair, draft)
    step_cost = cost_of(file, threads=threads, provider=provider) if file is not None else None
    link, unreachable = None, None
    if address is not None:
        try:
            link = measure(address)
        except LinkError as e:
            unreachable = str(e)
    trip, step = (link.round_trip, link.verify) if link else (rtt, verify)
    expected = None
    if step_cost is not None and trip is not None:
        table = table_file(cache_folder(), file, link.fingerprint) if link else None
        expected = speeds(step_cost, trip, step, learned(table))
    machine = look(cache_folder())
    said = advice(machine, step_cost, link, expected)
    if unreachable is not None:
        said.append(f"The verifier cannot be reached: {unreachable}")
    return Findings(machine, file.name if file else None, step_cost, link, unreachable, expected, said)


def _draft_file(pair: str, draft: str | None) -> Path | None:
    """The draft, if it is here: a doctor fetches nothing."""
    from paceline.scripts.catalogue import PAIRS
    from paceline.scripts.models import cache_folder, pair_is_ready
    from paceline.scripts.pairs import draft_of

    if draft is None and pair in PAIRS and not pair_is_ready(pair, cache_folder()):
        return None
    return draft_of(pair, draft)


def as_lines(found: Findings) -> str:
    """The findings for people."""
    out = [*_machine_lines(found.machine)]
    if found.step_cost is not None:
        steps = ", ".join(f"{1e3 * seconds:.1f} ms for {rows}" for rows, seconds in found.step_cost)
        rows, seconds = max(found.step_cost, key=lambda s: s[0] / s[1])
        out.append(f"draft      {found.draft}: a step takes {steps} rows; at most {rows / seconds:.0f} rows a second")
    if (link := found.link) is not None:
        out.append(
            f"link       {link.url} ({link.model}): round trip {1e3 * link.round_trip:.1f} ms, at least "
            f"{link.up / 1e6:.1f} Mbit/s up and {link.down / 1e6:.1f} down; a step there takes {1e3 * link.verify:.0f} ms"
        )
    if found.expected:
        out.append(
            "expected   " + ", ".join(f"{name} {speed:.1f}" for name, speed in found.expected.items()) + " tok/s"
        )
    out.append("")
    out += [f"- {sentence}" for sentence in found.advice] or ["Nothing needs to change."]
    return "\n".join(out)


def _machine_lines(m: "Machine") -> list[str]:
    gigabytes = [f"{value / 1e9:.1f} GB" if value is not None else "?" for value in (m.memory_free, m.memory)]
    heat: list[Any] = [f"{m.temperature:.0f} degrees"] if m.temperature is not None else []
    heat += [f"{m.clock:.0f} of {m.clock_made_for:.0f} MHz"] if m.clock and m.clock_made_for else []
    heat += [f"governor {m.governor}"] if m.governor else []
    return [
        f"system     {m.system}",
        f"CPU        {m.cpu}, {m.cores} cores; {', '.join(m.features) or 'no instructions that llama.cpp looks for'}",
        f"memory     {gigabytes[0]} free of {gigabytes[1]}; disk {m.disk_free / 1e9:.1f} GB free where models are kept",
        *([f"state      {', '.join(heat)}"] if heat else []),
        "versions   " + ", ".join(f"{name} {number}" for name, number in m.versions.items()),
    ]
