"""``lineage faults``: the faults the catalogue is tried on, and the public reports they stand for."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lineage.cli.completion import complete_choice
from lineage.cli.extras import need_extra
from lineage.cli.json_text import print_json
from lineage.errors import UserError

if TYPE_CHECKING:
    from lineage.trainer.faults.registry import Fault
    from lineage.trainer.faults.reports import PublicReport

#: columns of text: a terminal's, within these
NARROW, WIDE = 80, 120


def faults_command(
    code: Annotated[
        str | None,
        typer.Option(
            "--code",
            metavar="CODE",
            help="Those that this code, or a code of this family (KEY), must catch.",
            autocompletion=complete_choice,
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            "--family",
            metavar="FAMILY",
            help="Those that stand for public reports of this family (masks), whichever code catches them.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the faults: the code that must catch each, the stage, what goes wrong, the reports it stands for.

    lineage selftest injects each into a small run and checks the trace. Codes have families (KEY, MSK), and so have
    public reports (masks, rewards): --code takes the first, --family the second.
    """
    need_extra("train", "lineage faults")
    from lineage.checks.formats.plain import plural
    from lineage.trainer.faults.registry import all_faults
    from lineage.trainer.faults.reports import public_reports

    reports = public_reports()
    chosen = [*all_faults().values(), *all_faults("ray").values()]
    if code is not None:
        from lineage.checks.catalogue import select

        wanted = {one.code for one in select([code])}
        chosen = [fault for fault in chosen if wanted.intersection((fault.code, *fault.also))]
    counted = reports
    if family is not None:
        known = _family(family, reports.values())
        chosen = [fault for fault in chosen if known in _families(fault, reports)]
        counted = {name: one for name, one in reports.items() if one.family == known}
    if as_json:
        left_out = [one for one in counted.values() if one.without]
        print_json(
            {
                "faults": [_said(fault, reports) for fault in chosen],
                "left_out": [
                    {name: getattr(one, name) for name in ("id", "family", "reference", "without")} for one in left_out
                ],
                "counts": _counts(chosen, counted),
            }
        )
        return
    width = min(max(shutil.get_terminal_size((WIDE, 24)).columns, NARROW), WIDE)
    for fault in chosen:
        for line in _lines(fault, width):
            typer.echo(line)
    counts = _counts(chosen, counted)
    said = f"\n{plural(counts['faults'], 'fault')} of {plural(counts['codes'], 'code')}"
    if code is None:
        whose = "" if family is None else f" of the family {known}"
        typer.echo(
            f"{said}, after {counts['reports']:,} of {plural(counts['known'], 'public report')}{whose}; "
            f"{counts['left_out']:,} left out with a reason"
        )
    else:
        typer.echo(f"{said}, after {plural(counts['reports'], 'public report')}")


def _lines(fault: Fault, width: int) -> Iterator[str]:
    """A fault in a line that can be searched for, and under it what goes wrong."""
    where = "  (mode=ray)" if fault.mode == "ray" else ""
    yield f"{fault.code}  {fault.stage:<12}  {fault.name}{where}"
    yield from textwrap.wrap(fault.says, width, initial_indent="    ", subsequent_indent="    ")
    if fault.reports:
        said = f"reports: {', '.join(fault.reports)}"
        yield from textwrap.wrap(said, width, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)


def _said(fault: Fault, reports: dict[str, PublicReport]) -> dict[str, Any]:
    """Everything there is to say of a fault."""
    names = ("name", "code", "stage", "kind", "mode", "says", "step", "onwards", "overrides")
    stands_for = [reports[name] for name in fault.reports if name in reports]
    return {name: getattr(fault, name) for name in names} | {
        "report_families": _families(fault, reports),
        "reports": [{name: getattr(one, name) for name in ("id", "family", "reference")} for one in stands_for],
    }


def _families(fault: Fault, reports: dict[str, PublicReport]) -> list[str]:
    return sorted({reports[name].family for name in fault.reports if name in reports})


def _family(asked: str, reports: Any) -> str:
    """The family meant.

    Raises:
        UserError: there is none of this name; the known ones are named.
    """
    from lineage.checks.catalogue import catalogue

    known = sorted({one.family for one in reports})
    if asked.lower() in known:
        return asked.lower()
    if asked.upper() in {one.family for one in catalogue()}:
        raise UserError(f"{asked} is a family of codes: lineage faults --code {asked.upper()} lists what they catch")
    near = get_close_matches(asked.lower(), known, n=1)
    raise UserError(
        f"no family {asked!r} of public reports; "
        + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")
    )


def _counts(chosen: Sequence[Fault], reports: dict[str, PublicReport]) -> dict[str, int]:
    stood_for = {name for fault in chosen for name in fault.reports if name in reports}
    return {
        "faults": len(chosen),
        "codes": len({fault.code for fault in chosen}),
        "report_families": len({reports[name].family for name in stood_for}),
        "reports": len(stood_for),
        "left_out": sum(bool(one.without) for one in reports.values()),
        "known": len(reports),
    }
