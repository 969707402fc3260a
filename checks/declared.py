"""What a run says it does, as tables a query can ask: its resolved configuration and its profile, by dotted name.

``config``: ``run_id``, ``name``, ``value`` (text; null where the configuration says null). ``profile``: ``name``,
``value``. In a query, ``setting(run_id, name)`` is the text of a setting of that run, null where it is not said, and
``said(name)`` the number of a profile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from lineage.traces.source import Source

MACROS = (
    """create or replace temp macro setting(run, path) as
    (select any_value(c.value) from config as c where c.name = path and c.run_id = coalesce(run, ''))""",
    """create or replace temp macro said(path) as
    (select any_value(try_cast(p.value as double)) from profile as p where p.name = path)""",
    """create or replace temp macro band(run) as
    (select case when count(*) > 0 and bool_and(lower(c.value) in ('fp32', 'float32', 'false'))
            then said('log_probs.float32') else said('log_probs.reduced') end
    from config as c
    where c.run_id = coalesce(run, '') and c.value is not null and c.name in (
        'actor_rollout_ref.actor.fsdp_config.model_dtype', 'actor_rollout_ref.actor.fsdp_config.dtype',
        'actor_rollout_ref.rollout.dtype', 'bf16', 'fp16'))""",
)


def config_table(source: Source, run_ids: Sequence[str]) -> pa.Table:
    """The configuration of every run; of one the trace does not describe, what it says of whichever it is."""
    known = {run.run_id: run.config for run in source.runs}
    said = [(run_id, *pair) for run_id in run_ids for pair in leaves(known.get(run_id, source.config))]
    columns = zip(*said, strict=True) if said else ([], [], [])
    return pa.table(
        dict(zip(("run_id", "name", "value"), (pa.array(column, pa.string()) for column in columns), strict=True))
    )


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Every leaf of nested tables under its dotted name, as text: numbers as written, ``true``, lists as JSON."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        elif value is None or isinstance(value, str):
            yield f"{prefix}{name}", value
        else:
            yield f"{prefix}{name}", json.dumps(value, default=str)
