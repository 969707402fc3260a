"""Rows of a trace as facts: who a fact is, as one number, and what it says, as one number for each way to differ."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lineage.traces.diff.aspects import BY_NAME, CARRIED
from lineage.traces.diff.hashing import Bool, Int64, Lists, Scalars, UInt64, mixed, salt, whole

#: scalars that make a row what it is; of ``IDENTITY`` those that are of the row, not of its elements
_WHO = (
    "global_steps", "stage", "op", "entity", "field", "against", "partition", "span", "ppo_epoch", "update_index",
    "mini_batch",
)  # fmt: skip
_FORM = ("dtype", "device", "container", "producer", "consumer", "requires_grad")
#: of a row, what is compared but its elements; those of place are not part of a fact's hash
ROW_ASPECTS = (*_FORM, "layout", "context", "attrs", "process", "rank", "topology", "counters", "rows")
_ROW_CONTENT = (*_FORM, "layout", "context", "attrs")
#: of a fact; ``width`` is the container's length, ``outer`` the statistics that cover its padding
FACT_ASPECTS = ("length", "mask", "fingerprint", "inner", "outer", "comparison", "tags", "width", "slot")
_FACT_CONTENT = FACT_ASPECTS[:-1]
NUMBERS = ("sum_in", "min_in", "max_in", "sum_sq_in", "valid_length")  # what rounding is judged by
_OUTER = ("sum", "first", "last", "last_nnz", "nnz", "nonfinite", "nnz_out", "max_abs_out")
_INNER = ("sum_in", "min_in", "max_in", "sum_sq_in", "nonfinite_in")
_COLUMNS = {
    "length": ("valid_length",),
    "mask": ("mask_sum", "mask_fingerprint"),
    "fingerprint": ("fingerprint",),
    "inner": _INNER,
    "outer": _OUTER,
    "comparison": BY_NAME["comparison"].columns,
    "tags": tuple(name for name in BY_NAME["tags"].columns if name not in ("source_index", *CARRIED)),
    "width": ("length",),
    "slot": ("slot",),
}
# Counts of the batch, which perf/ has too, are no clock.
_CLOCKS, _NO_CLOCK = "^(timing_s|timing_per_token_ms|perf)/", ("perf/total_num_tokens",)
# What two nearly equal fields differ by is of rounding as a whole.
_DIFFERENCES = "^(training/rollout_probs_diff_|rollout_corr/|actor/ppo_kl)"
# Of a sequence that the ranks of a replica share out.
_SLICES = ("input_ids_slice", "position_ids_slice")
_INSIDE_A_REPLICA = ("sp", "tp", "pp", "cp")
#: attrs that say what the topology does
OF_TOPOLOGY = ("dp_size", "world_size", "process_on_nodes", "processes", "replicas", "num_workers")
#: everything that is read
READ = tuple(
    dict.fromkeys(
        (
            *_WHO, *_FORM, "layout", "shape", "weights", "sampling", "loss", "optim", "resident", "attrs", "topology",
            "process", "rank", "coord", "n", "asked_n", "nbytes", "micro_batch", "missing", "seq", "time_ns", "key",
            "turn", "marks", "source_index", *CARRIED, *(name for names in _COLUMNS.values() for name in names),
        )
    )
)  # fmt: skip


@dataclass
class Facts:
    """Some rows of one side, in event order once :meth:`ordered` has run, and their facts.

    A row without elements is one fact itself, ``at`` 0. A key that was asked for and not returned is one too, ``at`` -1
    and below.

    Attributes:
        rid: of each row, its id: file and place in it.
        step, seq, time_ns: of each row, for the order.
        place: of each row, the number of its (stage, op, field, entity) among ``Places``.
        size: of each row, how many facts it has.
        micro: rows that are of a micro-batch.
        floating: rows whose dtype is one of floats.
        tensor: rows about the tensors of a model.
        further: rows that another than the first rank of a replica wrote.
        sliced: rows about slices of sequences.
        told: of each row, a hash for each of :data:`ROW_ASPECTS`.
        total: of each row, the sum over its facts of the hash of all but place.
        row: of each fact, its row.
        at: of each fact, its element, from 1.
        who: of each fact, who it is.
        key: of each fact, hash of its key; 0 without one.
        said: of each fact, a hash for each of :data:`FACT_ASPECTS`.
        value: of each fact, one hash of all but place.
        numbers: of each fact, :data:`NUMBERS`.
        keyed: facts of a trajectory or a prompt.
        padding: facts of an element that says it is padding.
        clock: metrics of the wall clock.
        difference: metrics of how far two fields are apart.
    """

    rid: Int64
    step: Int64
    seq: Int64
    time_ns: Int64
    place: Int64
    size: Int64
    micro: Bool
    floating: Bool
    tensor: Bool
    further: Bool
    sliced: Bool
    told: dict[str, UInt64]
    total: UInt64
    row: Int64
    at: Int64
    who: UInt64
    key: UInt64
    said: dict[str, UInt64]
    value: UInt64
    numbers: dict[str, NDArray[np.float64]]
    keyed: Bool
    padding: Bool
    clock: Bool
    difference: Bool

    def ordered(self, by_time: bool) -> Facts:
        """The rows in the order of their events: by clock where several processes wrote, else by number."""
        first = self.time_ns if by_time else self.seq
        order = np.lexsort((self.seq, self.told["process"], first, self.step))
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        for name in (
            *("rid", "step", "seq", "time_ns", "place", "size", "micro", "floating", "tensor", "further", "sliced"),
            "total",
        ):
            setattr(self, name, getattr(self, name)[order])
        self.told = {name: values[order] for name, values in self.told.items()}
        self.row = rank[self.row]
        return self


class Places:
    """The distinct (stage, op, field, entity) of both sides, each a number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, str, str], int] = {}
        self._lock = threading.Lock()

    def numbers(self, scalars: Scalars) -> Int64:
        """The number of each row's place."""
        columns = zip(*(scalars.texts(name) for name in ("stage", "op", "field", "entity")), strict=True)
        with self._lock:  # both sides are read by threads
            found = [self._numbers.setdefault(place, len(self._numbers)) for place in columns]
        return np.array(found, dtype=np.int64)

    def names(self) -> list[tuple[str, str, str, str]]:
        """The places by their numbers."""
        return list(self._numbers)


def facts_of(table: pa.Table, rid: Int64, places: Places) -> Facts:
    """The facts of some rows.

    Args:
        table: rows of a trace, with those of :data:`READ` that are stored.
        rid: ``(rows,)`` id of each.
        places: where their places are numbered.
    """
    scalars, lists = Scalars(table), Lists(table)
    said: dict[str, UInt64] = {}
    for name, columns in _COLUMNS.items():
        found = [one for column in columns if (one := lists.hashed(column)) is not None]
        if name == "fingerprint" and (marks := lists.marks()) is not None:
            found.append(marks)
        said[name] = _sum(found, lists.total)
    op, entity = scalars.texts("op"), np.array(scalars.texts("entity"))
    moved = np.repeat(np.array([one == "reorder" for one in op], dtype=bool), lists.n)
    if (source := lists.hashed("source_index")) is not None:  # the place before a reorder, else a row of the dataset
        said["slot"] = said["slot"] + np.where(moved, source, 0).astype(np.uint64)
        said["tags"] = said["tags"] + np.where(moved, 0, source).astype(np.uint64)
    carried = _sum([one for name in CARRIED if (one := lists.hashed(name)) is not None], lists.total)
    put = np.repeat(np.array([one == "tag" for one in op], dtype=bool), lists.n)
    said["slot"] = said["slot"] + np.where(put, 0, carried).astype(np.uint64)
    said["tags"] = said["tags"] + np.where(put, carried, 0).astype(np.uint64)
    key = lists.hashed("key")
    turn = lists.hashed("turn")
    values = {name: lists.numbers(name) for name in NUMBERS}
    clock, padding = lists.matching("key", _NO_CLOCK, _CLOCKS), lists.flags("is_padding")
    difference = lists.matching("key", (), _DIFFERENCES)
    told = _told(scalars, lists.odd)
    who = _who(scalars)
    alone, asked_rows, asked = _without_elements(table, lists.n)
    counts = np.array([lists.total, len(alone), len(asked_rows)])

    def all_of(values: NDArray[np.generic] | None, *rest: NDArray[np.generic] | None, nothing: object = 0) -> NDArray:  # type: ignore[type-arg]
        parts = (values, *rest, *([None] * (2 - len(rest))))
        kind = next((part.dtype for part in parts if part is not None), np.dtype(np.uint64))
        return np.concatenate(
            [np.full(count, nothing, kind) if part is None else part for part, count in zip(parts, counts, strict=True)]
        )

    row = all_of(np.repeat(np.arange(table.num_rows), lists.n), alone, asked_rows)
    keys = all_of(key, None, asked)
    whose = mixed(who[row] + keys + all_of(turn), "who")
    whose[len(whose) - len(asked_rows) :] += salt("asked")
    said = {name: all_of(values) for name, values in said.items()}
    content = _sum([told[name] for name in _ROW_CONTENT], table.num_rows)[row] + whose
    for name in _FACT_CONTENT:
        content += said[name] * salt(name)
    value = mixed(content, "value")
    total = np.zeros(table.num_rows, dtype=np.uint64)
    np.add.at(total, row[lists.total :], value[lists.total :])
    full = np.flatnonzero(lists.n)
    if len(full):
        total[full] += np.add.reduceat(value[: lists.total], lists.starts[full])
    dtypes = scalars.texts("dtype")
    trajectory = np.isin(entity, ("trajectory", "prompt"))
    return Facts(
        rid=rid,
        step=scalars.integers("global_steps", -1),
        seq=scalars.integers("seq"),
        time_ns=scalars.integers("time_ns"),
        place=places.numbers(scalars),
        size=np.bincount(row, minlength=table.num_rows).astype(np.int64),
        micro=scalars.known("micro_batch"),
        floating=np.array(["float" in one for one in dtypes], dtype=bool),
        tensor=entity == "param",
        further=np.any([scalars.part_integers("coord", name) > 0 for name in _INSIDE_A_REPLICA], axis=0),
        sliced=np.isin(np.array(scalars.texts("field")), _SLICES),
        told=told,
        total=total,
        row=row,
        at=all_of(np.arange(lists.total) - np.repeat(lists.starts, lists.n) + 1, None, _below(asked_rows)),
        who=whose,
        key=keys,
        said=said,
        value=value,
        numbers={name: all_of(_or_nan(one, lists.total), nothing=np.nan) for name, one in values.items()},
        keyed=trajectory[row],
        padding=all_of(padding, nothing=False),
        clock=all_of(clock, nothing=False) & (entity == "metric")[row],
        difference=all_of(difference, nothing=False) & (entity == "metric")[row],
    )


def joined(parts: list[Facts]) -> Facts:
    """Facts of several row groups, one behind the other."""

    def all_of(name: str) -> NDArray:  # type: ignore[type-arg]
        return np.concatenate([getattr(part, name) for part in parts])

    def each(name: str) -> dict[str, NDArray]:  # type: ignore[type-arg]
        return {key: np.concatenate([getattr(part, name)[key] for part in parts]) for key in getattr(parts[0], name)}

    firsts = np.cumsum([0, *(len(part.rid) for part in parts)])
    named = {
        name: all_of(name) for name in Facts.__dataclass_fields__ if name not in ("told", "said", "numbers", "row")
    }
    row = np.concatenate([part.row + first for part, first in zip(parts, firsts, strict=False)])
    return Facts(**named, told=each("told"), said=each("said"), numbers=each("numbers"), row=row)


def _who(scalars: Scalars) -> UInt64:
    parts = [scalars.hashed(name) for name in _WHO]
    return _sum([*parts, scalars.part("weights", "phase"), scalars.part("loss", "term")], scalars.rows)


def _told(scalars: Scalars, odd: UInt64) -> dict[str, UInt64]:
    attrs, of_topology = scalars.pairs("attrs", OF_TOPOLOGY)
    first, others = scalars.axes("shape")
    context = [
        scalars.parts("weights", ("phase", "cache_epoch")),
        scalars.parts("sampling"),
        scalars.parts("loss", ("term",)),
        scalars.parts("optim"),
        scalars.parts("resident", ("bytes",)),
        odd,
    ]
    rows = [scalars.hashed(name) for name in ("n", "asked_n", "nbytes", "micro_batch")]
    return {
        **{name: scalars.hashed(name) for name in (*_FORM, "process")},
        "layout": scalars.hashed("layout") + others,
        "context": _sum(context, scalars.rows),
        "attrs": attrs,
        "rank": scalars.hashed("rank") + scalars.parts("coord"),
        "topology": scalars.parts("topology") + of_topology,
        "counters": scalars.part("weights", "cache_epoch"),
        "rows": _sum([*rows, first, scalars.part("resident", "bytes")], scalars.rows),
    }


def _without_elements(table: pa.Table, n: Int64) -> tuple[Int64, Int64, UInt64]:
    """Rows that are a fact themselves; and of each key asked for in vain, its row and its hash."""
    rows: list[int] = []
    keys: list[int] = []
    if "missing" in table.column_names and table["missing"].null_count < table.num_rows:
        for row, names in enumerate(whole(table["missing"]).to_pylist()):
            rows += [row] * len(names or ())
            keys += [hash(name) & 0xFFFFFFFFFFFFFFFF for name in names or ()]
    asked = np.array(rows, dtype=np.int64)
    alone = np.flatnonzero((n == 0) & ~np.isin(np.arange(table.num_rows), asked))
    return alone, asked, mixed(np.array(keys, dtype=np.uint64), "key")


def _below(rows: Int64) -> Int64:
    """-1, -2, ... within each run of one row."""
    first = np.searchsorted(rows, rows)
    return first - np.arange(len(rows)) - 1


def _or_nan(values: NDArray[np.float64] | None, count: int) -> NDArray[np.float64]:
    return np.full(count, np.nan) if values is None else values


def _sum(parts: list[UInt64], count: int) -> UInt64:
    total = np.zeros(count, dtype=np.uint64)
    for part in parts:
        total += part
    return total
