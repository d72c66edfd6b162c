"""One answer as a timeline: what the draft, the link and the verifier did when, for Perfetto and as a picture.

The spans come from what really happened: draft steps from the runner, frames from the link, verifications from the
commits (each tells how long its step took, and it was sent when the step ended).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.protocol.codec import decode_from_cloud, decode_from_edge
from paceline.protocol.messages import Commit, Draft
from paceline.scripts.lab.cases import write_whole
from paceline.scripts.lab.experiment import Events
from paceline.scripts.lab.plot import canvas, save

LANES = ("draft", "uplink", "verify", "downlink", "commits")


@dataclass(frozen=True)
class Span:
    """Seconds from the question. `kind` colours it: hit or miss for a verification."""

    lane: str
    begin: float
    end: float
    name: str
    kind: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def spans(events: Events) -> list[Span]:
    """All spans of an answer, in the order of their beginning."""
    zero = events.asked
    found = [Span("draft", b - zero, e - zero, f"{n} rows", facts={"rows": n}) for b, e, n in events.steps if b >= zero]
    for carried in events.frames:
        if carried.sent < zero:
            continue
        sent, arrived = carried.sent - zero, carried.arrived - zero
        if carried.way == "up":
            message = decode_from_edge(carried.frame)
            nodes = len(message.tokens) if isinstance(message, Draft) else 0
            name = f"{nodes} nodes" if nodes else type(message).__name__.lower()
            found.append(Span("uplink", sent, arrived, name, facts={"bytes": len(carried.frame), "nodes": nodes}))
        else:
            down = decode_from_cloud(carried.frame)
            found.append(
                Span("downlink", sent, arrived, type(down).__name__.lower(), facts={"bytes": len(carried.frame)})
            )
            if isinstance(down, Commit) and down.step:
                found.extend(_of_commit(down, sent, arrived))
    return sorted(found, key=lambda s: (s.begin, LANES.index(s.lane)))


def _of_commit(commit: Commit, sent: float, arrived: float) -> Iterable[Span]:
    kind = "hit" if commit.held else "miss"
    facts = {"held": commit.held, "verified": commit.verified, "accepted": commit.accepted, "stale": commit.stale}
    name = f"{kind}: {commit.accepted} of {commit.verified}"
    yield Span("verify", sent - commit.step, sent, name, kind, facts)
    yield Span("commits", arrived, arrived, f"{len(commit.tokens)} tokens", kind, {"base": commit.base})


def perfetto(all_spans: Iterable[Span], title: str) -> dict[str, Any]:
    """The trace-event format that ui.perfetto.dev and chrome://tracing read; times in microseconds."""
    names = [_named("process_name", 0, title)] + [_named("thread_name", i, lane) for i, lane in enumerate(LANES)]
    return {"displayTimeUnit": "ms", "traceEvents": names + [_event(s) for s in all_spans]}


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 1, "tid": thread, "args": {"name": name}}


def _event(span: Span) -> dict[str, Any]:
    event = {"pid": 1, "tid": LANES.index(span.lane), "name": span.name, "cat": span.kind or span.lane}
    event |= {"ts": round(1e6 * span.begin, 3), "args": span.facts}
    if span.end > span.begin:
        return {**event, "ph": "X", "dur": round(1e6 * (span.end - span.begin), 3)}
    return {**event, "ph": "i", "s": "t"}


def write(all_spans: Iterable[Span], title: str, path: Path) -> None:
    write_whole(path, json.dumps(perfetto(all_spans, title)))


def picture(all_spans: Iterable[Span], title: str, path: Path, *, until: float) -> None:
    """Swim-lanes of the first `until` seconds."""
    figure, axes = canvas(12, 3.6)
    colours = {"hit": "#238b45", "miss": "#cb181d", "draft": "#2b8cbe", "uplink": "#9ecae1", "downlink": "#fdae6b"}
    for span in all_spans:
        if span.begin > until:
            break
        lane = LANES.index(span.lane)
        colour = colours.get(span.kind or span.lane, "#666666")
        if span.end > span.begin and span.lane in ("uplink", "downlink"):
            ends = (lane + 0.35, lane - 0.35) if span.lane == "uplink" else (lane - 0.35, lane + 0.35)
            axes.plot([1000 * span.begin, 1000 * span.end], ends, color=colour, linewidth=1)
        elif span.end > span.begin:
            axes.barh(
                lane,
                1000 * (span.end - span.begin),
                left=1000 * span.begin,
                height=0.7,
                color=colour,
                ec="white",
                lw=0.4,
            )
        else:
            axes.plot(1000 * span.begin, lane, marker="|", markersize=14, color=colour)
            axes.annotate(span.name.split()[0], (1000 * span.begin, lane + 0.3), fontsize=6, ha="center")
    axes.set_yticks(range(len(LANES)), LANES)
    axes.invert_yaxis()
    axes.set_xlim(0, 1000 * until)
    axes.set_xlabel("ms from the question; verifications: green began with nodes held, red with none")
    axes.set_title(title, fontsize=10)
    save(figure, path)
