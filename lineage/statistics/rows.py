"""What goes into the statistics and what comes out: ragged rows, and one array a statistic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
UInt64 = NDArray[np.uint64]


@dataclass
class Rows:
    """The content of one field, row after row.

    Attributes:
        values: ``(sum(lengths),)`` container elements of all rows, padding included.
        lengths: ``(rows,)`` container elements of each row.
        starts: ``(rows,)`` first valid element within the row, or None: 0 everywhere.
        valid: ``(rows,)`` valid elements of each row, or None: the whole container.
        mask: ``(sum(lengths),)`` bools in container coordinates, or None: no mask beside the field.
        cuts: ``(rows, c)`` positions within the valid elements at which to give prefix fingerprints, or None.
        opaque: the values are bytes or weights: only their fingerprint says something.
    """

    values: NDArray[Any]
    lengths: Int64
    starts: Int64 | None = None
    valid: Int64 | None = None
    mask: NDArray[np.bool_] | None = None
    cuts: Int64 | None = None
    opaque: bool = False

    @property
    def n(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def valid_lengths(self) -> Int64:
        """``(rows,)`` elements that are data."""
        return self.lengths if self.valid is None else self.valid


@dataclass
class RowStatistics:
    """One array of ``(rows,)`` a statistic; names and meaning as in the schema.

    Where the schema says null, ``first last min_in max_in max_abs_out`` hold NaN, ``last_nnz`` holds -1, and the mask
    statistics are None.
    Of opaque content everything but the fingerprint is None. ``prefixes`` is ``(rows, c)``: the fingerprints of the
    first ``cuts`` elements.
    """

    fingerprint: UInt64
    sum: Float64 | None = None
    first: Float64 | None = None
    last: Float64 | None = None
    last_nnz: Int64 | None = None
    nnz: Int64 | None = None
    sum_in: Float64 | None = None
    min_in: Float64 | None = None
    max_in: Float64 | None = None
    sum_sq_in: Float64 | None = None
    nonfinite: Int64 | None = None
    nonfinite_in: Int64 | None = None
    mask_sum: Int64 | None = None
    mask_fingerprint: UInt64 | None = None
    nnz_out: Int64 | None = None
    max_abs_out: Float64 | None = None
    prefixes: UInt64 | None = None
