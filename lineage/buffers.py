"""The rows of one step as one Arrow record batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lineage.contents import Contents
from lineage.elements import TAG_NAMES
from lineage.fingerprint import chained_prefixes
from lineage.row import FinishedRow
from lineage.schema import COLUMNS, MARK, schema
from lineage.statistics import RowStatistics

# statistics whose null has a spelling of its own in RowStatistics
_NULL_WHERE: dict[str, Callable[[NDArray[Any], NDArray[np.int64]], NDArray[np.bool_]]] = {
    "first": lambda values, lengths: lengths == 0,
    "last": lambda values, lengths: lengths == 0,
    "last_nnz": lambda values, lengths: values < 0,
    "min_in": lambda values, lengths: np.isnan(values),
    "max_in": lambda values, lengths: np.isnan(values),
    "max_abs_out": lambda values, lengths: np.isnan(values),
}
_STATISTICS = frozenset(field.name for field in fields(RowStatistics)) - {"prefixes"}


@cache
def part_schema() -> pa.Schema:
    """Schema of a part: the trace's, with listed strings dictionary-encoded: a step repeats its keys in each row."""
    parts = []
    for field in schema():
        if field.type == pa.list_(pa.string()) and field.name != "missing":
            field = field.with_type(pa.list_(pa.dictionary(pa.int32(), pa.string())))
        parts.append(field)
    return pa.schema(parts, metadata=schema().metadata)


class _Column(NamedTuple):
    """One column of a part; Arrow's own objects answer these questions, but slowly."""

    name: str
    type: pa.DataType
    value_type: pa.DataType | None
    listed: bool
    nested: bool
    string: bool


@cache
def _layout() -> list[_Column]:
    return [
        _Column(
            column.name,
            field.type,
            field.type.value_type if column.listed else None,
            column.listed,
            pa.types.is_nested(field.type),
            pa.types.is_dictionary(field.type.value_type) if column.listed else pa.types.is_string(field.type),
        )
        for column, field in zip(COLUMNS, part_schema(), strict=True)
    ]


def record_batch(rows: Sequence[FinishedRow], contents: Contents, constants: dict[str, Any]) -> pa.RecordBatch:
    """All rows of a step, in the order of their events.

    Args:
        rows: finished rows, in order.
        contents: content table, evaluated.
        constants: scalars that are the same on every row (``run_id``, ``process``, ``rank`` ...).
    """
    given = {name for row in rows for name in row.scalars}
    listed = _ListedColumns(rows, contents)
    arrays = []
    for column in _layout():
        name = column.name
        if column.listed:
            arrays.append(listed.array(column))
        elif name in constants:
            arrays.append(pa.repeat(pa.scalar(constants[name], column.type), len(rows)))
        elif name in ("n", "seq"):
            arrays.append(pa.array([getattr(row, name) for row in rows], column.type))
        elif name not in given:
            arrays.append(_nulls(len(rows), name))
        else:
            values = [row.scalars.get(name) for row in rows]
            if column.nested:
                arrays.append(_repeated(values, column.type))
            elif column.string:
                arrays.append(_strings(tuple(values)))
            else:
                arrays.append(pa.array(values, column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=part_schema())


@lru_cache(maxsize=256)
def _strings(values: tuple[str | None, ...]) -> pa.Array:
    """A string column; the steps of a run have the same stages, fields and components in the same order."""
    return pa.array(values, pa.string())


@lru_cache(maxsize=1024)
def _nulls(n: int, name: str) -> pa.Array:
    return pa.nulls(n, part_schema().field(name).type)


def _repeated(values: list[Any], type_: pa.DataType) -> pa.Array:
    """A nested column: its few distinct values are converted once each, and most rows have none."""
    index: dict[Any, int] = {}
    places: list[int | None] = [None] * len(values)
    for number, value in enumerate(values):
        if value is not None:
            if isinstance(value, dict):
                value = tuple(value.items())
            elif isinstance(value, list):
                value = tuple(value)
            places[number] = index.setdefault(value, len(index))
    distinct = pa.array([_plain(value, type_) for value in index], type_)
    return distinct.take(pa.array(places, pa.int32()))


def _plain(value: Any, type_: pa.DataType) -> Any:
    """A context struct or its items as a dict, a map as pairs of strings."""
    if pa.types.is_list(type_):
        return value
    if pa.types.is_map(type_):
        return [(str(name), str(item)) for name, item in value]
    return dict(value) if isinstance(value, tuple) else vars(value)


class _ListedColumns:
    """Builds one list array a listed column, from the rows and their contents."""

    def __init__(self, rows: Sequence[FinishedRow], contents: Contents) -> None:
        self.rows = rows
        self.counts = np.array([row.n for row in rows], dtype=np.int64)
        self.contents = contents
        self.blocks, self.places = contents.statistics()
        self.seen = np.array([row.content is not None for row in rows], dtype=bool)
        pairs = [contents.lengths(row.content) for row in rows if row.content is not None]
        widths = [row.width for row in rows if row.content is not None]
        self.elements = _concatenated([lengths for lengths, _ in pairs])
        self.length = _concatenated([lengths // width for (lengths, _), width in zip(pairs, widths, strict=True)])
        self.valid = _concatenated([valid // width for (_, valid), width in zip(pairs, widths, strict=True)])
        self.given: dict[str, list[tuple[int, Sequence[Any]]]] = {}
        for number, row in enumerate(rows):
            for name, values in row.columns.items():
                self.given.setdefault(name, []).append((number, values))
        self.keys = _Grouped([row.keys for row in rows], self.counts)
        self.tags = [row.tags for row in rows]
        self.takes: dict[tuple[bool, ...], tuple[NDArray[np.int64], NDArray[np.bool_]]] = {}
        self.offsets: dict[bytes, tuple[pa.Array, pa.Array]] = {}

    def array(self, column: _Column) -> pa.Array:
        name = column.name
        if name == "key":
            return self._keys(column)
        if name in ("length", "valid_length"):
            flat = self.length if name == "length" else self.valid
            return self._lists(pa.array(flat, column.value_type), self.seen, column)
        if name == "marks":
            return self._marks(column)
        if name in _STATISTICS:
            return self._statistic(column)
        if name in TAG_NAMES:
            return self._tag(column)
        given = self.given.get(name)
        return _nulls(len(self.rows), name) if given is None else self._given(given, column)

    def _keys(self, column: _Column) -> pa.Array:
        index: dict[str, int] = {}
        lists = self.keys.distinct
        ids = [np.array([index.setdefault(key, len(index)) for key in keys], dtype=np.int32) for keys in lists]
        flat = self.keys.spread(ids, np.int32)
        names = pa.array(list(index), pa.string())
        return self._lists(pa.DictionaryArray.from_arrays(pa.array(flat), names), self.keys.here, column)

    def _tag(self, column: _Column) -> pa.Array:
        """A tag of the rows' keys, unless the caller gave the column."""
        name = column.name
        values: list[Sequence[Any] | None] = [None if tags is None else tags.get(name) for tags in self.tags]
        for number, given in self.given.get(name, ()):
            values[number] = given
        made: dict[int, pa.Array] = {}
        for value in values:
            if value is not None and id(value) not in made:
                made[id(value)] = _array(value, column.value_type)
        if not made:
            return _nulls(len(self.rows), name)
        flat = pa.concat_arrays([made[id(value)] for value in values if value is not None])
        return self._lists(flat, np.array([value is not None for value in values]), column)

    def _given(self, given: list[tuple[int, Sequence[Any]]], column: _Column) -> pa.Array:
        here = np.zeros(len(self.rows), dtype=bool)
        here[[number for number, _ in given]] = True
        if column.string:
            flat = pa.array([text for _, values in given for text in values], pa.string()).dictionary_encode()
        else:
            flat = pa.concat_arrays([_array(values, column.value_type) for _, values in given])
        return self._lists(flat, here, column)

    def _statistic(self, column: _Column) -> pa.Array:
        found = [getattr(block, column.name) for block in self.blocks]
        index, here = self._take(tuple(array is not None for array in found))
        if not here.any():
            return _nulls(len(self.rows), column.name)
        flat = np.concatenate([array for array in found if array is not None])[index]
        null_where = _NULL_WHERE.get(column.name)
        nulls = None if null_where is None else null_where(flat, self._elements(here))
        return self._lists(pa.array(flat, column.value_type, mask=nulls), here, column)

    def _elements(self, here: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Container elements of each element of the rows that are here."""
        lengths: NDArray[np.int64] = self.elements[np.repeat(here[self.seen], self.counts[self.seen])]
        return lengths

    def _take(self, present: tuple[bool, ...]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Where each element's statistic lies among those of the blocks that have it, and which rows have it."""
        known = self.takes.get(present)
        if known is None:
            begins, total = [], 0
            for block, has in zip(self.blocks, present, strict=True):
                begins.append(total)
                total += len(block.fingerprint) if has else 0
            here = self.seen.copy()
            pieces = []
            for number, row in enumerate(self.rows):
                if row.content is None:
                    continue
                block_number, first = self.places[row.content]
                if present[block_number]:
                    first += begins[block_number]
                    pieces.append(np.arange(first, first + row.n))
                else:
                    here[number] = False
            known = self.takes[present] = (_concatenated(pieces), here)
        return known

    def _marks(self, column: _Column) -> pa.Array:
        at: list[NDArray[Any]] = []
        fp: list[NDArray[Any]] = []
        here = np.zeros(len(self.rows), dtype=bool)
        for number, row in enumerate(self.rows):
            found = self._turn_marks(row) if row.scalars.get("entity") == "turn" else self._cut_marks(row)
            if found is not None:
                here[number] = True
                at.append(found[0])
                fp.append(found[1])
        if not at:
            return _nulls(len(self.rows), column.name)
        marks = pa.StructArray.from_arrays(
            [
                pa.array(np.concatenate([part.reshape(-1) for part in at]), pa.int32()),
                pa.array(np.concatenate([part.reshape(-1) for part in fp]), pa.uint64()),
            ],
            fields=list(MARK),
        )
        counts = np.concatenate([np.full(len(part), part.shape[1], dtype=np.int64) for part in at])
        borders = pa.array(np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)]), pa.int32())
        return self._lists(pa.ListArray.from_arrays(borders, marks), here, column)

    def _cut_marks(self, row: FinishedRow) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Prefixes at the borders of prompt and response: ``(n, 3)`` positions and fingerprints."""
        if row.cuts is None or row.content is None:
            return None
        block, first = self.places[row.content]
        prefixes = self.blocks[block].prefixes
        return None if prefixes is None else (row.cuts // row.width, prefixes[first : first + row.n])

    def _turn_marks(self, row: FinishedRow) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Prefixes at both ends of each turn, ``(n, 2)``, of the turns of one key laid end to end.

        Nothing of what the caller says of ``start`` goes into them: where turns leave a gap, the two disagree.
        """
        if row.keys is None or row.content is None or row.width != 1:
            return None
        block, first = self.places[row.content]
        lengths, keys = self.contents.lengths(row.content)[1], row.keys
        ends = np.cumsum(lengths)
        begins = ends - lengths
        heads = np.array([number == 0 or keys[number] != keys[number - 1] for number in range(row.n)], dtype=bool)
        begins -= begins[np.maximum.accumulate(np.where(heads, np.arange(row.n), 0))]
        fingerprints = self.blocks[block].fingerprint[first : first + row.n]
        return np.stack([begins, begins + lengths], axis=1), chained_prefixes(fingerprints, lengths, begins)

    def _lists(self, flat: pa.Array, here: NDArray[np.bool_], column: _Column) -> pa.Array:
        offsets, absent = self._offsets(here)
        return pa.ListArray.from_arrays(offsets, flat, type=column.type, mask=absent)

    def _offsets(self, here: NDArray[np.bool_]) -> tuple[pa.Array, pa.Array]:
        known = self.offsets.get(here.tobytes())
        if known is None:
            ends = np.cumsum(np.where(here, self.counts, 0))
            offsets = pa.array(np.concatenate([np.zeros(1, dtype=np.int64), ends]), pa.int32())
            known = self.offsets[here.tobytes()] = (offsets, pa.array(~here))
        return known


class _Grouped:
    """Rows by the list they share: what is made of a list is made once and spread over its rows."""

    def __init__(self, lists: Sequence[Sequence[Any] | None], counts: NDArray[np.int64]) -> None:
        index: dict[int, int] = {}
        self.distinct: list[Sequence[Any]] = []
        places = np.full(len(lists), -1, dtype=np.int64)
        for number, items in enumerate(lists):
            if items is not None:
                place = index.setdefault(id(items), len(index))
                if place == len(self.distinct):
                    self.distinct.append(items)
                places[number] = place
        self.here = places >= 0
        sizes = np.array([len(items) for items in self.distinct], dtype=np.int64)
        begins = np.cumsum(sizes) - sizes
        rows = places[self.here]
        ends = np.cumsum(sizes[rows]) if len(rows) else np.zeros(0, dtype=np.int64)
        within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes[rows], sizes[rows])
        self._take = np.repeat(begins[rows], sizes[rows]) + within

    def spread(self, made: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
        """One array a distinct list, laid out row after row."""
        spread: NDArray[Any] = (np.concatenate(made) if made else np.zeros(0, dtype=dtype))[self._take]
        return spread


def _array(value: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """A column given by the caller or the tags: a list with None, or an array whose NaN is null."""
    floats = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return pa.array(value, type_, from_pandas=floats)


def _concatenated(pieces: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
