"""The Typer application with its commands, and the edge where errors become one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import lineage
from lineage.checks.verdict import ExitCode
from lineage.cli.check import check_command
from lineage.cli.compact import compact_command
from lineage.cli.diff import diff_command
from lineage.cli.doctor import doctor_command
from lineage.cli.exit_codes import ANSWERS, COMPARES, DIAGNOSES, JUDGES, PROVES, epilog
from lineage.cli.explain import explain_command
from lineage.cli.faults import faults_command
from lineage.cli.info import info_command
from lineage.cli.init_ci import init_ci_command
from lineage.cli.run import run_command
from lineage.cli.selftest import selftest_command
from lineage.cli.show import show_command
from lineage.cli.sql import sql_command
from lineage.errors import LineageError

# Typer's base of all its usage errors: its module, and whether click stands behind it, change from version to version.
_USAGE_ERROR: type[Any] = typer.BadParameter.__bases__[0]


# What a shell says of a program that SIGPIPE ended: nobody interrupted it, and it is no verdict.
_READER_LEFT = 141
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class _ReaderLeft(Exception):
    """The reader of a pipe (head, less) went away before all was said."""


class _Commands(TyperGroup):
    """The commands; what Typer would make an exit code of its own is handed to the edge below."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderLeft from error


app = typer.Typer(
    name="lineage",
    cls=_Commands,
    help="Flight recorder and inspector for RL post-training steps.",
    epilog=epilog(JUDGES),
    context_settings={"max_content_width": 110},
    rich_markup_mode=None,  # plain help: the same in a pipe, and brackets are only brackets
    pretty_exceptions_enable=False,
)
app.command("run", epilog=epilog(JUDGES))(run_command)
app.command("check", epilog=epilog(JUDGES))(check_command)
app.command("diff", epilog=epilog(COMPARES))(diff_command)
app.command("sql", epilog=epilog(ANSWERS))(sql_command)
app.command("show", epilog=epilog(ANSWERS))(show_command)
app.command("info", epilog=epilog(ANSWERS))(info_command)
app.command("explain", epilog=epilog(ANSWERS))(explain_command)
app.command("compact", epilog=epilog(ANSWERS))(compact_command)
app.command("faults", epilog=epilog(ANSWERS))(faults_command)
app.command("selftest", epilog=epilog(PROVES))(selftest_command)
app.command("doctor", epilog=epilog(DIAGNOSES))(doctor_command)
app.command("init-ci", epilog=epilog(ANSWERS))(init_ci_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lineage {lineage.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Flight recorder and inspector for RL post-training steps."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.UNUSABLE)


def main() -> None:
    """Run the command line; an error of ours or a wrong use is one line on stderr and exit code 2, no traceback.

    A bug of ours exits with 2 too, with its traceback: 1 means violations.
    """
    try:
        code: int = app(prog_name="lineage", standalone_mode=False) or ExitCode.PASS
    except LineageError as error:
        code = _fail(str(error))
    except _USAGE_ERROR as error:
        code = _fail(_usage(error))
    except _ReaderLeft:
        code = _READER_LEFT
    except (KeyboardInterrupt, typer.Abort):
        code = ExitCode.INTERRUPTED
    except ImportError as error:
        code = _fail(f"{error}; what is missing or broken: lineage doctor")
    except OSError as error:
        code = _bug() if error.errno not in _FULL else _fail(f"cannot write: {error.strerror}")
    except Exception as error:
        # What DuckDB makes of a Ctrl-C inside a statement; anything else nobody foresaw, and it is no verdict.
        code = ExitCode.INTERRUPTED if str(error) == "Query interrupted" else _bug()
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            code = _fail(f"cannot write to standard output: {error.strerror}")
        # Nobody reads any more, or nothing more can be taken: Python's own flush at exit would complain of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _fail(said: str) -> ExitCode:
    print(f"error: {said}", file=sys.stderr)
    return ExitCode.UNUSABLE


def _bug() -> ExitCode:
    traceback.print_exc()
    return _fail("this is a bug of lineage, not of your trace: please report the lines above; nothing was judged")


def _usage(error: Any) -> str:
    """A usage error of Typer's in one line, with the command whose help says more."""
    said = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    command = error.ctx.command_path if error.ctx is not None else "lineage"
    return f"{said[:1].lower()}{said[1:]} (try: {command} --help)"
