"""``lineage explain``: what a code means."""

from __future__ import annotations

from typing import Annotated

import typer

from lineage.checks.catalogue import get


def explain_command(code: Annotated[str, typer.Argument(help="A code, such as KEY001.")]) -> None:
    """Explain one invariant: what it enforces, what it needs, what usually breaks it."""
    one = get(code)
    typer.echo(f"{one.code} {one.name} ({one.severity})\n")
    typer.echo(one.says)
    typer.echo(f"\nUsually broken by: {one.causes}")
    typer.echo(f"Needs columns:     {', '.join(one.needs) or 'none'}")
    typer.echo(f"Needs fields:      {', '.join(one.fields) or 'none'}")
    if one.subsumed_by:
        typer.echo(f"Folds under:       {', '.join(one.subsumed_by)}")
    typer.echo(f"Comes from:        {one.source}")
