"""``lineage faults``: the faults the catalogue is tried on, and the public reports they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lineage.cli.completion import complete_code
from lineage.cli.extras import need_train_extra
from lineage.cli.json_text import print_json
from lineage.cli.table import print_table
from lineage.errors import UserError

if TYPE_CHECKING:
    from lineage.trainer.faults.registry import Fault
    from lineage.trainer.faults.reports import PublicReport


def faults_command(
    code: Annotated[
        str | None,
        typer.Option("--code", metavar="CODE", help="Those this code must catch.", autocompletion=complete_code),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option("--family", metavar="FAMILY", help="Those that stand for public reports of this family."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the faults: what goes wrong, in which stage, the code that must catch it, the reports it stands for.

    lineage selftest injects each into a small run and checks the trace.
    """
    need_train_extra("faults")
    from lineage.trainer.faults.registry import all_faults
    from lineage.trainer.faults.reports import public_reports

    reports = public_reports()
    chosen = list(all_faults().values())
    if code is not None:
        from lineage.checks.catalogue import get

        wanted = get(code).code
        chosen = [fault for fault in chosen if fault.code == wanted]
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
    body = [(one.name, one.code, one.stage, one.says, " ".join(one.reports)) for one in chosen]
    print_table(("fault", "code", "stage", "what goes wrong", "reports"), body, wrapped=("what goes wrong", "reports"))
    counts = _counts(chosen, counted)
    typer.echo(
        f"\n{counts['faults']} faults, {counts['codes']} codes; {counts['families']} families of public reports, "
        f"{counts['reports']} reports stood for, {counts['left_out']} of {counts['known']} left out with a reason"
    )


def _said(fault: Fault, reports: dict[str, PublicReport]) -> dict[str, Any]:
    """Everything there is to say of a fault."""
    names = ("name", "code", "stage", "kind", "says", "step", "onwards", "overrides")
    stands_for = [reports[name] for name in fault.reports if name in reports]
    return {name: getattr(fault, name) for name in names} | {
        "families": _families(fault, reports),
        "reports": [{name: getattr(one, name) for name in ("id", "family", "reference")} for one in stands_for],
    }


def _families(fault: Fault, reports: dict[str, PublicReport]) -> list[str]:
    return sorted({reports[name].family for name in fault.reports if name in reports})


def _family(asked: str, reports: Any) -> str:
    """The family meant.

    Raises:
        UserError: there is none of this name; the known ones are named.
    """
    known = sorted({one.family for one in reports})
    if asked.lower() in known:
        return asked.lower()
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
        "families": len({reports[name].family for name in stood_for}),
        "reports": len(stood_for),
        "left_out": sum(bool(one.without) for one in reports.values()),
        "known": len(reports),
    }
