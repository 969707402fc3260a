"""``lineage show``: the life of one trajectory or of a whole prompt group, and its turns as a ribbon."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from lineage.cli.json_text import print_json
from lineage.cli.ribbon import print_ribbons
from lineage.cli.table import print_table

if TYPE_CHECKING:
    from lineage.traces.life import Event, Life

_COLUMNS = (
    "step", "stage", "op", "field", "key", "producer", "consumer", "shape", "valid", "mask_sum", "value", "dtype",
    "device", "global_steps", "padding", "note",
)  # fmt: skip


def show_command(
    trace: Annotated[str, typer.Argument(help="Parquet file, run folder, glob or URL.", metavar="TRACE")],
    name: Annotated[str, typer.Argument(help="Trajectory key, or the uid of a group.", metavar="KEY|UID")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: ribbons, every event, every field.")] = False,
) -> None:
    """Show a trajectory's life, its turns drawn as a ribbon above it, or that of a whole prompt group."""
    from lineage.traces import open_trace
    from lineage.traces.life import life
    from lineage.traces.ribbon import ribbons

    with open_trace(trace) as opened:
        found = life(opened, name)
        drawn = ribbons(opened, found)
    if as_json:
        print_json(
            {
                **asdict(found),
                "ribbons": [asdict(ribbon) for ribbon in drawn],
                "events": [_json(event) for event in found.events],
            }
        )
        return
    typer.echo(f"uid {found.uid}")
    typer.echo(f"trajectories {', '.join(found.keys) or 'none'}")
    typer.echo(f"step {', '.join(map(str, found.steps))}\n")
    print_ribbons(drawn, found.uid)
    print_table(_COLUMNS, [_row(event, found) for event in found.events])


def _json(event: Event) -> dict[str, object]:
    """Every field; the fingerprint in hexadecimal, for a JSON number of 64 bits is cut short by many readers."""
    mark = event.fingerprint
    return {**asdict(event), "fingerprint": None if mark is None else f"{mark:016x}"}


def _row(event: Event, found: Life) -> tuple[object, ...]:
    return (
        event.global_steps,
        event.stage,
        event.op,
        event.field,
        _short(event.key, found),
        event.producer,
        event.consumer,
        "x".join("*" if size < 0 else str(size) for size in event.shape) if event.shape else event.length,
        event.valid_length,
        event.mask_sum,
        event.value,
        event.dtype,
        event.device,
        _versions(event),
        {True: "yes", False: "no"}.get(event.is_padding) if event.is_padding is not None else None,
        _note(event),
    )


def _short(key: str, found: Life) -> str | None:
    """A group's trajectories by session and index: the uid is printed once, above."""
    if not key:
        return None
    return key.removeprefix(found.uid) or "uid"


def _versions(event: Event) -> str | None:
    if event.min_global_steps is None and event.global_steps_tag is None:
        return None
    tag = "-" if event.global_steps_tag is None else event.global_steps_tag
    return f"{tag} ({event.min_global_steps}..{event.max_global_steps})"


def _note(event: Event) -> str | None:
    parts = [part for part in (event.status, event.finish_reason, event.reason) if part]
    if event.mini_batch is not None:
        micro = f".{event.micro_batch}" if event.micro_batch is not None else ""
        parts.append(f"mini-batch {event.mini_batch}{micro}")
    if event.weights_version is not None:
        parts.append(f"weights {event.weights_version}")
    return ", ".join(parts) or None
