"""What ``lineage check`` does: the settings file and the command line as one, the traces judged, the report written."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from lineage.checks.baseline import Baseline
from lineage.checks.formats import split_output
from lineage.checks.formats.text import render
from lineage.checks.gate import Gate
from lineage.checks.policy import worst
from lineage.checks.report import Outcome, Refused, Report
from lineage.checks.settings import SETTINGS, Settings, SettingsError, find, load
from lineage.cli.outputs import outputs, write
from lineage.errors import UserError


@dataclass(frozen=True)
class Asked:
    """What the command line asks for.

    Attributes:
        settings: by the name of the setting; None and an empty list leave what the settings file says.
        config: the settings file; None looks for one.
        no_baseline: leave out the baseline the settings file names.
        update_baseline: write what is found to the baseline, and accept it.
        quiet: leave out what passed.
    """

    settings: Mapping[str, Any]
    config: Path | None
    no_baseline: bool
    update_baseline: bool
    quiet: bool


def check(traces: Sequence[str], asked: Asked) -> int:
    """Judge traces, write the report where it is wanted and return the exit code.

    Raises:
        UserError: a setting, a file or an invariant that cannot be used.
    """
    found = project_settings(asked.config)
    settings = merged(replace(found, baseline=None) if asked.no_baseline else found, asked.settings)
    if asked.update_baseline and settings.baseline is None:
        raise UserError("--update-baseline: say which file, as in --baseline lineage-baseline.json")
    where = outputs(settings.format, settings.output, asked.quiet)
    outcomes = _update(settings, traces) if asked.update_baseline else Gate.of(settings).judge_all(traces)
    for refused in outcomes:
        if isinstance(refused, Refused):
            print(f"error: {refused.message}", file=sys.stderr)
    write(outcomes, where)
    return int(worst([one.exit_code for one in outcomes]))


def project_gate() -> Gate:
    """The gate that the settings of the current folder describe.

    Raises:
        UserError: a setting, a file or an invariant that cannot be used.
    """
    return Gate.of(project_settings())


def check_trace(trace: str | Path, gate: Gate, *, quiet: bool = False, as_json: bool = False) -> int:
    """Check one trace, print the report (to stderr under ``as_json``) and return the exit code."""
    outcomes = gate.judge_all([trace])
    typer.echo(render(outcomes, quiet), err=as_json)
    return int(worst([one.exit_code for one in outcomes]))


def merged(settings: Settings, said: Mapping[str, Any]) -> Settings:
    """The settings with what the command line says in place of what the file says.

    Raises:
        SettingsError: an option that cannot be meant.
    """
    given = {name: value for name, value in said.items() if value is not None and value != []}
    if "format" in given and "output" not in given:
        # a plain file was meant for the format the settings name; copies that name their own stay
        settings = replace(settings, output=tuple(one for one in settings.output if split_output(one)[0]))
    for name, value in given.items():
        try:
            settings = SETTINGS[name](settings, value, Path())
        except ValueError as error:
            raise SettingsError(f"--{name} {error}") from error
    return settings


def project_settings(config: Path | None = None) -> Settings:
    """The settings of this file, or of the one that holds for the current folder.

    Raises:
        SettingsError: there is no such file, or it cannot be meant.
    """
    if config is not None and not config.is_file():
        raise SettingsError(f"{config}: no such settings file")
    file = config or find(Path.cwd())
    return Settings() if file is None else load(file)


def _update(settings: Settings, traces: Sequence[str]) -> list[Outcome]:
    """Judge, write what is found to the baseline, and judge by it; untouched when a trace could not be read."""
    assert settings.baseline is not None
    plain = Gate.of(replace(settings, baseline=None))
    outcomes = plain.judge_all(traces)
    if any(isinstance(one, Refused) for one in outcomes):
        return outcomes
    reports = [one for one in outcomes if isinstance(one, Report)]
    found = Baseline.of(reports, settings.baseline_match)
    if settings.baseline.exists():
        found = found.keeping(Baseline.load(settings.baseline), reports)
    found.save(settings.baseline)
    count = sum(known.count for known in found.known.values())
    print(f"baseline {settings.baseline}: {count:,} violation{'' if count == 1 else 's'} accepted", file=sys.stderr)
    gate = replace(plain, baseline=found)
    return gate.noted([gate.apply(report) for report in reports])
