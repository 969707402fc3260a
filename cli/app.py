"""The Typer application, and the edge where errors become one line and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import lineage
from lineage.checks.verdict import ExitCode
from lineage.cli.check import check_command
from lineage.cli.compact import compact_command
from lineage.cli.explain import explain_command
from lineage.cli.info import info_command
from lineage.cli.run import run_command
from lineage.cli.show import show_command
from lineage.cli.sql import sql_command
from lineage.errors import LineageError

app = typer.Typer(
    name="lineage",
    help="Flight recorder and inspector for RL post-training steps.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run_command)
app.command("check")(check_command)
app.command("sql")(sql_command)
app.command("show")(show_command)
app.command("info")(info_command)
app.command("explain")(explain_command)
app.command("compact")(compact_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lineage {lineage.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Flight recorder and inspector for RL post-training steps."""


def main() -> None:
    """Run the command line; an error of ours is one line on stderr and exit code 2, never a traceback."""
    try:
        app()
    except LineageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(ExitCode.UNUSABLE)
    except BrokenPipeError:
        # The reader (head, less) went away: nothing more to say, and nothing went wrong here.
        sys.stderr.close()
        sys.exit(ExitCode.PASS)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
