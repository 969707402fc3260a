"""``lineage info``: what a trace says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from lineage.cli.places import LATEST_RUN
from lineage.cli.table import print_table
from lineage.traces import open_trace


def info_command(
    trace: Annotated[Path, typer.Argument(help="Parquet file, run folder or glob.")] = LATEST_RUN,
) -> None:
    """Say what a trace holds: run, versions, completeness, steps, stages."""
    with open_trace(trace) as opened:
        lines = [("trace", str(opened.path)), *_run(opened.metadata["run"])]
        rows, facts, first, last = opened.sql(
            'select count(*), sum(n), min(global_steps) filter (global_steps > 0), max(global_steps) from "rows"'
        ).fetchall()[0]
        lines += [
            ("rows", f"{rows:,}"),
            ("facts", f"{facts or 0:,}"),
            ("steps", f"{first}..{last}" if first is not None else "none"),
            ("complete", opened.state.sentence() or "yes"),
        ]
        if opened.absent:
            lines.append(("absent columns", ", ".join(sorted(opened.absent))))
        stages = opened.sql(
            'select stage, count(*) as "rows", sum(n) as facts, count(distinct field) as fields from "rows" '
            "group by stage order by min(time_ns), min(seq)"
        ).fetchall()
    for name, value in lines:
        typer.echo(f"{name:<15} {value}")
    typer.echo("")
    print_table(("stage", "rows", "facts", "fields"), stages)


def _run(run: Mapping[str, object]) -> list[tuple[str, str]]:
    shown = [(name, str(value)) for name, value in run.items() if not isinstance(value, Mapping) and value is not None]
    for name, value in run.items():
        if isinstance(value, Mapping):
            shown.append((name, ", ".join(f"{key} {part}" for key, part in value.items())))
    return shown
