"""``lineage compact``: the parts of a run become Parquet: one file, or several of a large run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lineage.cli.json_text import print_json
from lineage.cli.places import LATEST_RUN
from lineage.errors import UserError, first_line


def compact_command(
    folder: Annotated[Path, typer.Argument(help="Run folder.", metavar="FOLDER")] = LATEST_RUN,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: the files written.")] = False,
) -> None:
    """Turn the parts of a run folder into trace.parquet, or into trace-00001.parquet and so on where it is large."""
    import pyarrow as pa

    from lineage.compact import compact
    from lineage.segments import trace_files

    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    try:
        made = compact(folder)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{folder}: cannot compact: {first_line(error)}; the parts stay") from error
    written = [made] if made.is_file() else trace_files(made)
    if as_json:
        print_json({"written": written})
        return
    for file in written:
        typer.echo(str(file))
