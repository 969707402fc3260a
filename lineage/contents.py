"""The contents of one step: equal content is held once, and its statistics are computed once, many fields at a time.

A consumer usually reads what a producer wrote. Whether it did is what a trace is for, so nothing is assumed: new
content is compared byte for byte with what was recorded before, and only equal content shares its statistics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lineage.fingerprint import fingerprint_long
from lineage.statistics import Rows, RowStatistics, row_statistics

_BLOCK = 1 << 16  # elements a pass: the working arrays stay in the second-level cache
_PENDING = 1 << 22  # elements waiting for statistics before they are computed without waiting for the seal
_HELD = 1 << 28  # bytes kept for comparison; older content is forgotten, and then simply computed again


@dataclass
class _Content:
    rows: Rows | None  # None once forgotten
    lengths: NDArray[np.int64]
    valid_lengths: NDArray[np.int64]
    evaluated: bool = False


class Contents:
    """Content table of one step.

    Args:
        reuse: share statistics between equal contents; False computes every record afresh.
    """

    def __init__(self, reuse: bool = True) -> None:
        self._reuse = reuse
        self._items: list[_Content] = []
        self._blocks: list[RowStatistics] = []
        self._places: dict[int, tuple[int, int]] = {}
        self._alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
        self._pending: list[int] = []
        self._pending_elements = 0
        self._held = 0
        self._oldest = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, rows: Rows) -> int:
        """Keep ``rows`` (they must not change any more) and return a number; equal content gets the same number."""
        values = rows.values
        shape = (
            values.dtype.num,
            rows.n,
            len(values),
            values[:: len(values) // 16 + 1].tobytes(),  # a sample: what differs mostly differs here
            rows.starts is None,
            rows.valid is None,
            rows.mask is None,
            rows.opaque,
            None if rows.cuts is None else rows.cuts.shape[1],
        )
        if self._reuse:
            for number in self._alike[shape]:
                held = self._items[number].rows
                if held is not None and _equal(held, rows):
                    return number
        number = len(self._items)
        self._items.append(_Content(rows, rows.lengths, rows.valid_lengths))
        self._alike[shape].append(number)
        self._pending.append(number)
        self._pending_elements += len(rows.values)
        self._held += rows.values.nbytes
        if self._pending_elements > _PENDING:
            self.evaluate()
        self._forget()
        return number

    def add_weights(self, arrays: Sequence[NDArray[Any]]) -> int:
        """Fingerprint long rows now, one array a row, keeping none of them; returns a content number."""
        number = len(self._items)
        lengths = np.array([len(array) for array in arrays], dtype=np.int64)
        fingerprints = np.array([fingerprint_long(array) for array in arrays], dtype=np.uint64)
        self._items.append(_Content(None, lengths, lengths, evaluated=True))
        self._places[number] = (len(self._blocks), 0)
        self._blocks.append(RowStatistics(fingerprints))
        return number

    def statistics(self) -> tuple[list[RowStatistics], dict[int, tuple[int, int]]]:
        """Statistics of everything, block by block, and the block and first row of each content.

        :meth:`evaluate` must have run since the last content was added.
        """
        return self._blocks, self._places

    def lengths(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Container and valid lengths of a content, in elements."""
        item = self._items[number]
        return item.lengths, item.valid_lengths

    def evaluate(self) -> None:
        """Compute what is waiting: contents of one kind are joined into blocks, one call each."""
        kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for number in self._pending:
            rows = self._items[number].rows
            if rows is not None:
                kind = "f" if rows.values.dtype.kind == "f" else rows.values.dtype.str
                shape = (rows.starts is None, rows.valid is None, rows.mask is None, rows.opaque)
                cuts = None if rows.cuts is None else rows.cuts.shape[1]
                kinds[(kind, *shape, cuts)].append(number)
        for numbers in kinds.values():
            block: list[int] = []
            size = 0
            for number in numbers:
                length = len(self._rows(number).values)
                if block and size + length > _BLOCK:
                    self._compute(block)
                    block, size = [], 0
                block.append(number)
                size += length
            self._compute(block)
        self._pending.clear()
        self._pending_elements = 0

    def _rows(self, number: int) -> Rows:
        rows = self._items[number].rows
        assert rows is not None
        return rows

    def _compute(self, block: list[int]) -> None:
        parts = [self._rows(number) for number in block]
        joined = parts[0]
        if len(parts) > 1:
            joined = Rows(
                np.concatenate([part.values for part in parts]),
                np.concatenate([part.lengths for part in parts]),
                _join([part.starts for part in parts]),
                _join([part.valid for part in parts]),
                _join([part.mask for part in parts]),
                _join([part.cuts for part in parts]),
                joined.opaque,
            )
        begin = 0
        for number, part in zip(block, parts, strict=True):
            self._items[number].evaluated = True
            self._places[number] = (len(self._blocks), begin)
            begin += part.n
        self._blocks.append(row_statistics(joined))

    def _forget(self) -> None:
        while self._held > _HELD and self._oldest < len(self._items) - 1:
            content = self._items[self._oldest]
            if not content.evaluated:
                self.evaluate()
            if content.rows is not None:
                self._held -= content.rows.values.nbytes
                content.rows = None
            self._oldest += 1


def _join(arrays: list[NDArray[Any] | None]) -> NDArray[Any] | None:
    present = [array for array in arrays if array is not None]
    return np.concatenate(present) if present else None


def _equal(a: Rows, b: Rows) -> bool:
    return (
        _same(_bits(a.values), _bits(b.values))  # NaN equals itself
        and _same(a.lengths, b.lengths)
        and _same(a.starts, b.starts)
        and _same(a.valid, b.valid)
        and _same(a.mask, b.mask)
        and _same(a.cuts, b.cuts)
    )


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    return values.view(f"u{values.dtype.itemsize}") if values.dtype.kind == "f" else values


def _same(a: NDArray[np.generic] | None, b: NDArray[np.generic] | None) -> bool:
    return a is b or (a is not None and b is not None and bool((a == b).all()))
