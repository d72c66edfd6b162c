"""The lab's results as tables for a person."""

import math
from collections.abc import Sequence
from typing import Any

from paceline.scripts.lab.report import Line, by_category
from paceline.scripts.lab.sweep import Entry
from rich.console import Console
from rich.table import Table


def show(about: dict[str, Any], table: Sequence[Line], entries: Sequence[Entry]) -> None:
    console = Console(width=None if Console().is_terminal else 170)
    console.print(
        f"{about['pair']} ({about['draft']}), edge {about['edge']}, verification {1000 * about['verify_floor']:g} ms,"
        f" {len(about['cases'])} prompts, temperature {about['temperature']:g}, {about['clock']} clock",
        highlight=False,
    )
    console.print(_speeds(table))
    for rtt in sorted({e.round_trip for e in entries}):
        cells = by_category(entries, rtt)
        if len(cells) > 1 and rtt == _middle({e.round_trip for e in entries}):
            console.print(_categories(cells, rtt))
    if any(line.same is False for line in table):
        console.print("[bold red]NOT every text was the target's own[/]")


def _speeds(table: Sequence[Line]) -> Table:
    heads = "policy|RTT ms|tok/s|quartiles|x ar|ms/tok|first ms|hit|match|accepted|tok/fwd|rows/tok|sent/tok|stale/tok"
    out = Table(*f"{heads}|B up/tok|B down/tok|largest|hidden|same".split("|"), box=None)
    for n in sorted(table, key=lambda n: (n.round_trip, n.policy)):
        out.add_row(
            n.label,
            f"{1000 * n.round_trip:g}",
            f"{n.speed:.1f}",
            f"{n.low:.0f}-{n.high:.0f}",
            _number(n.ratio, 2),
            f"{n.ms_a_token:.1f}",
            f"{1000 * n.first_token:.0f}",
            f"{n.hit_rate:.2f}",
            _number(n.match_rate, 3),
            f"{n.accepted:.2f}",
            f"{n.tokens_a_forward:.2f}",
            f"{n.rows_a_token:.1f}",
            f"{n.drafted_a_token:.1f}",
            f"{n.stale_a_token:.1f}",
            f"{n.up:.0f}",
            f"{n.down:.0f}",
            f"{n.largest}",
            _number(n.hidden, 2),
            {True: "yes", False: "NO", None: "-"}[n.same],
        )
    return out


def _categories(cells: dict[str, dict[str, float]], rtt: float) -> Table:
    policies = list(dict.fromkeys(p for row in cells.values() for p in row))
    out = Table("category", *policies, title=f"tokens/s against ar, at {1000 * rtt:g} ms", box=None)
    for category, row in sorted(cells.items()):
        out.add_row(category, *(f"{row[p]:.2f}" if p in row else "-" for p in policies))
    return out


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _middle(values: set[float]) -> float:
    return sorted(values)[len(values) // 2]
