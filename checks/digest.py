"""One pass over the files that makes the catalogue cheap: row signatures, and the few elements checks always need.

A trace repeats itself: a step of 200 rows has about 30 distinct contents and a dozen distinct key lists. So each row
is reduced to four numbers, and a check compares those; elements are looked at only where numbers differ.

A *signature* is ``sum over elements of mix(hash(key) + content)`` modulo 2^64. It does not depend on the order of the
rows of a batch, yet it binds every content to its key: a value that moved to another key changes it. It adds up, so
micro-batches sum to their mini-batch and padding rows to the batch. Two different contents agree by accident once in
2^64. (Summing fingerprints without their keys would be blind to swapped rows; this is not that.)

- ``k`` keys alone; ``v`` keys with valid lengths; ``c`` with lengths and fingerprints; ``m`` with mask sums and prints;
  ``w``, of log-probs and entropy over whole sequences, is the ``c`` that their response's windows would have.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lineage.checks.cells import CELLS, LENGTH_TAGS, Words
from lineage.checks.first_said import CARRIED, CONTENT, First, Place, coded, early, texts
from lineage.checks.flat import TYPES, Flat, Int64, UInt64, bound, dictionary, indices, unsigned
from lineage.checks.marks import WINDOWED, Marks
from lineage.checks.row_groups import RowGroups, row_groups
from lineage.schema import COLUMNS
from lineage.traces.trace import row_ids

SCALARS = (
    "run_id", "seq", "process", "rank", "coord", "time_ns", "global_steps", "stage", "op", "partition", "ppo_epoch",
    "update_index", "mini_batch", "micro_batch", "entity", "field", "against", "producer", "consumer", "container",
    "layout", "span", "dtype", "device", "shape", "requires_grad", "n", "asked_n", "missing", "weights", "sampling",
    "loss", "optim", "topology", "resident", "attrs",
)  # fmt: skip
_SIGNED = ("key", "valid_length", "fingerprint", "mask_sum", "mask_fingerprint", "slot", "marks")
#: what a row says of all its elements together, by its name in ``events``: a column and how it is taken together
TOTALS: dict[str, tuple[str, str]] = {
    "tokens": ("valid_length", "sum"),
    "masked": ("mask_sum", "sum"),
    "outside": ("nnz_out", "sum"),
    "nonzero": ("nnz", "sum"),
    "nonfinite": ("nonfinite", "sum"),
    "nonfinite_in": ("nonfinite_in", "sum"),
    "low": ("min_in", "min"),
    "high": ("max_in", "max"),
}
_TOGETHER: dict[str, tuple[np.ufunc, float]] = {
    "sum": (np.add, 0),
    "min": (np.minimum, np.inf),
    "max": (np.maximum, -np.inf),
}
_OWN = ("i", "v", "c", "m", "before")  # not columns of the trace
_WIDE = {**CONTENT, **{f"{name}_tag": ("sum",) for name in LENGTH_TAGS}}
_KEPT = tuple(
    dict.fromkeys(
        name
        for names in (*(cells.columns for cells in CELLS.values()), *_WIDE.values())
        for name in names
        if name not in _OWN
    )
)
_READ = tuple(dict.fromkeys((*SCALARS, *_SIGNED, *_KEPT, *(column for column, _ in TOTALS.values()))))
_LISTS = tuple(name for name in _READ if name not in SCALARS)
_WHERE = ("run_id", "global_steps", "stage", "op", "entity", "field")
# Elements a run of rows must hold on average to be worth copying on its own.
_RUN = 256


@dataclass
class Digest:
    """What one pass over a trace leaves, as Arrow tables.

    Attributes:
        events: one row per trace row: its scalars, ``rid``, the signatures ``k v c m`` (null where not known),
            ``w`` (see above), ``queue`` (it passed through the queue), its :data:`TOTALS` and ``said`` (its elements
            are in ``content``).
        keyed: the distinct key lists of trajectories and prompts, one row per element: ``k``, ``id``.
        names: ``id``, ``key`` and ``run``, a number; a key may be there more than once.
        content: elements as they were first written, side by side: ``id`` and, for each of :data:`CONTENT` and of the
            length tags, ``<field>_rid`` (the row that said it) and its columns. A key may be there more than once.
        cells: elements of the other rows every check needs, a table for each of :data:`CELLS`.
        seen: listed columns with at least one value.
    """

    events: pa.Table
    keyed: pa.Table
    names: pa.Table
    content: pa.Table
    cells: dict[str, pa.Table]
    seen: frozenset[str]

    def first(self) -> pa.Table:
        """The content with every key once: of each column the first value that is not null, of a tag the greatest."""
        if len(np.unique(self.content["id"].to_numpy())) == len(self.content):
            return self.content
        names = self.content.column_names[1:]
        how = [(name, "max" if name.endswith("_tag_sum") else "first") for name in names]
        grouped = self.content.group_by("id", use_threads=False).aggregate(how)
        return grouped.select(["id", *map("_".join, how)]).rename_columns(["id", *names])


class _Claims:
    """Key lists already kept by some thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lists: set[int] = set()

    def first_seen(self, signatures: UInt64) -> NDArray[np.bool_]:
        """True for each signature that nobody has claimed yet; claims them."""
        found = signatures.tolist()
        with self._lock:
            fresh = [signature not in self._lists for signature in found]
            self._lists.update(found)
        return np.array(fresh, dtype=bool)


@dataclass(frozen=True)
class Chosen:
    """Some rows of a trace: the row groups they lie in, and in those the ids of the rows.

    Attributes:
        groups: source and row group.
        rids: ids of rows, ascending.
    """

    groups: frozenset[tuple[int, int]]
    rids: Int64

    def among(self, rids: Int64) -> NDArray[np.bool_]:
        """Which of these rows are chosen."""
        at = np.searchsorted(self.rids, rids)
        return self.rids[np.minimum(at, len(self.rids) - 1)] == rids if len(self.rids) else np.zeros(len(rids), bool)


def opened(sources: Sequence[Path | pa.RecordBatch]) -> list[RowGroups]:
    """The row groups of a trace, to be digested all together or some at a time.

    Raises:
        TraceError: a file cannot be read.
    """
    return row_groups(sources, _READ)


def digest(
    sources: Sequence[RowGroups],
    threads: int = 2,
    unseen: Collection[tuple[str, int]] = (),
    chosen: Chosen | None = None,
) -> Digest:
    """Read row groups once, one at a time on ``threads`` threads; what ``unseen`` steps say is left.

    Args:
        sources: the row groups of one trace.
        threads: to read with.
        unseen: run and step of what is not judged.
        chosen: the rows to read; all when None.

    Raises:
        TraceError: a file cannot be read.
    """
    claims = _Claims()
    seen: set[str] = set()
    tasks = [
        (source, group)
        for source in sources
        for group in range(len(source.first_row) - 1)
        if chosen is None or (source.number, group) in chosen.groups
    ]
    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        apply = pool.map if threads > 1 else map
        wrote = frozenset[Place]().union(*apply(lambda task: early(task[0].read(task[1], _WHERE)), tasks))
        first = First(wrote, frozenset(unseen))
        parts = list(apply(lambda task: _Group(claims, first, task[0], task[1], chosen).read(seen), tasks))
    events, keyed, named, content, *cells = (
        pa.concat_tables(column, promote_options="permissive") for column in zip(*parts, strict=True)
    )
    return Digest(events, keyed, named, content, dict(zip(CELLS, cells, strict=True)), frozenset(seen))


def run_number(run_id: str) -> int:
    """What a run gives to the ids of its keys; rows without a run are that of no name."""
    return hash(run_id)


class _Group:
    """One row group: lists laid flat, signatures summed, the needed elements kept."""

    def __init__(self, claims: _Claims, first: First, source: RowGroups, group: int, chosen: Chosen | None) -> None:
        self.claims, self.first, self.table = claims, first, source.read(group)
        self.rid = row_ids(source.number, int(source.first_row[group]), self.table.num_rows)
        if chosen is not None and not (wanted := chosen.among(self.rid)).all():
            self.table, self.rid = self.table.filter(pa.array(wanted)), self.rid[wanted]
        self.rows = self.table.num_rows
        self.key = Flat.of(self.table, "key")
        self.n = self.key.counts
        # A key's id is its hash (siphash, 64 bits): no dictionary to share between threads, and the signatures need it.
        distinct = dictionary(self.key.values)
        keys = distinct.to_pylist()
        # Two runs may have the same keys: a key's id is its run's as well.
        runs, which = np.unique(texts(self.table, "run_id"), return_inverse=True)
        salts = np.fromiter(map(run_number, runs.tolist()), np.int64, len(runs))
        numbers = np.fromiter(map(hash, keys), np.int64, len(keys))
        self.ids = numbers[indices(self.key.values)] ^ np.repeat(salts[which], self.n)
        self.names = pa.table(
            {
                "id": pa.array((salts[:, None] ^ numbers).ravel()),
                "key": pa.chunked_array([distinct] * len(runs), distinct.type),
                "run": pa.array(np.repeat(salts, len(numbers))),
            }
        )
        self.hashes = self.ids.view(np.uint64)

    def read(self, seen: set[str]) -> tuple[pa.Table, ...]:
        """Events, key lists, names, content, and the cells in the order of :data:`CELLS`."""
        lists = {name: Flat.of(self.table, name) for name in _LISTS}
        seen.update(name for name, values in lists.items() if len(values.values) > values.values.null_count)
        length, prints = self._aligned(lists["valid_length"]), self._aligned(lists["fingerprint"])
        sums, masks = self._aligned(lists["mask_sum"]), self._aligned(lists["mask_fingerprint"])
        elements: dict[str, UInt64 | None] = {"k": self.hashes, "v": None, "c": None, "m": None}
        if length is not None:
            elements["v"] = bound(self.hashes, length)
            elements["c"] = None if prints is None else bound(self.hashes, length, prints)
        if sums is not None:
            elements["m"] = bound(self.hashes, sums, masks)
        needs = {"k": (), "v": ("valid_length",), "c": ("valid_length", "fingerprint"), "m": ("mask_sum",)}
        summed = {
            name: self._sum(values, [lists[column] for column in needs[name]]) for name, values in elements.items()
        }
        signatures = {name: pa.array(total, mask=~known) for name, (total, known) in summed.items()}
        said = self._said()
        marked = np.zeros(self.rows, dtype=bool)
        marked[[row for block in said for field, row in block.items() if field not in CARRIED]] = True
        events = self._events(signatures, lists).append_column("said", pa.array(marked))
        marks = Marks.of(lists["marks"])
        words = Words(*(coded(self.table, name) for name in ("stage", "op", "entity", "field")))
        events = events.append_column("w", self._windows(marks, words))
        content = self._content(said, lists, elements)
        cells = [self._cells(kind.wanted(words), lists, kind.columns, marks) for kind in CELLS.values()]
        return (events, self._keyed(summed["k"][0]), self.names, content, *cells)

    def _aligned(self, values: Flat) -> UInt64 | None:
        """The list's values beside the keys, 0 where the row has none; None when no row has any."""
        if not values.counts.any():
            return None
        flat = unsigned(values.values)
        if np.array_equal(values.counts, self.n):
            return flat
        fits = (values.counts == self.n) & (self.n > 0)
        result = np.zeros(len(self.ids), dtype=np.uint64)
        edges = np.flatnonzero(np.diff(fits, prepend=False, append=False)).reshape(-1, 2)
        if len(edges) * _RUN > len(flat):
            result[np.repeat(fits, self.n)] = flat[np.repeat(fits, values.counts)]
            return result
        # Long runs of rows that have it are copied whole: three times as fast as picking elements.
        for first, last in (edges - [0, 1]).tolist():
            at, start = self.key.starts[first], values.starts[first]
            count = values.starts[last] + values.counts[last] - start
            result[at : at + count] = flat[start : start + count]
        return result

    def _sum(self, elements: UInt64 | None, needs: list[Flat]) -> tuple[UInt64, NDArray[np.bool_]]:
        """Signature of every row, and whether the row has what it is made of."""
        if elements is None:
            return np.zeros(self.rows, dtype=np.uint64), np.zeros(self.rows, dtype=bool)
        known = self.key.valid.copy()
        for column in needs:
            known &= column.valid & (column.counts == self.n)
        total = np.zeros(self.rows, dtype=np.uint64)
        full = np.flatnonzero(self.n)
        if len(full):
            total[full] = np.add.reduceat(elements, self.key.starts[full])
        return total, known

    def _events(self, signatures: dict[str, pa.Array], lists: dict[str, Flat]) -> pa.Table:
        columns: dict[str, Any] = {"rid": pa.array(self.rid)}
        for name in SCALARS:
            columns[name] = self.table[name] if name in self.table.column_names else pa.nulls(self.rows, _arrow(name))
        # A get says how many keys it asked for; a put has slots in a partition. (A recorder that knows a key's slot may
        # show it on rows that never touched the queue: slots alone prove nothing.)
        asked = _said_something(columns["asked_n"])
        placed = _said_something(columns["partition"]) & lists["slot"].known()
        columns["queue"] = pa.array(np.where(texts(self.table, "op") == "consume", asked, placed))
        for name, (column, together) in TOTALS.items():
            columns[name] = self._total(lists[column], TYPES[column], together)
        return pa.table(columns | signatures)

    def _total(self, values: Flat, type_: pa.DataType, together: str) -> pa.Array:
        """One number a row; null where the row has no such list or nothing in it."""
        filled = np.flatnonzero(values.counts)
        if not len(filled):
            return pa.nulls(self.rows, type_)
        ufunc, empty = _TOGETHER[together]
        flat = (pc.fill_null(values.values, empty) if values.values.null_count else values.values).to_numpy()
        total = np.full(self.rows, empty, dtype=flat.dtype)
        total[filled] = ufunc.reduceat(flat, values.starts[filled])
        known = values.valid if together == "sum" else np.isfinite(total)
        return pa.array(total, type_, mask=~known)

    def _keyed(self, k: UInt64) -> pa.Table:
        entity = texts(self.table, "entity")
        wanted = np.flatnonzero(((entity == "trajectory") | (entity == "prompt")) & (self.n > 0))
        signatures, first = np.unique(k[wanted], return_index=True)
        rows, elements = self._spread(wanted[first][self.claims.first_seen(signatures)])
        return pa.table({"k": pa.array(k[rows]), "id": pa.array(self.ids[elements])})

    def _windows(self, marks: Marks, words: Words) -> pa.Array:
        """Signature of the response's windows of every row that keeps one value for each token of a sequence."""
        total = np.zeros(self.rows, dtype=np.uint64)
        kept = words.has("entity", "trajectory") & words.has("field", *WINDOWED) & (marks.counts == 3 * self.n)
        rows = np.flatnonzero(kept & (self.n > 0))
        if len(rows):
            repeated, at = self._spread(rows)
            lengths, prints = marks.windows(repeated, at - self.key.starts[repeated])
            starts = np.cumsum(self.n[rows]) - self.n[rows]
            total[rows] = np.add.reduceat(bound(self.hashes[at], lengths, prints), starts)
        return pa.array(total, mask=~(kept & (self.n > 0)))

    def _cells(
        self, needed: NDArray[np.bool_], lists: dict[str, Flat], names: tuple[str, ...], marks: Marks
    ) -> pa.Table:
        wanted = np.flatnonzero(needed)
        rows, at = self._spread(wanted)
        inside = at - self.key.starts[rows]
        columns: dict[str, Any] = {"rid": pa.array(self.rid[rows]), "id": pa.array(self.ids[at])}
        for name in names:
            if name == "i":
                columns[name] = pa.array(inside + 1)
            elif name == "before":
                columns[name] = marks.first(rows, inside, self.n)
            elif len(wanted) and (lists[name].counts[wanted] == self.n[wanted]).all():
                columns[name] = _whole_rows(lists[name], name, wanted)
            else:
                columns[name] = self._taken(lists[name], name, rows, inside)
        return pa.table(columns)

    def _content(
        self, blocks: list[dict[str, int]], lists: dict[str, Flat], elements: dict[str, UInt64 | None]
    ) -> pa.Table:
        first = np.array([next(iter(block.values())) for block in blocks], dtype=np.int64)
        counts = self.n[first]
        rows, at = self._spread(first)
        inside = at - self.key.starts[rows]
        columns: dict[str, Any] = {"id": pa.array(self.ids[at])}
        for field, names in _WIDE.items():
            where = np.repeat(np.array([block.get(field, -1) for block in blocks], dtype=np.int64), counts)
            none = where < 0
            columns[f"{field}_rid"] = pa.array(self.rid[where], mask=none)
            for name in names:
                flat = elements.get(name)
                if name not in _OWN:
                    taken = self._taken(lists[name], name, where, inside, none)
                elif flat is None:
                    taken = pa.nulls(len(at), pa.uint64())
                else:
                    taken = pa.array(flat[np.where(none, 0, self.key.starts[where] + inside)], mask=none)
                columns[f"{field}_{name}"] = taken
        return pa.table(columns)

    def _said(self) -> list[dict[str, int]]:
        """Rows that say content first, in blocks of one ordered key list, with one row a field."""
        entity, op, name = (texts(self.table, column) for column in ("entity", "op", "field"))
        tag = (op == "tag") & np.isin(name, tuple(LENGTH_TAGS))
        written = (op == "produce") & np.isin(name, tuple(CONTENT))
        blocks: dict[bytes, list[dict[str, int]]] = {}
        rows = np.flatnonzero((entity == "trajectory") & (tag | written) & (self.n > 0))
        for row in self.first.among(self.table, rows):
            field = f"{name[row]}_tag" if tag[row] else str(name[row])
            start = self.key.starts[row]
            alike = blocks.setdefault(self.ids[start : start + self.n[row]].tobytes(), [])
            block = next((block for block in alike if field not in block), None)
            if block is None:
                alike.append({field: row})
            else:
                block[field] = row
        return [block for alike in blocks.values() for block in alike]

    def _taken(
        self, values: Flat, name: str, rows: Int64, inside: Int64, none: NDArray[np.bool_] | None = None
    ) -> pa.Array:
        """A list's value at each of these places; null where there is no row, or the row has no such list."""
        type_ = TYPES[name]
        missing = (values.counts != self.n)[rows]
        if none is not None:
            missing |= none
        if missing.all():
            return pa.nulls(len(rows), type_)
        taken = values.values.take(pa.array(inside + values.starts[rows], mask=missing if missing.any() else None))
        return taken.cast(type_) if taken.type != type_ else taken

    def _spread(self, rows: NDArray[Any]) -> tuple[Int64, Int64]:
        """Row number and flat position of every element of these rows."""
        counts = self.n[rows]
        ends = np.cumsum(counts)
        inside = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        repeated = np.repeat(rows, counts)
        return repeated, self.key.starts[repeated] + inside


def _whole_rows(values: Flat, name: str, rows: NDArray[Any]) -> pa.Array:
    """A list's values of these rows, one row behind the other: twice as fast as picking them one by one."""
    places = zip(values.starts[rows].tolist(), values.counts[rows].tolist(), strict=True)
    joined = pa.concat_arrays([values.values.slice(start, count) for start, count in places])
    return joined.cast(TYPES[name]) if joined.type != TYPES[name] else joined


def _said_something(values: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    valid = values.is_valid()  # a bit an element in an array of nulls: numpy needs a copy
    numbers = valid.to_numpy() if isinstance(valid, pa.ChunkedArray) else valid.to_numpy(zero_copy_only=False)
    return np.asarray(numbers, dtype=bool)


def _arrow(name: str) -> pa.DataType:
    return next(column.arrow_type for column in COLUMNS if column.name == name)
