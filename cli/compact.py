"""``lineage compact``: the parts of a run become one Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lineage.compact import compact
from lineage.errors import UserError


def compact_command(folder: Annotated[Path, typer.Argument(help="Run folder.")] = Path("runs/latest")) -> None:
    """Turn the parts of a run folder into trace.parquet."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    try:
        written = compact(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot compact: {error}; the parts stay") from error
    typer.echo(str(written))
