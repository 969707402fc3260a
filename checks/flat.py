"""List columns laid flat, and the arithmetic of signatures over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lineage.schema import COLUMNS

UInt64 = NDArray[np.uint64]
Int64 = NDArray[np.int64]
TYPES = {column.name: column.type for column in COLUMNS}
_ODD1, _ODD2 = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xC2B2AE3D27D4EB4F)
_S29, _S32 = np.uint64(29), np.uint64(32)
# Facts worked on at a time: the arrays then stay in the processor's cache.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Flat:
    """A list column laid flat: where each row starts, how many elements it has, whether it is there."""

    starts: Int64
    counts: Int64
    valid: NDArray[np.bool_]
    values: pa.Array

    @classmethod
    def of(cls, table: pa.Table, name: str) -> Flat:
        rows = table.num_rows
        if name not in table.column_names:
            nothing = np.zeros(rows, dtype=np.int64)
            return cls(nothing, nothing, np.zeros(rows, dtype=bool), pa.array([], TYPES[name]))
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


def bound(hashes: UInt64, first: UInt64, second: UInt64 | None = None) -> UInt64:
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


def dictionary(values: pa.Array) -> pa.Array:
    distinct = values.dictionary if isinstance(values, pa.DictionaryArray) else values
    return distinct.cast(pa.string())


def indices(values: pa.Array) -> Int64:
    if isinstance(values, pa.DictionaryArray):
        indices = values.indices
        filled = pc.fill_null(indices, 0) if indices.null_count else indices
        return np.asarray(filled.to_numpy(zero_copy_only=False))
    return np.arange(len(values))


def unsigned(values: pa.Array) -> UInt64:
    filled = pc.fill_null(values, 0) if values.null_count else values
    flat = np.asarray(filled.to_numpy(zero_copy_only=False))
    return flat if flat.dtype == np.uint64 else flat.astype(np.int64, copy=False).view(np.uint64)
