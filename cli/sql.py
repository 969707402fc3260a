"""``lineage sql``: a query over a trace, inside DuckDB's fence."""

from __future__ import annotations

import csv
import sys
from enum import StrEnum
from typing import Annotated

import typer

from lineage.cli.json_text import print_json
from lineage.cli.table import print_table
from lineage.errors import UserError


class Format(StrEnum):
    """How the answer is printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def sql_command(
    trace: Annotated[str, typer.Argument(help="Parquet file, run folder, glob or URL.", metavar="TRACE")],
    query: Annotated[str, typer.Argument(help="SQL over rows, facts, trajectories, groups, steps.", metavar="QUERY")],
    form: Annotated[Format, typer.Option("--format", help="How the answer is printed.")] = Format.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json: a list of objects.")] = False,
) -> None:
    """Ask a trace with SQL; it reads that trace and no other file."""
    from lineage.traces import open_trace

    form = Format.JSON if as_json else form
    with open_trace(trace) as opened:
        columns, rows = opened.fetch(query)
    if form is Format.TABLE:
        print_table(columns, rows)
    elif form is Format.CSV:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    else:
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if twice:
            raise UserError(f"sql: two columns are named {twice[0]!r}; name one otherwise, as in: {twice[0]} as other")
        print_json([dict(zip(columns, row, strict=True)) for row in rows], indent=None)
