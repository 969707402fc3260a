"""What a run says it does, as tables a query can ask: its resolved configuration and its profile, by dotted name.

``config``: ``run_id``, ``name``, ``value`` (text; null where the configuration says null). ``profile``: ``name``,
``value``. In a query, ``setting(run_id, name)`` is the text of a setting of that run, null where it is not said, and
``said(name)`` the number of a profile; ``synchronous(run_id)`` says whether the run trains on what it has just sampled,
as one that says nothing of it does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from lineage.traces.source import Source

#: what a trace of several runs answers with
_ASKED = (
    # What a macro is given may be a column's name, and is looked for among the macro's own columns first: so these have
    # names that no caller has.
    """create or replace temp macro setting(run, path) as
    (select any_value(c.its_value) from config as c(its_run, its_name, its_value)
    where c.its_name = path and c.its_run = coalesce(run, ''))""",
    """create or replace temp macro said(path) as
    (select any_value(try_cast(p.its_value as double)) from profile as p(its_name, its_value)
    where p.its_name = path)""",
    """create or replace temp macro synchronous(run) as
    coalesce(setting(run, 'trainer.v1.trainer_mode'), 'sync') = 'sync'""",
    """create or replace temp macro band(run) as
    (select case when count(*) > 0 and bool_and(lower(c.its_value) in ('fp32', 'float32', 'false'))
            then said('log_probs.float32') else said('log_probs.reduced') end
    from config as c(its_run, its_name, its_value)
    where c.its_run = coalesce(run, '') and c.its_value is not null and c.its_name in (
        'actor_rollout_ref.actor.fsdp_config.model_dtype', 'actor_rollout_ref.actor.fsdp_config.dtype',
        'actor_rollout_ref.rollout.dtype', 'bf16', 'fp16'))""",
)
# A trace of one run: its settings are constants of a query, which costs a third of looking each of them up.
_KEPT = (
    "set variable profile_said = (select map(list(name), list(try_cast(value as double))) from profile)",
    "set variable run_said = (select map(list(name), list(value)) from"
    " (select name, any_value(value) as value from config group by name))",
    "set variable run_band = band({run})",
    "set variable no_band = band(null)",
    """create or replace temp macro said(path) as map_extract(getvariable('profile_said'), path)[1]""",
    """create or replace temp macro setting(run, path) as
    case when coalesce(run, '') = {run} then map_extract(getvariable('run_said'), path)[1] end""",
    """create or replace temp macro band(run) as
    case when coalesce(run, '') = {run} then getvariable('run_band') else getvariable('no_band') end""",
)


def macros(run_ids: Sequence[str]) -> tuple[str, ...]:
    """The statements that make the macros over these tables, for a trace of these runs."""
    if len(run_ids) != 1:
        return _ASKED
    run = "'" + run_ids[0].replace("'", "''") + "'"
    return *_ASKED, *(one.format(run=run) for one in _KEPT)


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
