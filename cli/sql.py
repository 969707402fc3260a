"""``lineage sql``: a query over a trace, inside DuckDB's fence."""

from __future__ import annotations

import csv
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import duckdb
import typer

from lineage.cli.table import print_table
from lineage.traces import TraceError, open_trace


class Format(StrEnum):
    """How the answer is printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def sql_command(
    trace: Annotated[Path, typer.Argument(help="Parquet file, run folder or glob.")],
    query: Annotated[str, typer.Argument(help="SQL over rows, facts, trajectories, groups, steps.")],
    form: Annotated[Format, typer.Option("--format", help="table, csv or json.")] = Format.TABLE,
) -> None:
    """Ask a trace with SQL; the query can read this trace and nothing else."""
    with open_trace(trace) as opened:
        relation = opened.sql(query)
        columns = list(relation.columns)
        try:
            rows = relation.fetchall()
        except duckdb.Error as error:
            raise TraceError(f"sql: {str(error).splitlines()[0]}") from error
    if form is Format.TABLE:
        print_table(columns, rows)
    elif form is Format.CSV:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    else:
        typer.echo(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], default=str))
