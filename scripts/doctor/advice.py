"""What to change, in plain sentences, from what was found. A pure function: each sentence has one cause, and says what to do."""

from collections.abc import Iterator, Mapping

from paceline.scripts.doctor.link import Link
from paceline.scripts.doctor.machine import Machine

MEGABYTE = 1_000_000
NEEDED = 300 * MEGABYTE  # of memory, for an agent with the default draft that is at work
ROOM = 250 * MEGABYTE  # of disk, for the default model and its draft
HOT = 80.0  # degrees at which a Raspberry Pi begins to slow down
UP = 150 * 8  # bits up that a token may take
PAYS = 1.05  # times the speed of plain decoding from which drafting is worth its energy
JITTER = 0.25  # of the round trip


def advice(
    machine: Machine, step_cost: list[tuple[int, float]] | None, link: Link | None, speeds: Mapping[str, float] | None
) -> list[str]:
    """Nothing, where nothing needs to change."""
    return [*_on_machine(machine), *_on_draft(machine, step_cost), *_on_link(link, speeds), *_on_speed(speeds)]


def _on_machine(m: Machine) -> Iterator[str]:
    if unused := sorted(set(m.features) - set(m.compiled)) if m.compiled else []:
        yield (
            f"llama.cpp was built without {', '.join(unused)}, which this CPU has. Build it here: "
            "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"
        )
    if not m.compiled:
        yield "llama.cpp is not installed, so no GGUF draft runs here: pip install 'paceline[edge]'"
    if m.memory_free is not None and m.memory_free < NEEDED:
        yield (
            f"Only {m.memory_free // MEGABYTE} MB of memory are free; an agent with the default draft takes up to "
            f"{NEEDED // MEGABYTE}. Close something, or use --policy ar, which needs no draft."
        )
    if m.disk_free < ROOM:
        yield (
            f"Only {m.disk_free // MEGABYTE} MB are free where models are kept; "
            f"{ROOM // MEGABYTE} are needed. Make room, or name another place in PACELINE_CACHE."
        )
    if "32 bit" in m.versions.get("python", ""):
        yield "This Python has 32 bits; llama.cpp is several times faster under a 64-bit system."


def _on_draft(m: Machine, step_cost: list[tuple[int, float]] | None) -> Iterator[str]:
    if step_cost is None:
        yield "No draft is here yet. Fetch it: paceline models fetch smollm2"
    if m.governor == "powersave":
        yield "The CPU is kept slow (governor powersave); performance drafts faster, schedutil when it matters."
    if m.clock_limit and m.clock_made_for and m.clock_limit < 0.95 * m.clock_made_for:
        yield (
            f"The CPU may run at {m.clock_limit:.0f} MHz only, and was made for {m.clock_made_for:.0f}: "
            "look at its power supply, its cooling, and its settings."
        )
    if m.temperature is not None and m.temperature >= HOT:
        yield (
            f"It is {m.temperature:.0f} degrees warm and will slow down: cool it. "
            "The planner follows a draft that becomes slower; the text stays the same."
        )


def _on_link(link: Link | None, speeds: Mapping[str, float] | None) -> Iterator[str]:
    if link is None:
        return
    if link.jitter > JITTER * link.round_trip and link.jitter > 0.005:
        yield (
            f"The round trip wavers by {1e3 * link.jitter:.0f} ms around {1e3 * link.round_trip:.0f}; "
            "a cable instead of wireless, or a nearer access point, brings the most."
        )
    most = max((speeds or {}).values(), default=0.0)
    if link.up < 2 * UP * most:
        yield f"{link.up / 1e3:.0f} kbit/s up are too little for drafts at {most:.0f} tokens a second; --policy ar sends none."


def _on_speed(speeds: Mapping[str, float] | None) -> Iterator[str]:
    if not speeds:
        yield "Name a verifier with --url, or say what to expect of one with --rtt and --verify-ms, to see speeds."
        return
    plain, best = speeds["ar"], max(speeds, key=lambda name: speeds[name])
    if speeds["stream"] < PAYS * plain:
        yield (
            "Drafting here gains less than it costs: the agent will mostly leave it, and you see the verifier's own speed. "
            "--power low saves the energy as well; a faster draft or a slower verifier would change that. "
            "A verifier that runs with --backup ngram is faster without any draft."
        )
    elif best not in ("stream", "ar"):
        yield f"--policy {best} would be faster here than stream, by {100 * (speeds[best] / speeds['stream'] - 1):.0f} %."
