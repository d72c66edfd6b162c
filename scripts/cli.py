"""The `paceline` command.

Knows the names of the commands and how an error reaches a person. Each command imports its side only when it is
called, so that a device needs no torch and a verifier no llama.cpp.
"""

from typing import Annotated, Any

import typer
from paceline.protocol.errors import PacelineError
from paceline.quant.cli import app as draft_app
from paceline.scripts.command_bench import app as bench_app
from paceline.scripts.command_chat import chat
from paceline.scripts.command_cloud import cloud
from paceline.scripts.command_demo import demo
from paceline.scripts.command_doctor import doctor
from paceline.scripts.command_edge import edge
from paceline.scripts.lab.command_plan import plan
from paceline.scripts.version import installed
from typer.core import TyperGroup


class _Commands(TyperGroup):
    """A command group in which an error of Paceline ends as one line on standard error and exit code 1."""

    def invoke(self, ctx: Any) -> Any:  # the Context of click, or of typer's own copy of it
        try:
            return super().invoke(ctx)
        except PacelineError as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"paceline: {error}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    name="paceline",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=(
        "Speculative decoding split between a device and a cloud.\n\n"
        "To try all of it on this machine: paceline chat --local. Apart: paceline cloud where the target runs, then "
        "paceline chat or paceline edge, with --url, on the device; paceline doctor says what to expect of it."
    ),
)
models_app = typer.Typer(no_args_is_help=True, help="Fetch models, and see which there are.")
app.add_typer(models_app, name="models")


def _print_version(wanted: bool) -> None:
    if wanted:
        found = installed()
        typer.echo(f"paceline {found}" if found else "paceline, from a checkout that is not installed")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Options of every command; `_Commands` and `_print_version` act on them."""


@app.command("version")
def show_version() -> None:
    """Show the version."""
    _print_version(True)


@models_app.command("fetch")
def fetch_models(
    names: Annotated[list[str], typer.Argument(help="smollm2, gemma3-270m, hf:org/name or hf:org/name:file.gguf")],
) -> None:
    """Fetch models into the cache, checking those that are there; prints the path of each."""
    from paceline.scripts.catalogue import MODELS
    from paceline.scripts.models import cache_folder, fetch, resolve
    from paceline.scripts.progress import progress_bar

    for name in names:
        with progress_bar(name) as report:
            cache = cache_folder()
            path = fetch(name, cache, report, verify=True) if name in MODELS else resolve(name, cache, report)
        typer.echo(path)


@models_app.command("list")
def list_models() -> None:
    """List the models that have a short name."""
    from paceline.scripts.models import cache_folder, rows
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table("model", "what it is", "licence", "size", "fetched", box=None)
    for row in rows(cache_folder()):
        table.add_row(row.alias, row.description, row.licence, decimal(row.size), "yes" if row.cached else "no")
    console = Console()
    console.print(table)
    console.print(f"\nFetched to {cache_folder()}", highlight=False, soft_wrap=True)


app.add_typer(draft_app, name="draft")
app.add_typer(bench_app, name="bench")
app.command("chat")(chat)
app.command("edge")(edge)
app.command("cloud")(cloud)
app.command("doctor")(doctor)
app.command("demo")(demo)
app.command("plan")(plan)


def main() -> None:
    """The entry point of the `paceline` command."""
    app()


if __name__ == "__main__":
    main()
