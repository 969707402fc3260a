"""``lineage compact``: the parts of a run become one Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from lineage.cli.places import LATEST_RUN
from lineage.compact import compact
from lineage.errors import UserError


def compact_command(folder: Annotated[Path, typer.Argument(help="Run folder.")] = LATEST_RUN) -> None:
    """Turn the parts of a run folder into trace.parquet."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    try:
        written = compact(folder)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{folder}: cannot compact: {_first_line(error)}; the parts stay") from error
    typer.echo(str(written))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
