"""``lineage check``: judge traces by the invariant catalogue."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from lineage.checks import ExitCode, Report, check_path, select
from lineage.checks.catalogue import Invariant, get
from lineage.checks.formats.json import to_dict
from lineage.checks.formats.text import to_text
from lineage.cli.places import LATEST_RUN
from lineage.errors import UserError

_WORST_FIRST = (ExitCode.UNUSABLE, ExitCode.VIOLATIONS, ExitCode.INCOMPLETE, ExitCode.PASS)


def check_command(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(
            help=f"Parquet files, run folders or globs; {LATEST_RUN} when none is given.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Leave out what passed.")] = False,
    chosen: Annotated[
        list[str] | None, typer.Option("--select", help="Codes or families (KEY, LEN001), repeatable.")
    ] = None,
    ignored: Annotated[list[str] | None, typer.Option("--ignore", help="Codes or families to leave out.")] = None,
    required: Annotated[
        list[str] | None, typer.Option("--require", help="A code that must have been examined, else exit 1.")
    ] = None,
    allow_incomplete: Annotated[
        bool, typer.Option("--allow-incomplete", help="An incomplete trace is as good as a pass.")
    ] = False,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit 0 whatever is found; unusable input still exits 2.")
    ] = False,
) -> None:
    """Check traces: exit 0 pass, 1 violations, 2 unusable input, 3 incomplete."""
    invariants = select(chosen or (), ignored or ())
    must = [get(code).code for name in required or () for code in name.split(",") if code.strip()]
    unseen = [code for code in must if code not in {one.code for one in invariants}]
    if unseen:
        raise UserError(f"--require {', '.join(unseen)}: left out by --select or --ignore")
    reports, codes = _reports(traces or [LATEST_RUN], invariants)
    _print(reports, as_json=as_json, quiet=quiet, many=len(traces or ()) > 1)
    codes += [report.exit_code(allow_incomplete, must) for report in reports]
    raise typer.Exit(leave(codes, exit_zero))


def check_trace(trace: Path, *, quiet: bool = False, as_json: bool = False) -> int:
    """Check one trace, print the report (to stderr under ``as_json``) and return the exit code."""
    report = check_path(trace)
    typer.echo(to_text(report, quiet), err=as_json)
    return int(report.exit_code())


def leave(codes: Iterable[ExitCode], exit_zero: bool = False) -> int:
    """One exit code for several traces: 2 beats 1 beats 3 beats 0."""
    found = set(codes)
    worst = next((code for code in _WORST_FIRST if code in found), ExitCode.PASS)
    return int(ExitCode.PASS if exit_zero and worst is not ExitCode.UNUSABLE else worst)


def _reports(paths: Sequence[Path], invariants: Sequence[Invariant]) -> tuple[list[Report], list[ExitCode]]:
    reports: list[Report] = []
    codes: list[ExitCode] = []
    for path in paths:
        try:
            reports.append(check_path(path, invariants))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            codes.append(ExitCode.UNUSABLE)
    return reports, codes


def _print(reports: Sequence[Report], *, as_json: bool, quiet: bool, many: bool) -> None:
    if as_json:
        said = [to_dict(report) for report in reports]
        if said or many:
            typer.echo(json.dumps(said if many else said[0], indent=2))
        return
    for number, report in enumerate(reports):
        typer.echo(("\n" if number else "") + to_text(report, quiet))
