"""The marks of a row group laid flat: fingerprints of prefixes, and the windows that follow from two of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lineage.checks.flat import Flat, Int64, UInt64
from lineage.fingerprint import MASK64, R, powers

#: fields kept for every token of a sequence at the place of the token before it, and cut to the response afterwards
WINDOWED = ("log_probs", "entropy")
# R is odd, so it has an inverse modulo 2^64: H(window) = (H(prefix with it) - H(prefix before it)) / R^begin.
_INVERSE = np.uint64(pow(R, -1, MASK64 + 1))

_inverses: UInt64 = np.ones(1, dtype=np.uint64)


@dataclass(frozen=True)
class Marks:
    """Prefix fingerprints, element after element.

    Attributes:
        starts: ``(rows,)`` where each row's marks begin.
        counts: ``(rows,)`` how many it has, of all its elements; 0 where its elements have not equally many.
        elements: ``(rows,)`` how many elements the row has.
        at, prints: of each mark: the length of the prefix, and its fingerprint.
    """

    starts: Int64
    counts: Int64
    elements: Int64
    at: Int64
    prints: UInt64

    @classmethod
    def of(cls, marks: Flat) -> Marks:
        """Those of a row group, whose column ``marks`` this is."""
        rows = len(marks.counts)
        full = np.flatnonzero(marks.counts)
        if not len(full):
            nothing = np.zeros(rows, dtype=np.int64)
            return cls(nothing, nothing, marks.counts, nothing[:0], nothing[:0].view(np.uint64))
        lists = marks.values
        offsets = lists.offsets.to_numpy().astype(np.int64)
        flat = lists.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        offsets -= offsets[0]
        begins = np.where(marks.counts > 0, marks.starts, 0)
        starts, ends = offsets[begins], offsets[begins + marks.counts]
        each = np.diff(offsets)
        alike = np.zeros(rows, dtype=bool)
        alike[full] = np.minimum.reduceat(each, marks.starts[full]) == np.maximum.reduceat(each, marks.starts[full])
        at = np.asarray(flat.field("at").to_numpy(zero_copy_only=False)).astype(np.int64)
        prints = np.asarray(flat.field("fp").to_numpy(zero_copy_only=False)).astype(np.uint64)
        return cls(starts, np.where(alike, ends - starts, 0), marks.counts, at, prints)

    def windows(self, rows: Int64, inside: Int64) -> tuple[UInt64, UInt64]:
        """Lengths and fingerprints of the windows between the first and the third mark of these elements.

        Args:
            rows: row of each element.
            inside: its place there.
        """
        first = self.starts[rows] + 3 * inside
        begin, end = self.at[first], self.at[first + 2]
        prints = (self.prints[first + 2] - self.prints[first]) * _inverse_powers(int(begin.max(initial=0)) + 1)[begin]
        return (end - begin).view(np.uint64), prints

    def first(self, rows: Int64, inside: Int64, n: Int64) -> pa.Array:
        """The fingerprint of the first mark of these elements; null where a row does not mark every one.

        Args:
            n: elements of every row, by its keys.
        """
        each = np.where((self.elements == n) & (n > 0), self.counts // np.maximum(self.elements, 1), 0)[rows]
        known: NDArray[np.bool_] = each > 0
        if not known.any():
            return pa.nulls(len(rows), pa.uint64())
        return pa.array(self.prints[np.where(known, self.starts[rows] + each * inside, 0)], mask=~known)


def _inverse_powers(count: int) -> UInt64:
    """``R^0 .. R^-(count-1)`` modulo 2^64. The table only grows and is shared."""
    global _inverses
    if len(_inverses) < count:
        table = np.full(max(count, len(powers(count))), _INVERSE, dtype=np.uint64)
        table[0] = 1
        _inverses = np.multiply.accumulate(table)
    return _inverses[:count]
