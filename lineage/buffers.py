"""The rows of one step as one Arrow record batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lineage.contents import Contents
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


def record_batch(rows: Sequence[FinishedRow], contents: Contents, constants: dict[str, Any]) -> pa.RecordBatch:
    """All rows of a step, in the order of their events.

    Args:
        rows: finished rows.
        contents: content table, evaluated.
        constants: scalars that are the same on every row (``run_id``, ``process``, ``rank`` ...).
    """
    rows = sorted(rows, key=lambda row: row.seq)
    given = {name for row in rows for name in row.scalars}
    listed = _ListedColumns(rows, contents)
    arrays = []
    for column, field in zip(COLUMNS, part_schema(), strict=True):
        if column.listed:
            arrays.append(listed.array(column.name, field.type))
        elif column.name in constants:
            arrays.append(pa.repeat(pa.scalar(constants[column.name], field.type), len(rows)))
        elif column.name in ("n", "seq"):
            arrays.append(pa.array([getattr(row, column.name) for row in rows], field.type))
        elif column.name not in given:
            arrays.append(_nulls(len(rows), field.type))
        else:
            values = [row.scalars.get(column.name) for row in rows]
            if pa.types.is_nested(field.type):
                values = [_plain(value, field.type) for value in values]
            arrays.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=part_schema())


@cache
def _nulls(n: int, type_: pa.DataType) -> pa.Array:
    return pa.nulls(n, type_)


def _plain(value: Any, type_: pa.DataType) -> Any:
    """A context struct as a dict, a map as its pairs of strings."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict) and pa.types.is_map(type_):
        return [(str(name), str(item)) for name, item in value.items()]
    return value


class _ListedColumns:
    """Builds one list array a listed column, from the rows and their contents."""

    def __init__(self, rows: Sequence[FinishedRow], contents: Contents) -> None:
        self.rows = rows
        self.counts = np.array([row.n for row in rows], dtype=np.int64)
        self.blocks, self.places = contents.statistics()
        self.seen = np.array([row.content is not None for row in rows], dtype=bool)
        pairs = [contents.lengths(row.content) for row in rows if row.content is not None]
        widths = [row.width for row in rows if row.content is not None]
        self.elements = _concatenated([lengths for lengths, _ in pairs])
        self.length = _concatenated([lengths // width for (lengths, _), width in zip(pairs, widths, strict=True)])
        self.valid = _concatenated([valid // width for (_, valid), width in zip(pairs, widths, strict=True)])
        self.takes: dict[tuple[bool, ...], tuple[NDArray[np.int64], NDArray[np.bool_]]] = {}
        self.offsets: dict[bytes, tuple[pa.Array, pa.Array]] = {}

    def array(self, name: str, type_: pa.DataType) -> pa.Array:
        if name == "key":
            return self._strings([row.keys for row in self.rows], type_)
        if name in ("length", "valid_length"):
            flat = self.length if name == "length" else self.valid
            return self._lists(pa.array(flat, type_.value_type), self.seen, type_)
        if name == "marks":
            return self._marks(type_)
        if name in _STATISTICS:
            return self._statistic(name, type_)
        values = [row.columns.get(name) for row in self.rows]
        if pa.types.is_dictionary(type_.value_type):
            return self._strings(values, type_)
        return self._given(values, type_)

    def _statistic(self, name: str, type_: pa.DataType) -> pa.Array:
        found = [getattr(block, name) for block in self.blocks]
        index, here = self._take(tuple(column is not None for column in found))
        if not here.any():
            return _nulls(len(self.rows), type_)
        flat = np.concatenate([column for column in found if column is not None])[index]
        null_where = _NULL_WHERE.get(name)
        nulls = None
        if null_where is not None:
            lengths = self.elements if here is self.seen or (here == self.seen).all() else np.ones(len(flat), np.int64)
            nulls = null_where(flat, lengths)
        return self._lists(pa.array(flat, type_.value_type, mask=nulls), here, type_)

    def _take(self, present: tuple[bool, ...]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Where each element's statistic lies among those of the blocks that have it, and which rows have it."""
        known = self.takes.get(present)
        if known is None:
            begins, total = [], 0
            for block, has in zip(self.blocks, present, strict=True):
                begins.append(total)
                total += len(block.sum) if has else 0
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

    def _marks(self, type_: pa.DataType) -> pa.Array:
        at: list[NDArray[Any]] = []
        fp: list[NDArray[Any]] = []
        here = np.zeros(len(self.rows), dtype=bool)
        for number, row in enumerate(self.rows):
            if row.cuts is None or row.content is None:
                continue
            block, first = self.places[row.content]
            prefixes = self.blocks[block].prefixes
            if prefixes is not None:
                here[number] = True
                at.append(row.cuts // row.width)
                fp.append(prefixes[first : first + row.n])
        if not at:
            return _nulls(len(self.rows), type_)
        ats, fps = np.concatenate(at), np.concatenate(fp)
        marks = pa.StructArray.from_arrays(
            [pa.array(ats.reshape(-1), pa.int32()), pa.array(fps.reshape(-1), pa.uint64())], fields=list(MARK)
        )
        borders = pa.array(np.arange(len(ats) + 1) * ats.shape[1], pa.int32())
        return self._lists(pa.ListArray.from_arrays(borders, marks), here, type_)

    def _given(self, values: Sequence[Sequence[Any] | None], type_: pa.DataType) -> pa.Array:
        """Columns the caller gave: lists with None, or arrays."""
        present = [value for value in values if value is not None]
        if not present:
            return _nulls(len(self.rows), type_)
        made: dict[int, pa.Array] = {}  # rows share the lists made of their keys' tags
        for value in present:
            if id(value) not in made:
                floats = isinstance(value, np.ndarray) and value.dtype.kind == "f"
                made[id(value)] = pa.array(value, type_.value_type, from_pandas=floats)
        flat = pa.concat_arrays([made[id(value)] for value in present])
        return self._lists(flat, np.array([value is not None for value in values]), type_)

    def _strings(self, values: Sequence[Sequence[str | None] | None], type_: pa.DataType) -> pa.Array:
        present = [value for value in values if value is not None]
        if not present:
            return _nulls(len(self.rows), type_)
        index: dict[str, int] = {}
        made: dict[int, NDArray[np.int32]] = {}
        for value in present:
            if id(value) not in made:
                numbers = [-1 if text is None else index.setdefault(text, len(index)) for text in value]
                made[id(value)] = np.array(numbers, dtype=np.int32)
        ids = np.concatenate([made[id(value)] for value in present])
        indices = pa.array(ids, pa.int32(), mask=ids < 0)
        flat = pa.DictionaryArray.from_arrays(indices, pa.array(list(index), pa.string()))
        return self._lists(flat, np.array([value is not None for value in values]), type_)

    def _lists(self, flat: pa.Array, here: NDArray[np.bool_], type_: pa.DataType) -> pa.Array:
        offsets, absent = self._offsets(here)
        return pa.ListArray.from_arrays(offsets, flat, type=type_, mask=absent)

    def _offsets(self, here: NDArray[np.bool_]) -> tuple[pa.Array, pa.Array]:
        known = self.offsets.get(here.tobytes())
        if known is None:
            ends = np.cumsum(np.where(here, self.counts, 0))
            offsets = pa.array(np.concatenate([np.zeros(1, dtype=np.int64), ends]), pa.int32())
            known = self.offsets[here.tobytes()] = (offsets, pa.array(~here))
        return known


def _concatenated(pieces: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
