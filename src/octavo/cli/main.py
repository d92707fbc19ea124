"""The `octavo` command. Each sub-command lives in its own file and imports what is slow when it runs.

So `octavo --help` needs neither torch nor a model, and the parent process of `octavo serve` has no torch.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from octavo import __version__
from octavo.cli.bench import app as bench_app
from octavo.cli.chat import chat
from octavo.cli.command import SpreadCommand, command
from octavo.cli.generate import generate
from octavo.cli.pull import pull
from octavo.cli.serve import serve


class _Root(TyperGroup):
    """The group of commands. Its short help page is plain text, which spares the 0.1 s of loading rich."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)
        self.format_epilog(ctx, formatter)


app = typer.Typer(
    name="octavo",
    cls=_Root,
    help="Serve large language models out of block-paged KV memory.",
    epilog="Start with: octavo serve. Then ask: curl http://127.0.0.1:8000/v1/models",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _function in (serve, generate, chat, pull):
    app.command(cls=SpreadCommand)(command(_function))
app.add_typer(bench_app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Entry point of the `octavo` script. Exits with 0, 1 (error), 2 (bad options) or 130 (Ctrl-C)."""
    app(prog_name="octavo", args=sys.argv[1:])
