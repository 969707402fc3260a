"""Columns of a row group as 64-bit hashes, one an element or one a row; null hashes to 0.

Hashes of one fact are added up, each column with a salt of its own, so that the same value in another column is
something else. Strings are hashed by Python, which salts by process: hashes are compared within one run only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lineage.fingerprint import fingerprint_strings, image, mix_in_place
from lineage.schema import COLUMNS

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
COLUMN = {column.name: column for column in COLUMNS}
# Elements hashed at a time: the working arrays stay in the processor's cache.
_BLOCK = 1 << 15


@cache
def salt(name: str) -> np.uint64:
    """The number a column's hashes begin with."""
    return np.uint64(fingerprint_strings([name])[0])


def mixed(values: UInt64, name: str) -> UInt64:
    """Each value spread over 64 bits, with the salt of that name."""
    result = values + salt(name)
    for start in range(0, len(result), _BLOCK):
        mix_in_place(result[start : start + _BLOCK])
    return result


def whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def hashed(values: pa.Array, type_: pa.DataType, name: str) -> UInt64:
    """Hash of every value of a flat array, read as that type; 0 of a null."""
    if values.null_count == len(values):
        return np.zeros(len(values), dtype=np.uint64)
    if pa.types.is_string(type_):
        coded = values if isinstance(values, pa.DictionaryArray) else values.dictionary_encode()
        distinct = np.fromiter(map(hash, coded.dictionary.to_pylist()), np.int64, len(coded.dictionary))
        table = mixed(distinct.view(np.uint64), name)
        indices = pc.fill_null(coded.indices, 0) if coded.indices.null_count else coded.indices
        result: UInt64 = table[np.asarray(indices.to_numpy(zero_copy_only=False))]
    else:
        result = mixed(image(numbers(values, type_)), name)
    if values.null_count:
        result[~valid(values)] = 0
    return result


def numbers(values: pa.Array, type_: pa.DataType) -> NDArray[Any]:
    """The numbers of a flat array, read as that type; 0 where there is none."""
    cast = values if values.type == type_ else values.cast(type_, safe=False)
    filled = pc.fill_null(cast, False if pa.types.is_boolean(type_) else 0) if cast.null_count else cast
    return np.asarray(filled.to_numpy(zero_copy_only=False))


def valid(values: pa.Array) -> Bool:
    """Where an array is not null."""
    return np.asarray(values.is_valid().to_numpy(zero_copy_only=False), dtype=bool)


def distinct(values: UInt64) -> UInt64:
    """The distinct values in order; numpy's own way, by a table, takes ten times as long."""
    ordered = np.sort(values)
    fresh = np.ones(len(ordered), dtype=bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    found: UInt64 = ordered[fresh]
    return found


def among(values: UInt64, others: UInt64) -> Bool:
    """Which of the values are one of the others."""
    if not len(values) or not len(others):
        return np.zeros(len(values), dtype=bool)
    known = np.sort(others)
    found: Bool = np.equal(known[np.minimum(np.searchsorted(known, values), len(known) - 1)], values)
    return found


class Lists:
    """List columns of a row group beside one another: one place for each of the ``n`` elements of every row."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.n = self._lengths()
        self.starts = np.cumsum(self.n) - self.n
        self.total = int(self.n.sum())
        #: of each row, what its lists of another length than ``n`` hold
        self.odd: UInt64 = np.zeros(table.num_rows, dtype=np.uint64)
        self._known: dict[bytes, Bool] = {}

    def hashed(self, name: str) -> UInt64 | None:
        """Hash of every element of a column; None where no row has any."""
        return self._beside(name, lambda flat: hashed(flat, COLUMN[name].type, name))

    def numbers(self, name: str) -> NDArray[np.float64] | None:
        """Every element of a column as float64, NaN where there is none; None where no row has any."""
        placed = self._lists(name)
        if placed is None:
            return None
        values, counts, fits = placed
        flat = numbers(values, pa.float64())
        if values.null_count:
            flat = np.where(valid(values), flat, np.nan)
        return self._spread(flat, counts, fits, np.nan)

    def flags(self, name: str) -> Bool:
        """Where a column of bools is true."""
        placed = self._lists(name)
        if placed is None:
            return np.zeros(self.total, dtype=bool)
        values, counts, fits = placed
        return self._spread(numbers(values, pa.bool_()), counts, fits, False)

    def matching(self, name: str, wanted: Sequence[str], prefix: str) -> Bool:
        """Where a column of strings begins with the prefix pattern and is none of ``wanted``."""
        placed = self._lists(name)
        if placed is None:
            return np.zeros(self.total, dtype=bool)
        values, counts, fits = placed
        coded = values if isinstance(values, pa.DictionaryArray) else values.dictionary_encode()
        texts = coded.dictionary.cast(pa.string())
        found = pc.fill_null(pc.match_substring_regex(texts, prefix), False).to_numpy(zero_copy_only=False)
        found = found & ~pc.is_in(texts, value_set=pa.array(wanted, pa.string())).to_numpy(zero_copy_only=False)
        if not found.any():
            return np.zeros(self.total, dtype=bool)
        indices = pc.fill_null(coded.indices, 0).to_numpy(zero_copy_only=False)
        return self._spread(found[indices] & valid(values), counts, fits, False)

    def marks(self) -> UInt64 | None:
        """Hash of the marks of every element; None where no row has any."""
        return self._beside("marks", _marks)

    def _beside(self, name: str, hash_of: Any) -> UInt64 | None:
        placed = self._lists(name)
        if placed is None:
            return None
        values, counts, fits = placed
        flat: UInt64 = hash_of(values)
        odd = np.flatnonzero(~fits & (counts > 0))
        for row in odd.tolist():  # no recorder writes such a row
            start = int(counts[:row].sum())
            self.odd[row] += flat[start : start + counts[row]].sum(dtype=np.uint64) + salt(name)
        return self._spread(flat, counts, fits, 0)

    def _lists(self, name: str) -> tuple[pa.Array, Int64, Bool] | None:
        """The elements of a column, how many each row has, and which rows have one for each of theirs."""
        if name not in self._table.column_names:
            return None
        lists = whole(self._table[name])
        offsets = np.asarray(lists.offsets.to_numpy()).astype(np.int64)
        counts = np.diff(offsets)
        values = lists.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        if values.null_count == len(values):
            return None
        fits = counts == self.n
        if lists.null_count:
            fits &= valid(lists)
        return values, counts, fits

    def _spread(self, flat: NDArray[Any], counts: Int64, fits: Bool, nothing: Any) -> NDArray[Any]:
        if len(flat) == self.total and fits.all():
            return flat
        if len(flat) > int(counts[fits].sum()):
            flat = flat[np.repeat(fits, counts)]
        result = np.zeros(self.total, dtype=flat.dtype) if not nothing else np.full(self.total, nothing, flat.dtype)
        result[self._of_rows(fits)] = flat
        return result

    def _of_rows(self, rows: Bool) -> Bool:
        """The elements of some rows; many columns are there for the same rows."""
        name = rows.tobytes()
        if name not in self._known:
            self._known[name] = np.repeat(rows, self.n)
        return self._known[name]

    def _lengths(self) -> Int64:
        rows = self._table.num_rows
        if "n" in self._table.column_names and not self._table["n"].null_count:
            lengths: Int64 = np.maximum(numbers(whole(self._table["n"]), pa.int64()), 0)
            return lengths
        if "key" not in self._table.column_names:
            return np.zeros(rows, dtype=np.int64)
        return numbers(pc.list_value_length(whole(self._table["key"])), pa.int64())


def _marks(values: pa.Array) -> UInt64:
    """Hash of each list of marks: each mark by where it stands and what is before it."""
    offsets = np.asarray(values.offsets.to_numpy()).astype(np.int64)
    counts = np.diff(offsets)
    inner = values.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    each = hashed(inner.field("fp"), pa.uint64(), "marks.fp")
    each = mixed(each + hashed(inner.field("at"), pa.int64(), "marks.at"), "marks")
    result = np.zeros(len(values), dtype=np.uint64)
    full = np.flatnonzero(counts)
    if len(full):
        result[full] = np.add.reduceat(each, (offsets[:-1] - offsets[0])[full])
    if values.null_count:
        result[~valid(values)] = 0
    return result


class Scalars:
    """Scalar columns of a row group: one hash a row."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.rows = table.num_rows

    def hashed(self, name: str) -> UInt64:
        """Hash of a column; 0 where it is null."""
        if name not in self._table.column_names:
            return np.zeros(self.rows, dtype=np.uint64)
        return hashed(whole(self._table[name]), COLUMN[name].arrow_type, name)

    def part(self, name: str, part: str) -> UInt64:
        """Hash of one part of a struct; 0 where it is null."""
        if name not in self._table.column_names:
            return np.zeros(self.rows, dtype=np.uint64)
        type_ = COLUMN[name].arrow_type.field(part).type
        return hashed(whole(pc.struct_field(self._table[name], part)), type_, f"{name}.{part}")

    def parts(self, name: str, but: Sequence[str] = ()) -> UInt64:
        """Hash of a struct; 0 where it is null."""
        result = np.zeros(self.rows, dtype=np.uint64)
        if name in self._table.column_names and self._table[name].null_count < self.rows:
            for field in COLUMN[name].arrow_type:
                if field.name not in but:
                    result += self.part(name, field.name)
        return result

    def pairs(self, name: str, but: Sequence[str] = ()) -> tuple[UInt64, UInt64]:
        """Hash of a map without some of its names, and of those; 0 where there are none."""
        rest, apart = np.zeros(self.rows, dtype=np.uint64), np.zeros(self.rows, dtype=np.uint64)
        if name in self._table.column_names and self._table[name].null_count < self.rows:
            maps = whole(self._table[name])
            offsets = np.asarray(maps.offsets.to_numpy()).astype(np.int64)
            counts, first = np.diff(offsets), int(offsets[0])
            if maps.null_count:
                counts = counts * valid(maps)
            names, values = (part.slice(first, int(offsets[-1]) - first) for part in (maps.keys, maps.items))
            each = hashed(names, pa.string(), f"{name}.name")
            each = mixed(each + hashed(values, pa.string(), f"{name}.value"), name)
            left = np.asarray(pc.is_in(names.cast(pa.string()), pa.array(but, pa.string())).to_numpy(False), dtype=bool)
            full = np.flatnonzero(counts)
            if len(full):
                starts = (offsets[:-1] - first)[full]
                rest[full] = np.add.reduceat(np.where(left, 0, each).astype(np.uint64), starts)
                apart[full] = np.add.reduceat(np.where(left, each, 0).astype(np.uint64), starts)
        return rest, apart

    def axes(self, name: str) -> tuple[UInt64, UInt64]:
        """Hash of the first number of a list of numbers, and of the others; 0 where there is none."""
        head, tail = np.zeros(self.rows, dtype=np.uint64), np.zeros(self.rows, dtype=np.uint64)
        if name in self._table.column_names and self._table[name].null_count < self.rows:
            for row, sizes in enumerate(self._table[name].to_pylist()):
                if sizes:
                    head[row], tail[row] = _size(sizes[0]), _sizes(tuple(sizes[1:]))
        return head, tail

    def texts(self, name: str) -> list[str]:
        """A column of words; empty text of a null."""
        if name not in self._table.column_names:
            return [""] * self.rows
        return [text or "" for text in self._table[name].to_pylist()]

    def integers(self, name: str, nothing: int = 0) -> Int64:
        """A column of whole numbers."""
        if name not in self._table.column_names:
            return np.full(self.rows, nothing, dtype=np.int64)
        return _integers(whole(self._table[name]), nothing)

    def part_integers(self, name: str, part: str) -> Int64:
        """One part of a struct, of whole numbers; 0 where it is null."""
        if name not in self._table.column_names:
            return np.zeros(self.rows, dtype=np.int64)
        return _integers(whole(pc.struct_field(self._table[name], part)), 0)

    def known(self, name: str) -> Bool:
        """Where a column is not null."""
        if name not in self._table.column_names:
            return np.zeros(self.rows, dtype=bool)
        return valid(whole(self._table[name]))


def _integers(column: pa.Array, nothing: int) -> Int64:
    found = numbers(column, pa.int64()).astype(np.int64, copy=True)
    if column.null_count:
        found[~valid(column)] = nothing
    return found


@cache
def _sizes(sizes: tuple[int, ...]) -> np.uint64:
    return np.uint64(hash(("shape", sizes)) & 0xFFFFFFFFFFFFFFFF)


@cache
def _size(size: int) -> np.uint64:
    return _sizes((size,))
