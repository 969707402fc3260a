"""``lineage check``: judge traces by the invariant catalogue."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lineage.checks.baseline import Baseline, Match
from lineage.checks.formats import FORMATS
from lineage.checks.formats.text import render
from lineage.checks.gate import Gate
from lineage.checks.policy import worst
from lineage.checks.report import Outcome, Refused, Report
from lineage.checks.settings import Settings, SettingsError, counts, find, load, names
from lineage.cli.outputs import outputs, write
from lineage.cli.places import LATEST_RUN
from lineage.errors import UserError


def check_command(
    traces: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Parquet files, run folders, globs or URLs; {LATEST_RUN} when none is given.", show_default=False
        ),
    ] = None,
    chosen: Annotated[
        list[str] | None, typer.Option("--select", help="Codes or families (KEY, LEN001) to run.", show_default=False)
    ] = None,
    ignored: Annotated[
        list[str] | None, typer.Option("--ignore", help="Codes or families to leave out.", show_default=False)
    ] = None,
    required: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            metavar="CODE[=N]",
            help="A code that must examine N facts (1), else exit 1.",
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
        bool | None, typer.Option("--allow-incomplete", help="An incomplete trace is as good as a pass.")
    ] = None,
    exit_zero: Annotated[
        bool | None, typer.Option("--exit-zero", help="Exit 0 whatever is found; unusable input still exits 2.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", help="File of known violations: only new ones fail.")
    ] = None,
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
        list[Path] | None, typer.Option("--checks", help="Folder of your own .sql invariants.", show_default=False)
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
            help="Write the report there instead of printing it.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="In text, leave out what passed.")] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Settings file, instead of the nearest pyproject.toml or lineage.toml."),
    ] = None,
) -> None:
    """Check traces: which invariant broke, first where, for which trajectories.

    --select, --ignore, --require, --max-violations, --checks, --format and --output may be repeated; the codes also
    stand between commas. Settings come from [tool.lineage] in the nearest pyproject.toml, or from lineage.toml; the
    command line wins.
    """
    settings = _merged(
        _settings(config),
        {
            "select": names(chosen) if chosen else None,
            "ignore": names(ignored) if ignored else None,
            "baseline": baseline,
            "baseline_match": baseline_match,
            "checks": tuple(checks) if checks else None,
            "format": ("json",) if as_json else names(forms) if forms else None,
            "output": tuple(files) if files else None if not (forms or as_json) else (),
        },
        {
            "require": _counts("--require", required, default=1),
            "max_violations": _counts("--max-violations", max_violations),
            "max_warnings": max_warnings,
            "allow_incomplete": allow_incomplete,
            "exit_zero": exit_zero,
        },
    )
    if update_baseline and settings.baseline is None:
        raise UserError("--update-baseline: say which file, as in --baseline lineage-baseline.json")
    where = outputs(settings.format, settings.output, quiet)
    paths = traces or [str(LATEST_RUN)]
    outcomes = _update(settings, paths) if update_baseline else Gate.of(settings).judge_all(paths)
    for refused in outcomes:
        if isinstance(refused, Refused):
            print(f"error: {refused.message}", file=sys.stderr)
    write(outcomes, where)
    raise typer.Exit(int(worst([one.exit_code for one in outcomes])))


def check_trace(trace: Path, *, quiet: bool = False, as_json: bool = False) -> int:
    """Check one trace, print the report (to stderr under ``as_json``) and return the exit code."""
    outcomes = Gate.of(Settings()).judge_all([trace])
    typer.echo(render(outcomes, quiet), err=as_json)
    return int(worst([one.exit_code for one in outcomes]))


def _settings(config: Path | None) -> Settings:
    if config is not None and not config.is_file():
        raise SettingsError(f"{config}: no such settings file")
    file = config or find(Path.cwd())
    return Settings() if file is None else load(file)


def _merged(settings: Settings, said: dict[str, Any], policy: dict[str, Any]) -> Settings:
    """The settings with what the command line says in place of what the file says."""
    kept = {name: value for name, value in said.items() if value is not None}
    changed = replace(settings.policy, **{name: value for name, value in policy.items() if value is not None})
    return replace(settings, policy=changed, **kept)


def _counts(option: str, said: list[str] | None, default: int | None = None) -> dict[str, int] | None:
    try:
        return counts(said, default) if said else None
    except ValueError as error:
        raise UserError(f"{option} {error}") from error


def _update(settings: Settings, paths: list[str]) -> list[Outcome]:
    """Judge, write what is found to the baseline, and judge by it; untouched when a trace could not be read."""
    assert settings.baseline is not None
    plain = Gate.of(replace(settings, baseline=None))
    outcomes = plain.judge_all(paths)
    if any(isinstance(one, Refused) for one in outcomes):
        return outcomes
    reports = [one for one in outcomes if isinstance(one, Report)]
    found = Baseline.of(reports, settings.baseline_match)
    if settings.baseline.exists():
        found = found.keeping(Baseline.load(settings.baseline), [one.code for one in plain.invariants])
    found.save(settings.baseline)
    count = sum(known.count for known in found.known.values())
    print(f"baseline {settings.baseline}: {count:,} violation{'' if count == 1 else 's'} accepted", file=sys.stderr)
    gate = replace(plain, baseline=found)
    return [gate.apply(report) for report in reports]
