"""One pass over the files that makes the catalogue cheap: row signatures, and the few elements checks always need.

A trace repeats itself: a step of 200 rows has about 30 distinct contents and a dozen distinct key lists. So each row
is reduced to four numbers, and a check compares those; elements are looked at only where numbers differ.

A *signature* is ``sum over elements of mix(hash(key) + content)`` modulo 2^64. It does not depend on the order of the
rows of a batch, yet it binds every content to its key: a value that moved to another key changes it. It adds up, so
micro-batches sum to their mini-batch and padding rows to the batch. Two different contents agree by accident once in
2^64. (Summing fingerprints without their keys would be blind to swapped rows; this is not that.)

- ``k`` keys alone; ``v`` keys with valid lengths; ``c`` with lengths and fingerprints; ``m`` with mask sums and prints.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from lineage.schema import COLUMNS

# Fields whose content per trajectory the others are held against.
BASE_FIELDS = (
    "prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids", "uid", "rm_scores", "num_turns",
)  # fmt: skip
SCALARS = (
    "run_id", "seq", "process", "time_ns", "global_steps", "stage", "op", "partition", "ppo_epoch", "mini_batch",
    "micro_batch", "entity", "field", "producer", "consumer", "layout", "span", "dtype", "shape", "n", "asked_n",
    "coord", "topology", "attrs", "resident",
)  # fmt: skip
_SIGNED = ("key", "valid_length", "fingerprint", "mask_sum", "mask_fingerprint", "nnz_out", "slot")
# Elements kept, by what they tell: a trajectory's content, the keys and tags of a batch, prompts and metrics.
CELLS: dict[str, tuple[str, ...]] = {
    "content_cells": ("valid_length", "fingerprint", "mask_sum", "mask_fingerprint", "sum"),
    "key_cells": (
        "is_padding", "global_steps_tag", "min_global_steps", "max_global_steps", "reason", "source_index",
    ),
    "group_cells": ("status", "reason", "expected", "sum"),
}  # fmt: skip
_KEPT = tuple(dict.fromkeys(name for names in CELLS.values() for name in names))
_ODD1, _ODD2 = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xC2B2AE3D27D4EB4F)
_S29, _S32 = np.uint64(29), np.uint64(32)
# Facts worked on at a time: the arrays then stay in the processor's cache.
_BLOCK = 1 << 16
_TYPES = {column.name: column.type for column in COLUMNS}

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]


@dataclass
class Digest:
    """What one pass over a trace leaves, as Arrow tables.

    Attributes:
        events: one row per trace row: its scalars, ``rid``, the signatures ``k v c m`` (null where not known),
            ``queue`` (it passed through the queue) and ``outside`` (elements outside the mask that are not zero).
        keyed: the distinct key lists of trajectories and prompts, one row per element: ``k``, ``id``.
        names: ``id`` and ``key``; a key may be there more than once.
        cells: elements of the rows every check needs, a table for each of :data:`CELLS`; content has its per-element
            signatures ``ve ce me``.
        seen: listed columns with at least one value.
    """

    events: pa.Table
    keyed: pa.Table
    names: pa.Table
    cells: dict[str, pa.Table]
    seen: frozenset[str]


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


def digest(files: Sequence[Path], threads: int = 2) -> Digest:
    """Read the files once, a row group at a time on ``threads`` threads."""
    claims = _Claims()
    seen: set[str] = set()
    tasks: list[tuple[_File, int]] = []
    for number, path in enumerate(files):
        opened = _File(number, path)
        tasks += [(opened, group) for group in range(opened.metadata.num_row_groups)]
    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        parts = list(pool.map(lambda task: _Group(claims, *task).read(seen), tasks))
    events, keyed, named, *cells = (
        pa.concat_tables(column, promote_options="permissive") for column in zip(*parts, strict=True)
    )
    return Digest(events, keyed, named, dict(zip(CELLS, cells, strict=True)), frozenset(seen))


class _File:
    """One file's metadata, read once: parsing the footer for every row group would cost more than the data."""

    def __init__(self, number: int, path: Path) -> None:
        self.number, self.path = number, path
        self._open = threading.local()
        self.metadata = pq.read_metadata(path)
        stored = set(pq.read_schema(path).names)
        self.columns = [name for name in dict.fromkeys((*SCALARS, *_SIGNED, *_KEPT)) if name in stored]
        counts = [self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups)]
        self.first_row = np.concatenate([[0], np.cumsum(counts)])

    def read(self, group: int) -> pa.Table:
        dictionaries = [f"{name}.list.element" for name in ("key", "status", "reason") if name in self.columns]
        # One reader per thread: opening the file again for each row group costs as much as reading it.
        file = getattr(self._open, "file", None)
        if file is None:
            file = self._open.file = pq.ParquetFile(self.path, metadata=self.metadata, read_dictionary=dictionaries)
        return file.read_row_group(group, columns=self.columns, use_threads=False)


class _Group:
    """One row group: lists laid flat, signatures summed, the needed elements kept."""

    def __init__(self, claims: _Claims, file: _File, group: int) -> None:
        self.claims, self.table = claims, file.read(group)
        self.rows = self.table.num_rows
        self.rid = (file.number << 40) + file.first_row[group] + np.arange(self.rows)
        self.key = _List.of(self.table, "key")
        self.n = self.key.counts
        # A key's id is its hash (siphash, 64 bits): no dictionary to share between threads, and the signatures need it.
        self.distinct = _dictionary(self.key.values)
        keys = self.distinct.to_pylist()
        self.numbers = np.fromiter(map(hash, keys), np.int64, len(keys))
        self.ids = self.numbers[_indices(self.key.values)]
        self.hashes = self.ids.view(np.uint64)

    def read(self, seen: set[str]) -> tuple[pa.Table, ...]:
        """Events, key lists, names, and the cells in the order of :data:`CELLS`."""
        lists = {name: _List.of(self.table, name) for name in dict.fromkeys((*_SIGNED, *_KEPT))}
        seen.update(name for name, values in lists.items() if len(values.values) > values.values.null_count)
        length, prints = self._aligned(lists["valid_length"]), self._aligned(lists["fingerprint"])
        sums, masks = self._aligned(lists["mask_sum"]), self._aligned(lists["mask_fingerprint"])
        elements: dict[str, UInt64 | None] = {"k": self.hashes, "v": None, "c": None, "m": None}
        if length is not None:
            elements["v"] = _bound(self.hashes, length)
            elements["c"] = None if prints is None else _bound(self.hashes, length, prints)
        if sums is not None:
            elements["m"] = _bound(self.hashes, sums, masks)
        needs = {"k": (), "v": ("valid_length",), "c": ("valid_length", "fingerprint"), "m": ("mask_sum",)}
        summed = {
            name: self._sum(values, [lists[column] for column in needs[name]]) for name, values in elements.items()
        }
        signatures = {name: pa.array(total, mask=~known) for name, (total, known) in summed.items()}
        events = self._events(signatures, lists)
        content = {name: elements[signature] for name, signature in (("ve", "v"), ("ce", "c"), ("me", "m"))}
        cells = [
            self._cells(needed, lists, columns, content if name == "content_cells" else {})
            for (name, columns), needed in zip(CELLS.items(), self._needed(), strict=True)
        ]
        names = pa.table({"id": pa.array(self.numbers), "key": self.distinct})
        return (events, self._keyed(summed["k"][0]), names, *cells)

    def _aligned(self, values: _List) -> UInt64 | None:
        """The list's values beside the keys, 0 where the row has none; None when no row has any."""
        if not values.counts.any():
            return None
        flat = _unsigned(values.values)
        if np.array_equal(values.counts, self.n):
            return flat
        fits = (values.counts == self.n) & (self.n > 0)
        result = np.zeros(len(self.ids), dtype=np.uint64)
        result[np.repeat(fits, self.n)] = flat[np.repeat(fits, values.counts)]
        return result

    def _sum(self, elements: UInt64 | None, needs: list[_List]) -> tuple[UInt64, NDArray[np.bool_]]:
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

    def _events(self, signatures: dict[str, pa.Array], lists: dict[str, _List]) -> pa.Table:
        columns: dict[str, Any] = {"rid": pa.array(self.rid)}
        for name in SCALARS:
            columns[name] = self.table[name] if name in self.table.column_names else pa.nulls(self.rows, _arrow(name))
        # A get says how many keys it asked for; a put has slots in a partition. (A recorder that knows a key's slot may
        # show it on rows that never touched the queue: slots alone prove nothing.)
        asked = np.asarray(columns["asked_n"].is_valid().to_numpy(), dtype=bool)
        placed = np.asarray(columns["partition"].is_valid().to_numpy(), dtype=bool) & lists["slot"].known()
        columns["queue"] = pa.array(np.where(self._scalar("op") == "consume", asked, placed))
        outside = lists["nnz_out"]
        total = np.zeros(self.rows, dtype=np.int64)
        full = np.flatnonzero(outside.counts)
        if len(full):
            total[full] = np.add.reduceat(_unsigned(outside.values).view(np.int64), outside.starts[full])
        columns["outside"] = pa.array(total, mask=~outside.valid)
        return pa.table(columns | signatures)

    def _keyed(self, k: UInt64) -> pa.Table:
        entity = self._scalar("entity")
        wanted = np.flatnonzero(((entity == "trajectory") | (entity == "prompt")) & (self.n > 0))
        signatures, first = np.unique(k[wanted], return_index=True)
        rows, elements = self._spread(wanted[first][self.claims.first_seen(signatures)])
        return pa.table({"k": pa.array(k[rows]), "id": pa.array(self.ids[elements])})

    def _cells(
        self,
        needed: NDArray[np.bool_],
        lists: dict[str, _List],
        names: tuple[str, ...],
        signatures: dict[str, UInt64 | None],
    ) -> pa.Table:
        rows, at = self._spread(np.flatnonzero(needed))
        columns: dict[str, Any] = {
            "rid": pa.array(self.rid[rows]),
            "i": pa.array(at - self.key.starts[rows] + 1),
            "id": pa.array(self.ids[at]),
        }
        for name in names:
            values = lists[name]
            fits = values.counts[rows] == self.n[rows]
            where = pa.array(at - self.key.starts[rows] + values.starts[rows], mask=~fits)
            taken = values.values.take(where) if fits.any() else pa.nulls(len(at), _TYPES[name])
            columns[name] = taken.cast(_TYPES[name]) if taken.type != _TYPES[name] else taken
        for name, flat in signatures.items():
            columns[name] = pa.nulls(len(at), pa.uint64()) if flat is None else pa.array(flat[at])
        return pa.table(columns)

    def _needed(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Rows whose elements are kept, for each of :data:`CELLS`."""
        entity, op, name = self._scalar("entity"), self._scalar("op"), self._scalar("field")
        trajectory, prompt, tag = entity == "trajectory", entity == "prompt", op == "tag"
        lengths = tag & np.isin(name, ("prompt_len", "response_len", "seq_len"))
        content = trajectory & (((op == "produce") & np.isin(name, BASE_FIELDS)) | lengths)
        whole = (name == "key") & np.isin(op, ("produce", "pad", "reorder"))
        keys = trajectory & (whole | (tag & ~lengths))
        groups = prompt & np.isin(op, ("produce", "tag", "filter"))
        return content, keys, groups | ((entity == "metric") & (name == "metrics"))

    def _spread(self, rows: NDArray[Any]) -> tuple[Int64, Int64]:
        """Row number and flat position of every element of these rows."""
        counts = self.n[rows]
        ends = np.cumsum(counts)
        inside = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        repeated = np.repeat(rows, counts)
        return repeated, self.key.starts[repeated] + inside

    def _scalar(self, name: str) -> NDArray[Any]:
        return np.asarray(self.table[name].to_numpy(), dtype=object).astype(str)


@dataclass(frozen=True)
class _List:
    """A list column laid flat: where each row starts, how many elements it has, whether it is there."""

    starts: Int64
    counts: Int64
    valid: NDArray[np.bool_]
    values: pa.Array

    @classmethod
    def of(cls, table: pa.Table, name: str) -> _List:
        rows = table.num_rows
        if name not in table.column_names:
            nothing = np.zeros(rows, dtype=np.int64)
            return cls(nothing, nothing, np.zeros(rows, dtype=bool), pa.array([], _TYPES[name]))
        column = table[name]
        lists = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        offsets = lists.offsets.to_numpy().astype(np.int64)
        first, last = int(offsets[0]), int(offsets[-1])
        offsets -= first
        counts, values = np.diff(offsets), lists.values.slice(first, last - first)
        if lists.null_count == 0:
            return cls(offsets[:-1], counts, np.ones(rows, dtype=bool), values)
        valid = np.asarray(lists.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
        return cls(offsets[:-1], counts * valid, valid, values)

    def known(self) -> NDArray[np.bool_]:
        """Rows whose list is there and says something: a list of nulls says no more than a null list."""
        result = self.valid.copy()
        full = np.flatnonzero(self.counts)
        if self.values.null_count and len(full):
            said = np.asarray(self.values.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
            result[full] = np.logical_or.reduceat(said, self.starts[full])
        return result


def _bound(hashes: UInt64, first: UInt64, second: UInt64 | None = None) -> UInt64:
    """Each element's key and content spread over 64 bits, so that adding up cannot cancel what differs."""
    result = np.empty_like(hashes)
    scratch = np.empty(min(_BLOCK, len(hashes)), dtype=np.uint64)
    for start in range(0, len(hashes), _BLOCK):
        stop = start + _BLOCK
        z = result[start:stop]
        other = scratch[: len(z)]
        np.multiply(first[start:stop], _ODD2, out=z)
        z += hashes[start:stop]
        if second is not None:
            z += np.multiply(second[start:stop], _ODD1, out=other)
        z ^= np.right_shift(z, _S29, out=other)
        z *= _ODD1
        z ^= np.right_shift(z, _S32, out=other)
    return result


def _dictionary(values: pa.Array) -> pa.Array:
    distinct = values.dictionary if isinstance(values, pa.DictionaryArray) else values
    return distinct.cast(pa.string())


def _indices(values: pa.Array) -> Int64:
    if isinstance(values, pa.DictionaryArray):
        indices = values.indices
        filled = pc.fill_null(indices, 0) if indices.null_count else indices
        return np.asarray(filled.to_numpy(zero_copy_only=False))
    return np.arange(len(values))


def _unsigned(values: pa.Array) -> UInt64:
    filled = pc.fill_null(values, 0) if values.null_count else values
    flat = np.asarray(filled.to_numpy(zero_copy_only=False))
    return flat if flat.dtype == np.uint64 else flat.astype(np.int64, copy=False).view(np.uint64)


def _arrow(name: str) -> pa.DataType:
    return next(column.arrow_type for column in COLUMNS if column.name == name)
