"""What a build or an evaluation has to say: sizes, rounding error of each tensor, a picture of agreement against time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from paceline.kernels.gguf_file import GgufFile

from .build import kept_rows
from .target import Target, neighbours


def rounding_errors(draft: Path, target: Target, layers: Sequence[int], rows: torch.Tensor) -> dict[str, float]:
    """Relative squared error of each matrix of a draft against the target's; matrices of other shapes are left out.

    A draft rounded with correction is not meant to be near its target weight by weight: the figure says how far it went.
    """
    file = GgufFile(draft)
    matrices = [name for name, info in file.tensors.items() if len(info.shape) == 2]
    found = {name: _relative(file, name, _counterpart(name, target, layers, rows)) for name in matrices}
    return {name: error for name, error in found.items() if error is not None}


def _relative(file: GgufFile, name: str, w: torch.Tensor, piece: int = 4096) -> float | None:
    """Squared error over squared size, a few rows at a time; None where the shapes differ.

    w belongs to this call alone, so that two of a target's tables are never held at once.
    """
    if w.shape != file.info(name).shape:
        return None
    error = size = 0.0
    for at in range(0, len(w), piece):
        part = w[at : at + piece]
        error += float((torch.from_numpy(file.array(name, at, at + piece)) - part).pow(2).sum())
        size += float(part.pow(2).sum())
    return error / size if size else 0.0


def _counterpart(name: str, target: Target, layers: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    if not name.startswith("blk."):
        return kept_rows(target.tensor(name), rows)
    _, number, rest = name.split(".", 2)
    w = target.tensor(f"blk.{layers[int(number)]}.{rest}")
    turned = target.architecture == "llama" and not target.shape.interleaved and rest.startswith(("attn_q.", "attn_k."))
    return neighbours(w, target.shape.head_dim) if turned else w


def picture(log: Sequence[tuple[float, int, float, float]], title: str) -> str:
    """Agreement against training time as an SVG: top-1 and top-4 on held-out text."""
    width, height, pad = 640, 360, 48
    if not log:
        return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"/>'
    span = max(entry[0] for entry in log) or 1.0
    low = min(0.9, min(entry[2] for entry in log)) - 0.02

    def place(elapsed: float, share: float) -> str:
        x = pad + (width - 2 * pad) * elapsed / span
        return f"{x:.1f},{height - pad - (height - 2 * pad) * (share - low) / (1 - low):.1f}"

    lines = []
    for column, colour, label in ((2, "#1f6feb", "top-1"), (3, "#8b949e", "top-4")):
        points = " ".join(place(entry[0], entry[column]) for entry in log)
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>')
        x, y = place(log[-1][0], log[-1][column]).split(",")
        lines.append(
            f'<text x="{x}" y="{float(y) - 6:.1f}" text-anchor="end" fill="{colour}">{label} {log[-1][column]:.1%}</text>'
        )
    for share in (low, (1 + low) / 2, 1.0):
        y = place(0, share).split(",")[1]
        lines.append(f'<text x="{pad - 6}" y="{y}" text-anchor="end" fill="#57606a">{share:.0%}</text>')
    lines.append(
        f'<text x="{width - pad}" y="{height - pad + 20}" text-anchor="end" fill="#57606a">{span / 60:.0f} min</text>'
    )
    lines.append(f'<text x="{pad}" y="{pad - 18}" fill="#24292f">{title}</text>')
    size, style = f'width="{width}" height="{height}"', 'font-family="sans-serif" font-size="12"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *lines, "</svg>", ""])


def agreement_picture(result: Mapping[str, Any], title: str) -> str:
    """An evaluation as an SVG: top-1 and top-4 agreement of each category, and their mean, along the target's greedy text."""
    rows = [("mean", result["mean"]), *result["categories"].items()]
    width, line, left = 640, 22, 150
    height, span = line * len(rows) + 64, width - left - 60
    parts = [f'<text x="12" y="24" fill="#24292f">{escape(title)}</text>']
    for i, (name, entry) in enumerate(rows):
        y = 40 + line * i
        parts.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end" fill="#57606a">{escape(name)}</text>')
        for share, colour in ((entry["top4"], "#c8d1da"), (entry["top1"], "#1f6feb")):
            parts.append(f'<rect x="{left}" y="{y}" width="{span * share:.1f}" height="{line - 6}" fill="{colour}"/>')
        parts.append(
            f'<text x="{width - 8}" y="{y + 13}" text-anchor="end" fill="#24292f">{entry["top1"]:.0%} {entry["top4"]:.0%}</text>'
        )
    parts.append(
        f'<text x="{left}" y="{height - 8}" fill="#57606a">dark: first choice agrees; light: among four</text>'
    )
    size, style = f'width="{width}" height="{height}"', 'font-family="sans-serif" font-size="12"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *parts, "</svg>", ""])
