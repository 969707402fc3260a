"""``lineage diff``: whether two traces say the same, and where the content parts first."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from lineage.checks.verdict import ExitCode
from lineage.cli.json_text import print_json
from lineage.errors import UserError

if TYPE_CHECKING:
    from lineage.traces.diff import Diff

_RANGE = re.compile(r"(\d+)(?:(?:\.\.|-)(\d+))?")


class StepsError(UserError):
    """``--steps`` with something that is no step and no range of them."""


def diff_command(
    a: Annotated[str, typer.Argument(help="What is expected: Parquet file, run folder, glob or URL.", metavar="A")],
    b: Annotated[str, typer.Argument(help="What is there, likewise.", metavar="B")],
    ignored: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="ASPECTS",
            help="Aspects that are listed and do not count, as layout,dtype; or all of content, form or place.",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Let process, rank, topology, counters and rows count too.")
    ] = False,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="FIRST..LAST", help="Compare these steps only.", show_default=False)
    ] = None,
    rtol: Annotated[
        float, typer.Option("--rtol", min=0, help="Floats that differ by less of their greatest value are `rounding`.")
    ] = 1e-5,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Examples of each aspect.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="The headline only.")] = False,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads to read with.")] = 2,
) -> None:
    """Compare two traces fact by fact: by step, stage, op, field and key, wherever and in whichever rows they lie."""
    from lineage.traces.diff import diff

    found = diff(
        a, b, ignore=ignored or (), strict=strict, steps=_steps(steps), rtol=rtol, limit=limit, threads=threads
    )
    code = _code(found)
    if as_json:
        print_json({"equal": found.equal, "exit_code": int(code), **asdict(found)})
    else:
        from lineage.cli.diff_text import to_text

        typer.echo(to_text(found, quiet))
    raise typer.Exit(code)


def _code(found: Diff) -> ExitCode:
    if not found.equal:
        return ExitCode.VIOLATIONS
    return ExitCode.PASS if found.complete else ExitCode.INCOMPLETE


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = _RANGE.fullmatch(text.strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if first > last:
        raise StepsError(f"--steps: {text!r} is no step and no range of them, as 3 or 3..7")
    return first, last
