"""`paceline bench`: what is measured, and by which command."""

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cloud.bench_engine import command as engine_command
from paceline.scripts.command_drafts import drafts
from paceline.scripts.command_order import order
from paceline.scripts.command_overhead import overhead
from paceline.scripts.lab.cli import app
from paceline.scripts.lab.load import command as load

if TYPE_CHECKING:
    from paceline.cloud.engine import Engine


def _resolve(name: str) -> Path:
    from paceline.scripts.models import cache_folder, resolve

    return resolve(name, cache_folder())


def _make(engine: str, model: Path, *, exact: bool, quant: str | None, device: str) -> "Engine":
    from paceline.cloud.serve import Settings, load_engine

    return load_engine(Settings(engine=engine, exact=exact, quant=quant, device=device, slots=64), model)


app.command("drafts")(drafts)
app.command("engine")(engine_command(_resolve, _make))
app.command("load")(load)
app.command("order")(order)
app.command("overhead")(overhead)

__all__ = ["app"]
