"""``lineage check``: judge traces by the invariant catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lineage.checks.formats import FORMATS
from lineage.checks.policy import Match
from lineage.cli.completion import complete_choice, complete_code
from lineage.cli.places import LATEST_RUN


def check_command(
    traces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TRACE",
            help=f"Parquet files, run folders, globs or URLs; {LATEST_RUN} when none is given.",
            show_default=False,
        ),
    ] = None,
    chosen: Annotated[
        list[str] | None,
        typer.Option(
            "--select",
            metavar="CODE",
            help="Codes or families (KEY, LEN001) to run.",
            autocompletion=complete_choice,
            show_default=False,
        ),
    ] = None,
    ignored: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="CODE",
            help="Codes or families to leave out.",
            autocompletion=complete_choice,
            show_default=False,
        ),
    ] = None,
    required: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            metavar="CODE[=N]",
            help="A code that must examine N facts (1), else exit 1.",
            autocompletion=complete_code,
            show_default=False,
        ),
    ] = None,
    max_violations: Annotated[
        list[str] | None,
        typer.Option("--max-violations", metavar="CODE=N", help="Let so many violations through.", show_default=False),
    ] = None,
    max_warnings: Annotated[
        int | None, typer.Option("--max-warnings", min=0, help="Exit 1 on more warnings than this.")
    ] = None,
    allow_incomplete: Annotated[
        bool | None,
        typer.Option(
            "--allow-incomplete/--no-allow-incomplete",
            help="An incomplete trace is as good as a pass.",
            show_default=False,
        ),
    ] = None,
    exit_zero: Annotated[
        bool | None,
        typer.Option(
            "--exit-zero/--no-exit-zero",
            help="Exit 0 whatever is found; unusable input still exits 2.",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="FILE", help="File of known violations: only new ones fail.")
    ] = None,
    no_baseline: Annotated[bool, typer.Option("--no-baseline", help="Leave out the baseline of the settings.")] = False,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write what is found to the baseline file, and accept it.")
    ] = False,
    baseline_match: Annotated[
        Match | None,
        typer.Option(
            "--baseline-match",
            help="For --update-baseline: know a violation by its key, or count them by site.",
            show_default=False,
        ),
    ] = None,
    checks: Annotated[
        list[str] | None,
        typer.Option("--checks", metavar="DIR", help="Folder of your own .sql invariants.", show_default=False),
    ] = None,
    forms: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="|".join(FORMATS), help="Format of the report: text.", show_default=False),
    ] = None,
    files: Annotated[
        list[str] | None,
        typer.Option(
            "--output",
            "-o",
            metavar="[FORMAT=]FILE",
            help="Write the report there: FORMAT=FILE beside what is printed, FILE instead of it; - prints.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="In text, leave out what passed.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="Settings file, instead of the nearest pyproject.toml or lineage.toml."
        ),
    ] = None,
) -> None:
    """Check traces: which invariant broke, first where, for which trajectories.

    --select, --ignore, --require, --max-violations, --checks, --format and --output may be repeated; the codes also
    stand between commas. Settings come from [tool.lineage] in the nearest pyproject.toml, or from lineage.toml; the
    command line wins.
    """
    from lineage.cli import gate  # what judges is loaded when it is needed

    asked = gate.Asked(
        settings={
            "select": chosen,
            "ignore": ignored,
            "require": required,
            "max-violations": max_violations,
            "max-warnings": max_warnings,
            "allow-incomplete": allow_incomplete,
            "exit-zero": exit_zero,
            "baseline": baseline,
            "baseline-match": baseline_match,
            "checks": checks,
            "format": ["json"] if as_json else forms,
            "output": files,
        },
        config=config,
        no_baseline=no_baseline,
        update_baseline=update_baseline,
        quiet=quiet,
    )
    raise typer.Exit(gate.check(traces or [str(LATEST_RUN)], asked))
