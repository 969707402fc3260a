"""``lineage explain``: what a code means."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lineage.cli.completion import complete_code
from lineage.cli.json_text import print_json
from lineage.errors import UserError

if TYPE_CHECKING:
    from lineage.checks.catalogue import Invariant


#: how far an invariant looks, in words
LOOKS_AT = {"step": "a step, with the steps before it that share its keys", "run": "the whole run"}
#: what becomes of a code that only warns
WARNS = "lineage check exits 0 on it unless --max-warnings 0"


def explain_command(
    code: Annotated[str, typer.Argument(help="A code, such as KEY001.", metavar="CODE", autocompletion=complete_code)],
    checks: Annotated[
        list[Path] | None,
        typer.Option("--checks", metavar="DIR", help="Folder of your own .sql invariants.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain one code: what it enforces, what it needs, what usually breaks it.

    Your own codes are known as in check: by --checks, by the settings file, by installed plugins.
    """
    from lineage.checks.sources import named

    one = _find(code, checks or ())
    sources = named(one.source)
    if as_json:
        said = {name: getattr(one, name) for name in ("code", "family", "name", "severity", "says", "causes")}
        said |= {name: getattr(one, name) for name in ("needs", "fields", "looks", "subsumed_by", "backs_up")}
        said |= {name: getattr(one, name) for name in ("reports", "faults", "source", "origin")}
        print_json(said | {"sources": sources})
        return
    exits = f": {WARNS}" if one.severity == "warning" else ""
    typer.echo(f"{one.code} {one.name} ({one.severity}{exits})\n")
    typer.echo(one.says)
    typer.echo(f"\nUsually broken by: {one.causes or 'not said'}")
    typer.echo(f"Needs columns:     {', '.join(one.needs) or 'none'}")
    typer.echo(f"Needs fields:      {', '.join(one.fields) or 'none'}")
    typer.echo(f"Looks at:          {LOOKS_AT[one.looks]}")
    if one.subsumed_by:
        typer.echo(f"Folds under:       {', '.join(one.subsumed_by)}")
    if one.backs_up:
        typer.echo(f"Backs up:          {one.backs_up}")
    if one.faults:
        typer.echo(f"Shown by faults:   {', '.join(one.faults)}")
    if one.reports:
        typer.echo(f"Would have caught: {', '.join(one.reports)}")
    typer.echo(f"Comes from:        {one.source or 'not said'}")
    for name, sentence in sources.items():
        typer.echo(f"                   {name}: {sentence}")
    if one.origin:
        typer.echo(f"Written in:        {one.origin}")


def _find(code: str, folders: Sequence[Path]) -> Invariant:
    """One of ours, or else one of the user's; a broken plugin is met only on the way to the second.

    Raises:
        UserError: there is none, and what is meant instead: a fault, or codes of a like name.
    """
    from lineage.checks.catalogue import CatalogueError, available, catalogue, get

    if any(one.code == code.upper() for one in catalogue()):
        return get(code)
    try:
        return get(code, available(folders or _folders_of_the_project()))
    except CatalogueError as error:
        if fault := _fault(code):
            raise UserError(fault) from error
        raise


def _fault(name: str) -> str:
    """What to ask of a fault, where it is the name of one, or nearly; else empty."""
    from lineage.checks.catalogue import catalogue

    shown_by: dict[str, list[str]] = {}
    for one in catalogue():
        for fault in one.faults:
            shown_by.setdefault(fault, []).append(one.code)
    asked = name.lower().replace("-", "_")
    if asked in shown_by:
        codes = shown_by[asked]
        return (
            f"{asked} is a fault, not a code: {' and '.join(codes)} {'shows' if len(codes) == 1 else 'show'} it "
            f"(lineage explain {codes[0]}); to see it: lineage selftest --fault {asked}"
        )
    near = get_close_matches(asked, shown_by, n=3, cutoff=0.7) if "_" in asked else []
    return f"no invariant {name!r}; of faults there is {' or '.join(near)}" if near else ""


def _folders_of_the_project() -> tuple[Path, ...]:
    from lineage.checks.settings import find, load

    file = find(Path.cwd())
    return () if file is None else load(file).checks
