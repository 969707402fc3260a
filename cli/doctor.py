"""``lineage doctor``: what is installed, what is missing, and the line that mends it."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import lineage
from lineage.checks.verdict import ExitCode
from lineage.cli.installed import Extra, Package, Plugin, State, base, extras, plugins, torch_build
from lineage.cli.json_text import print_json
from lineage.cli.places import RUNS


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        lineage: version of this package.
        python: version of Python.
        executable: its file.
        platform: the machine.
        torch: version and build; empty without torch.
        base: packages the checker needs.
        extras: optional sets of packages.
        plugins: entry points.
        lineage_disabled: ``LINEAGE_DISABLED`` of the environment; None when it is not set.
        runs: folder of runs, from here.
        runs_writable: a run can be written there.
        sound: the base is.
    """

    lineage: str
    python: str
    executable: str
    platform: str
    torch: str
    base: tuple[Package, ...]
    extras: tuple[Extra, ...]
    plugins: tuple[Plugin, ...]
    lineage_disabled: str | None
    runs: str
    runs_writable: bool
    sound: bool


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is installed, and how to mend what is not.

    Nothing is changed. Packages of the base are imported; those of the extras are looked up only.
    """
    found = diagnose()
    if as_json:
        print_json(found)
    else:
        _print(found)
    raise typer.Exit(ExitCode.PASS if found.sound else ExitCode.VIOLATIONS)


def diagnose() -> Diagnosis:
    """Look at this Python and this folder."""
    packages = base()
    return Diagnosis(
        lineage=lineage.__version__,
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.platform(),
        torch=torch_build(),
        base=packages,
        extras=extras(),
        plugins=plugins(),
        lineage_disabled=os.environ.get("LINEAGE_DISABLED"),
        runs=str(RUNS),
        runs_writable=_writable(RUNS),
        sound=all(one.state is State.OK for one in packages),
    )


def _writable(folder: Path) -> bool:
    place = folder if folder.exists() else folder.absolute().parent
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def _print(found: Diagnosis) -> None:
    lines = [
        ("lineage", found.lineage),
        ("python", f"{found.python} ({found.executable})"),
        ("platform", found.platform),
        ("torch", found.torch or "not installed; the checker does not need it"),
        ("tracing", _say_tracing(found.lineage_disabled)),
        ("runs", f"{found.runs} can be written" if found.runs_writable else f"{found.runs} cannot be written"),
    ]
    lines += [("plugin", f"{one.group}: {one.name} = {one.loads} ({one.distribution})") for one in found.plugins]
    lines += [("base", _say(one)) for one in found.base]
    lines += [("extra", _say_extra(one)) for one in found.extras]
    for name, said in lines:
        typer.echo(f"{name:<10} {said}")
    if found.sound:
        typer.echo("the base is sound")
        return
    wrong = " ".join(f'"{one.name}{one.wanted}"' for one in found.base if one.state is not State.OK)
    again = "--force-reinstall " if any(one.state is State.BROKEN for one in found.base) else ""
    typer.echo(f"the base is not sound; mend it: pip install {again}{wrong}")


def _say_tracing(variable: str | None) -> str:
    if variable is None:
        return "on: LINEAGE_DISABLED is not set"
    return f"LINEAGE_DISABLED={variable}: any value but 0 switches it off"


def _say(one: Package) -> str:
    if one.state is State.OK:
        return f"{one.name} {one.installed}"
    wanted = f", wanted {one.wanted}" if one.wanted else ""
    return f"{one.name} {one.installed or 'is'} {one.state.upper()}{wanted}{': ' + one.why if one.why else ''}"


def _say_extra(one: Extra) -> str:
    if not one.wanting:
        return f"{one.name}: installed"
    return f"{one.name}: {', '.join(_lack(package) for package in one.wanting)}; {one.mend}"


def _lack(one: Package) -> str:
    if one.state is State.MISSING:
        return f"no {one.name}"
    return f"{one.name} {one.installed} is not {one.wanted}"
