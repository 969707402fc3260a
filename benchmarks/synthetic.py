"""A synthetic clean trace of any size: one synchronous GRPO step after another, every stage, every law kept.

Used by ``check.py`` to measure the checker, and by the tests, which break one row at a time. The rows are those of
``docs/trace.md``; the content is random but lawful: ``input_ids`` composes from ``prompts`` and ``responses``, masks
agree, what is consumed was produced, metrics recompute from the rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from synthetic_content import Row, Size
from synthetic_step import Step

from lineage.schema import COLUMNS, META_CONFIG, META_RUN, META_STATE, schema

__all__ = ["Row", "Size", "Step", "small", "steps", "tables", "to_table", "write_rows", "write_trace"]

ROW_GROUP_FACTS = 1 << 19
_TYPES = {column.name: column for column in COLUMNS}


def init_rows(size: Size) -> list[Row]:
    """Rows before the first step: the topology the actor's backend reports, the weights the run starts from."""
    topology = size.topology()
    start, loaded = {"global_steps": 0}, {"version": 0, "phase": "engine", "cache_epoch": 0}
    params: dict[str, Any] = {"key": np.array([f"layer.{i}" for i in range(16)], dtype=object)}
    params |= {
        "fingerprint": np.arange(16, dtype=np.uint64),
        "length": np.full(16, 64),
        "valid_length": np.full(16, 64),
    }
    return [
        Row("init", "produce", "topology", "metric", start | {"topology": topology}),
        Row("init", "produce", "parameters", "param", start | {"weights": {"version": 0, "phase": "actor"}}, params),
        *(
            Row("weight_sync", "sync", "parameters", "param", start | {"weights": weights}, params)
            for weights in ({"version": 0, "phase": "actor"}, loaded)
        ),
        *(
            Row("weight_sync", op, "rollout", "metric", start | {"weights": loaded | {"cache_epoch": 1}})
            for op in ("cache_reset", "wake")
        ),
    ]


def steps(count: int, size: Size, seed: int = 0, run_id: str = "synthetic") -> Iterator[list[Row]]:
    """The rows of the run, step by step; the first list also holds the rows of ``init``."""
    rng = np.random.default_rng(seed)
    for number in range(1, count + 1):
        rows = Step(run_id, number, size, rng).play()
        yield init_rows(size) + rows if number == 1 else rows


def to_table(rows: list[Row], first_seq: int = 0, run_id: str = "synthetic") -> pa.Table:
    """Arrow table of schema v1 for these rows, numbered from ``first_seq``."""
    columns: dict[str, pa.Array] = {}
    for name, column in _TYPES.items():
        if column.listed:
            columns[name] = _list_column([row.lists.get(name) for row in rows], column.type)
        elif name not in ("attrs", "missing"):
            columns[name] = pa.array([row.scalars.get(name) for row in rows], column.arrow_type)
    count = len(rows)
    columns["attrs"] = pa.array([row.scalars.get("map_attrs") for row in rows], _TYPES["attrs"].arrow_type)
    columns["missing"] = pa.array([row.scalars.get("missing") for row in rows], _TYPES["missing"].arrow_type)
    seq = np.arange(first_seq, first_seq + count)
    columns["seq"] = pa.array([row.scalars.get("seq", int(seq[i])) for i, row in enumerate(rows)], pa.int64())
    columns["time_ns"] = pa.array([row.scalars.get("time_ns", int(seq[i]) * 1000) for i, row in enumerate(rows)])
    columns["run_id"] = pa.array([run_id] * count)
    columns["process"] = pa.array([row.scalars.get("process", "driver") for row in rows])
    for name in ("stage", "op", "field", "entity"):
        columns[name] = pa.array([getattr(row, name) for row in rows])
    columns["n"] = pa.array([len(row) for row in rows], pa.int32())
    return pa.table([columns[name] for name in schema().names], schema=schema())


def _list_column(values: list[Any], type_: pa.DataType) -> pa.Array:
    offsets, nulls, parts, at = [0], [], [], 0
    for value in values:
        nulls.append(value is None)
        if value is not None:
            part = _flat(value, type_)
            parts.append(part)
            at += len(part)
        offsets.append(at)
    flat = pa.concat_arrays(parts) if parts else pa.array([], type_)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, mask=pa.array(nulls))


def _flat(value: Any, type_: pa.DataType) -> pa.Array:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return pa.array(value, from_pandas=True).cast(type_)
    return pa.array(list(value), type_)


# what the rows keep to
CONFIG = {"algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True, "use_kl_in_reward": False}}


def metadata(config: dict[str, Any] | None = None, state: dict[str, Any] | None = None) -> dict[bytes, bytes]:
    """File metadata as a closed run of the reference trainer writes it."""
    base = dict(schema().metadata or {})
    run = {"run_id": "synthetic", "profile": "lineage", "framework": "synthetic"}
    closed = {"closed": True, "steps": [], "torn": [], "dropped": {"rows": 0, "steps": [], "why": []}}
    base[META_RUN] = json.dumps(run).encode()
    base[META_CONFIG] = json.dumps(CONFIG if config is None else config).encode()
    base[META_STATE] = json.dumps(closed | (state or {})).encode()
    return base


def write_rows(path: Path, rows: list[Row], state: dict[str, Any] | None = None) -> Path:
    """Write these rows as one small trace file."""
    table = to_table(rows).replace_schema_metadata(metadata(state=state))
    pq.write_table(table, path)
    return path


def write_trace(path: Path, facts: int, size: Size | None = None, seed: int = 0) -> int:
    """Write a clean trace of at least ``facts`` facts in row groups as compaction makes them; returns the facts."""
    written = 0
    group: list[pa.Table] = []
    options: dict[str, Any] = {"compression": "zstd", "compression_level": 3, "dictionary_pagesize_limit": 4 << 20}
    with pq.ParquetWriter(path, schema().with_metadata(metadata()), write_page_checksum=True, **options) as writer:
        for table, count in tables(facts, size, seed):
            group.append(table)
            written += count
            if sum(_facts_of(part) for part in group) >= ROW_GROUP_FACTS or written >= facts:
                whole = pa.concat_tables(group)
                writer.write_table(whole.cast(writer.schema), row_group_size=whole.num_rows)
                group = []
    return written


def tables(facts: int, size: Size | None = None, seed: int = 0) -> Iterator[tuple[pa.Table, int]]:
    """Tables of one step each, and their facts, until ``facts`` are reached."""
    written, seq = 0, 0
    for rows in steps(1_000_000, size or Size(), seed):
        table = to_table(rows, seq)
        yield table, _facts(rows)
        written, seq = written + _facts(rows), seq + len(rows)
        if written >= facts:
            return


def _facts_of(table: pa.Table) -> int:
    return int(pc.sum(table["n"]).as_py())


def _facts(rows: list[Row]) -> int:
    return max(1, sum(len(row) for row in rows))


def small(padding: int = 0) -> Size:
    """The size the tests use: 4 prompts, 2 sessions, two mini-batches over two ranks."""
    return replace(Size(), prompts=4, sessions=2, mini_batches=2, micro_batches=2, padding=padding)
