"""A progress bar for a download, on standard error, and only where somebody looks at it."""

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.scripts.downloads import Report
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def progress_bar(name: str) -> Iterator[Report]:
    """Yield a `Report` that draws the bar. It appears with the first bytes, so a cached model shows none."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)
