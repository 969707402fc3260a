"""A clean trace of any length made of one recorded step: a run of the reference trainer, copied under new names.

Three steps of the built-in tiny model are recorded, of 1,016 trajectories and 8 padding rows each, as a real run has
them. The second is then copied: every copy has keys, uids, versions, tags, weights and contents of its own, and all
that must agree within it still does. Contents are made new by multiplying every fingerprint of a field by one odd
number: the law of composition is linear, so that what was composed of two windows still is.
"""

from __future__ import annotations

import json
import tempfile
import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lineage.fingerprint import fingerprint_strings
from lineage.schema import META_CONFIG

SIZE = (
    "data.train_batch_size=127",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
    "data.max_response_length=32",  # answers of eight tokens would often come twice
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=3",
)
DATASET_ROWS = 4096
# fields whose contents every step makes anew; what follows from a mask or a reward stays
_ANEW = (
    "prompts", "responses", "input_ids", "raw_prompt", "turns", "rollout_log_probs", "old_log_probs", "ref_log_prob",
    "log_probs", "entropy",
)  # fmt: skip
_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def record(path: Path) -> Path:
    """Record the run that is copied (a minute or two)."""
    from lineage.trainer.faults import lab

    with patch("lineage.trainer.tasks.builtin.ROWS", DATASET_ROWS):
        return lab.record(path, overrides=SIZE)


@dataclass(frozen=True)
class Recorded:
    """The recorded steps: those that come first as they are, and the one that is copied.

    Attributes:
        run_id: of the recorded run.
        config: of the run, for as many steps as anybody asks for.
    """

    run_id: str
    first: tuple[pa.Table, ...]
    again: pa.Table
    config: dict[str, Any]

    @classmethod
    def kept(cls) -> Recorded:
        """The run of this size, recorded once and kept in the system's temporary folder."""
        path = Path(tempfile.gettempdir()) / f"lineage-step-{zlib.crc32(repr(SIZE).encode()):08x}.parquet"
        if not path.exists():
            record(path)
        return cls.of(path)

    @classmethod
    def of(cls, path: Path) -> Recorded:
        """Read the run that :func:`record` made."""
        table = pq.read_table(path)
        config = json.loads(pq.read_metadata(path).metadata[META_CONFIG])
        config["trainer"]["total_training_steps"] = 1_000_000
        step = table["global_steps"].to_numpy()
        begins = table.filter(pa.array(step <= 1))
        return cls(str(table["run_id"][0]), (begins,), table.filter(pa.array(step == 2)), config)

    def tables(self, facts: int) -> Iterator[tuple[pa.Table, int]]:
        """Tables of a step each (step 0 is with the first) and their facts, until so many are reached."""
        written = 0
        for table in self._steps():
            count = int(pc.sum(table["n"]).as_py())
            yield table, count
            written += count
            if written >= facts:
                return

    def _steps(self) -> Iterator[pa.Table]:
        yield from self.first
        copier = _Copier(self.again)
        for shift in range(1_000_000):
            yield copier.copy(shift)


class _Copier:
    """Copies one step."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table.combine_chunks()
        self.names = self.table.column_names
        self.entity, self.field, self.phase = (
            np.asarray(column.to_pylist(), dtype=object)
            for column in (table["entity"], table["field"], pc.struct_field(table["weights"], "phase"))
        )
        keys = self._flat("key").values
        self.distinct = pc.unique(keys).to_pylist()
        self.at = pc.index_in(keys, pa.array(self.distinct, keys.type)).to_numpy()
        self.uids = _uids(self.distinct)
        self.updates = pc.sum(pc.equal(table["op"], "optim_step")).as_py()
        self.span = int(pc.max(table["seq"]).as_py()) - int(pc.min(table["seq"]).as_py()) + 1
        self.ticks = int(pc.max(table["time_ns"]).as_py()) - int(pc.min(table["time_ns"]).as_py()) + 1

    def copy(self, shift: int) -> pa.Table:
        """The step ``shift`` steps later; 0 is the step itself."""
        if not shift:
            return self.table
        columns = dict(zip(self.names, self.table.columns, strict=True))
        columns["global_steps"] = pc.add(columns["global_steps"], shift)
        columns["seq"] = pc.add(columns["seq"], shift * self.span)
        columns["time_ns"] = pc.add(columns["time_ns"], shift * self.ticks)
        columns["parent"] = self._struct("parent", seq=shift * self.span)
        # the reference's weights are those of version 0 for ever
        columns["weights"] = self._struct("weights", (self.phase != "ref") * shift, version=1, cache_epoch=1)
        columns["attrs"] = self._attrs(shift)
        for name in ("global_steps_tag", "min_global_steps", "max_global_steps"):
            columns[name] = self._added(name, np.full(len(self.table), shift))
        rows = np.isin(self.entity, ("dataset_row", "prompt"))
        columns["source_index"] = self._added("source_index", rows * shift * DATASET_ROWS)
        columns["slot"] = self._added("slot", np.full(len(self.table), shift * 1_000_000))
        columns["sum"] = self._metrics(shift)
        names, uid_prints = self._renamed(shift)
        columns["key"] = self._listed("key", pa.array(names, pa.string()).take(pa.array(self.at)))
        columns["fingerprint"] = self._prints(shift, uid_prints)
        columns["marks"] = self._marks(shift)
        return pa.table({name: columns[name] for name in self.names}, schema=self.table.schema)

    def _flat(self, name: str) -> pa.ListArray:
        return self.table[name].chunk(0)

    def _listed(self, name: str, values: pa.Array) -> pa.ListArray:
        """A list column with other values: as many, in the same rows."""
        lists = self._flat(name)
        made = pa.ListArray.from_arrays(lists.offsets, values.cast(lists.type.value_type), mask=lists.is_null())
        return made.cast(lists.type)

    def _per_element(self, name: str, of_row: np.ndarray) -> np.ndarray:
        """A number of each row, at each of its elements."""
        return np.repeat(of_row, np.diff(self._flat(name).offsets.to_numpy()))

    def _added(self, name: str, of_row: np.ndarray) -> pa.ListArray:
        values = self._flat(name).values
        return self._listed(name, pc.add(values, pa.array(self._per_element(name, of_row), values.type)))

    def _struct(self, name: str, of_row: Any = 1, **shifts: int) -> pa.StructArray:
        """Numbers of a struct column moved on, each by its shift times that of the row."""
        column = self.table[name].chunk(0)
        fields = {field.name: column.field(field.name) for field in column.type}
        for field, shift in shifts.items():
            moved = np.broadcast_to(np.asarray(of_row) * shift, len(column))
            fields[field] = pc.add(fields[field], pa.array(moved, fields[field].type))
        return pa.StructArray.from_arrays(list(fields.values()), fields=list(column.type), mask=column.is_null())

    def _attrs(self, shift: int) -> pa.Array:
        moves = {"global_steps": shift, "optimizer_steps": shift * self.updates}

        def later(pairs: Sequence[tuple[str, str]] | None) -> list[tuple[str, str]] | None:
            if pairs is None:
                return None
            return [(name, str(int(value) + moves[name]) if name in moves else value) for name, value in pairs]

        return pa.array(list(map(later, self.table["attrs"].to_pylist())), self.table["attrs"].type)

    def _metrics(self, shift: int) -> pa.ListArray:
        """The number of the step is a metric too."""
        values = self._flat("sum").values.to_numpy(zero_copy_only=False).copy()
        lists, keys = self._flat("sum").offsets.to_numpy(), self._flat("key").offsets.to_numpy()
        for row in np.flatnonzero((self.entity == "metric") & (self.field == "metrics")):
            named = [self.distinct[at] for at in self.at[keys[row] : keys[row + 1]]]
            if "training/global_step" in named:
                values[lists[row] + named.index("training/global_step")] += shift
        return self._listed("sum", pa.array(values, from_pandas=True))

    def _renamed(self, shift: int) -> tuple[list[str], np.ndarray]:
        """Of each distinct key its name in the copy, and the fingerprint of its uid."""
        fresh = {uid: _uuid(uid, shift) for uid in set(self.uids) if uid}
        names = []
        for key, uid in zip(self.distinct, self.uids, strict=True):
            if uid:
                key = fresh[uid] + key[len(uid) :]
            elif key and key.isdigit():
                key = str(int(key) + shift * DATASET_ROWS)
            names.append(key)
        prints = np.array(fingerprint_strings([fresh.get(uid, "") for uid in self.uids]), dtype=np.uint64)
        return names, prints

    def _prints(self, shift: int, uid_prints: np.ndarray) -> pa.ListArray:
        lists = self._flat("fingerprint")
        values = np.asarray(pc.fill_null(lists.values, 0)).astype(np.uint64)
        nulls = np.asarray(lists.values.is_null())
        param = self._per_element("fingerprint", (self.entity == "param") & (self.phase != "ref"))
        uid = self._per_element("fingerprint", (self.entity == "trajectory") & (self.field == "uid"))
        of_key = np.full(len(values), 0)
        # rows that have fingerprints have keys, as many
        has = np.diff(lists.offsets.to_numpy()) > 0
        of_key[:] = self.at[np.repeat(has, np.diff(self._flat("key").offsets.to_numpy()))]
        values = np.where(self._anew("fingerprint"), values * _odd(shift), values)
        values = np.where(param, values + np.uint64(shift * _SPREAD & _MASK), values)
        values = np.where(uid, uid_prints[of_key], values)
        return self._listed("fingerprint", pa.array(values, mask=nulls))

    def _marks(self, shift: int) -> pa.ListArray:
        """Prefix fingerprints: a list of positions and prints an element."""
        outer = self._flat("marks")
        inner = outer.values
        marks = inner.values
        prints = np.asarray(pc.fill_null(marks.field("fp"), 0)).astype(np.uint64)
        anew = np.repeat(self._anew("marks"), np.diff(inner.offsets.to_numpy()))
        fields = {field.name: marks.field(field.name) for field in marks.type}
        fields["fp"] = pa.array(np.where(anew, prints * _odd(shift), prints))
        made = pa.StructArray.from_arrays(list(fields.values()), fields=list(marks.type))
        lists = pa.ListArray.from_arrays(inner.offsets, made, mask=inner.is_null()).cast(inner.type)
        return pa.ListArray.from_arrays(outer.offsets, lists, mask=outer.is_null()).cast(outer.type)

    def _anew(self, name: str) -> np.ndarray:
        return self._per_element(name, np.isin(self.field.astype(str), _ANEW))


def _uids(keys: Sequence[str | None]) -> list[str]:
    """Of each key the uid it is of, itself where it is a prompt's; empty of other names."""
    heads = {key.rsplit("_", 2)[0] for key in keys if key and key.count("_") >= 2 and key[-1].isdigit()}
    found = []
    for key in keys:
        head = key.rsplit("_", 2)[0] if key and key.count("_") >= 2 else key
        found.append(head if head in heads and "/" not in str(head) else "")
    return found


def _uuid(uid: str, shift: int) -> str:
    """Another name of the same form and length."""
    made = uuid.uuid5(uuid.NAMESPACE_OID, f"{uid} {shift}")
    return str(made) if len(uid) == 36 else (uid[: max(0, len(uid) - 32)] + made.hex)[: len(uid)]


def _odd(shift: int) -> np.uint64:
    return np.uint64((shift * _SPREAD | 1) & _MASK)
