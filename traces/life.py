"""One trajectory's life, or a whole prompt group's, from the dataset row to the weight sync that followed it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lineage.keys import parse_key
from lineage.traces.errors import TraceError, reading

if TYPE_CHECKING:
    from lineage.traces.trace import Trace

# What happens to the step as a whole, not to one key: shown because a life ends in the weights it changed.
_STEP_WIDE = "('optim_step', 'sleep', 'wake', 'cache_reset', 'sync')"


@dataclass(frozen=True)
class Event:
    """What one row says of one key. The fields are the seeds' trace entry; None is not known.

    Attributes:
        key: trajectory key or uid; empty for an event of the whole step.
        value: the number a scalar field or tag holds.
    """

    global_steps: int
    seq: int
    process: str
    stage: str
    op: str
    field: str
    key: str
    producer: str | None
    consumer: str | None
    layout: str | None
    span: str | None
    shape: tuple[int, ...] | None
    dtype: str | None
    device: str | None
    length: int | None
    valid_length: int | None
    mask_sum: int | None
    fingerprint: int | None
    value: float | None
    global_steps_tag: int | None
    min_global_steps: int | None
    max_global_steps: int | None
    is_padding: bool | None
    status: str | None
    finish_reason: str | None
    reason: str | None
    mini_batch: int | None
    micro_batch: int | None
    weights_version: int | None


@dataclass(frozen=True)
class Life:
    """Everything a trace says of one trajectory or one prompt group, in order.

    Attributes:
        name: the key or uid asked for.
        uid: the prompt group.
        keys: trajectory keys of the group (one, when a trajectory was asked for).
        steps: training steps it appears in.
        events: what happened, in order.
    """

    name: str
    uid: str
    keys: tuple[str, ...]
    steps: tuple[int, ...]
    events: tuple[Event, ...]

    def of(self, key: str) -> Iterable[Event]:
        """Events of one key."""
        return (event for event in self.events if event.key == key)


def life(trace: Trace, name: str) -> Life:
    """The life of a trajectory key, or of a uid with all its trajectories.

    Raises:
        TraceError: the trace holds neither such a key nor such a uid.
    """
    with reading(trace.path):
        return _life(trace, name)


def _life(trace: Trace, name: str) -> Life:
    con = trace.connection
    parsed = parse_key(name)
    uid = parsed.uid if parsed and _exists(trace, name, "trajectory") else name
    whole = uid == name
    pattern = "regexp_extract(key, '^(.+)_(0|[1-9][0-9]*)_(0|[1-9][0-9]*)$', 1) = $uid"
    mine = f"(entity = 'trajectory' and {pattern})" if whole else "(entity = 'trajectory' and key = $name)"
    arguments = {"uid": uid} | ({} if whole else {"name": name})
    listed = con.execute(
        f"""
        select {_columns("key")} from facts
        where {mine} or (entity = 'prompt' and key = $uid)
        order by global_steps, time_ns, process, seq, i
        """,
        arguments,
    ).fetchall()
    events = [_event(row) for row in listed]
    if not events:
        raise TraceError(f"{trace.path}: no trajectory and no uid {name!r}; list them: select key from trajectories")
    steps = tuple(sorted({event.global_steps for event in events}))
    marks = ", ".join(str(step) for step in steps)
    events = _dataset_rows(trace, uid, steps) + events + _step_wide(trace, marks)
    keys = tuple(dict.fromkeys(event.key for event in events if parse_key(event.key) and event.key != uid))
    return Life(name, uid, keys, steps, tuple(events))


def _exists(trace: Trace, key: str, entity: str) -> bool:
    found = trace.connection.execute(
        'select 1 from "rows" where entity = ? and list_contains(key, ?) limit 1', [entity, key]
    )
    return found.fetchone() is not None


def _dataset_rows(trace: Trace, uid: str, steps: tuple[int, ...]) -> list[Event]:
    """The dataset row the prompt came from: joined by the source index its prompt row carries."""
    rows = trace.connection.execute(
        f"""
        select {_columns("$uid || ''")} from facts
        where entity = 'dataset_row' and global_steps in ({", ".join(map(str, steps))})
            and (global_steps, source_index) in (
                select (global_steps, source_index) from facts
                where entity = 'prompt' and key = $uid and source_index is not null)
        order by global_steps, time_ns, process, seq, i
        """,
        {"uid": uid},
    ).fetchall()
    return [_event(row) for row in rows]


def _step_wide(trace: Trace, steps: str) -> list[Event]:
    rows = trace.connection.execute(
        f"""
        select {_columns("''", listed=False)} from "rows"
        where global_steps in ({steps}) and op in {_STEP_WIDE}
        order by global_steps, time_ns, process, seq
        """
    ).fetchall()
    return [_event(row) for row in rows]


_SCALAR = ("producer", "consumer", "layout", "span", "shape", "dtype", "device")
_LISTED = (
    "length", "valid_length", "mask_sum", "fingerprint", '"sum"', "global_steps_tag", "min_global_steps",
    "max_global_steps", "is_padding", "status", "finish_reason", "reason",
)  # fmt: skip


def _columns(key: str, listed: bool = True) -> str:
    values = _LISTED if listed else tuple("null" for _ in _LISTED)
    head = ("global_steps", "seq", "process", "stage", "op", "field", key)
    return ", ".join((*head, *_SCALAR, *values, "mini_batch", "micro_batch", "weights.version"))


def _event(row: tuple[object, ...]) -> Event:
    values = list(row)
    shape = values[11]
    values[11] = tuple(shape) if isinstance(shape, list) else None
    return Event(*values)  # type: ignore[arg-type]
