"""``lineage info``: what a trace says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lineage.cli.json_text import print_json
from lineage.cli.places import LATEST_RUN
from lineage.cli.table import print_table

if TYPE_CHECKING:
    from lineage.traces import State, Trace
    from lineage.traces.damage import Pages
    from lineage.traces.torn import Lack


@dataclass(frozen=True)
class StageCount:
    """How much a trace holds of one stage."""

    stage: str
    rows: int
    facts: int
    fields: int


@dataclass(frozen=True)
class Info:
    """What a trace holds.

    Attributes:
        trace: where it lies.
        run: what the run said of itself.
        rows: events.
        facts: elements of all rows.
        first_step: first training step, None without any.
        last_step: last one.
        complete: every row of every step is here.
        state: what is missing.
        lacks: of each torn step, what it has not that the step before it has.
        absent: columns of the schema it does not hold.
        pages: of its files, with and without a checksum; one that does not match is an error.
        stages: in their order.
    """

    trace: str
    run: Mapping[str, Any]
    rows: int
    facts: int
    first_step: int | None
    last_step: int | None
    complete: bool
    state: State
    lacks: tuple[Lack, ...]
    absent: tuple[str, ...]
    pages: Pages
    stages: tuple[StageCount, ...]


def info_command(
    trace: Annotated[str, typer.Argument(help="Parquet file, run folder, glob or URL.", metavar="TRACE")] = str(
        LATEST_RUN
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a trace holds: run, versions, steps, stages."""
    from lineage.traces import open_trace
    from lineage.traces.errors import reading

    with open_trace(trace) as opened, reading(opened.path):
        info = _info(opened)
    if as_json:
        print_json(info)
        return
    lines = [
        ("trace", info.trace),
        *_run(info.run),
        ("rows", f"{info.rows:,}"),
        ("facts", f"{info.facts:,}"),
        ("steps", f"{info.first_step}..{info.last_step}" if info.first_step is not None else "none"),
        ("complete", info.state.sentence() or "yes"),
        *(("lacks", one.sentence()) for one in info.lacks),
        ("pages", _pages(info.pages)),
    ]
    if info.absent:
        lines.append(("absent columns", ", ".join(info.absent)))
    for name, value in lines:
        typer.echo(f"{name:<15} {value}")
    typer.echo("")
    print_table(
        ("stage", "rows", "facts", "fields"), [(one.stage, one.rows, one.facts, one.fields) for one in info.stages]
    )


def _info(opened: Trace) -> Info:
    from lineage.traces.torn import lacks

    rows, facts, first, last = opened.sql(
        'select count(*), sum(n), min(global_steps) filter (global_steps > 0), max(global_steps) from "rows"'
    ).fetchall()[0]
    stages = opened.sql(
        'select stage, count(*) as "rows", sum(n) as facts, count(distinct field) as fields from "rows" '
        "group by stage order by min(time_ns), min(seq)"
    ).fetchall()
    return Info(
        trace=str(opened.path),
        run=opened.metadata["run"],
        rows=rows,
        facts=facts or 0,
        first_step=first,
        last_step=last if first is not None else None,
        complete=opened.state.complete,
        state=opened.state,
        lacks=tuple(lacks(opened)),
        absent=tuple(sorted(opened.absent)),
        pages=opened.source.pages,
        stages=tuple(StageCount(*one) for one in stages),
    )


def _pages(pages: Pages) -> str:
    """Whether bytes that were changed since would have been seen."""
    said = [f"{pages.summed:,} match their checksums"] if pages.summed else []
    if pages.unsummed:
        said.append(f"{pages.unsummed:,} have no checksum: bytes changed in them are not seen")
    return ", ".join(said)


def _run(run: Mapping[str, object]) -> list[tuple[str, str]]:
    shown = [(name, str(value)) for name, value in run.items() if not isinstance(value, Mapping) and value is not None]
    for name, value in run.items():
        if isinstance(value, Mapping):
            shown.append((name, ", ".join(f"{key} {part}" for key, part in value.items())))
    return shown
