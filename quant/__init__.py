"""Making 4-bit drafts: prune, trim the vocabulary, quantise, distil, export, evaluate."""

from pathlib import Path


def drafts_folder() -> Path:
    """Where the drafts that ship with the package lie, a folder each."""
    return Path(__file__).parent / "drafts"
