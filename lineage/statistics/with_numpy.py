"""Row statistics by numpy: a handful of vectorised passes over the rows of many fields at once.

Float sums follow a binary tree over the positions of the row (neighbours first, padded with zeros to a power of two),
so they do not depend on the block, the row's neighbours or the machine, and any implementation can give the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lineage.fingerprint import fingerprint_rows, image, mix_in_place, powers
from lineage.statistics.rows import Float64, Int64, Rows, RowStatistics, UInt64

_EXACT = float(1 << 53)  # integers up to here are exact in float64, so any order of adding gives the same
_LEAF = 16  # leaves of the sum tree padded at a time; the result does not depend on it


def row_statistics(rows: Rows) -> RowStatistics:
    """All statistics of every row.

    Args:
        rows: ragged content; several fields of one kind (all float or all integer, all masked or none) may be joined.
    """
    values, lengths = rows.values, rows.lengths
    if rows.opaque:
        return RowStatistics(fingerprint_rows(values, lengths))
    kind = values.dtype.kind
    if kind == "f":
        x: NDArray[Any] = values.astype(np.float64)
    else:
        # uint64 beyond int64 keeps its image; the other statistics then see it as float64
        x = values.astype(np.float64) if values.dtype == np.uint64 else values.astype(np.int64)
    segments = _Segments(lengths)
    window = None if rows.valid is None else segments.window(rows.starts, rows.valid)
    inside = rows.mask if rows.mask is not None else window

    nonzero = x != 0
    finite = np.isfinite(x) if x.dtype.kind == "f" else None
    if finite is not None and finite.all():
        finite = None
    outside = None if rows.mask is None else ~rows.mask
    terms = _terms(values, segments, rows.starts, window)
    total, sum_in, sum_sq_in = _sums(x, segments, inside)
    return RowStatistics(
        fingerprint=segments.reduce(np.add, terms, np.uint64(0)),
        sum=total,
        first=segments.take(x, 0),
        last=segments.take(x, -1),
        last_nnz=segments.reduce(np.maximum, np.where(nonzero, segments.positions, -1), -1),
        nnz=segments.count(nonzero),
        sum_in=sum_in,
        min_in=_extreme(np.fmin, x, segments, inside),
        max_in=_extreme(np.fmax, x, segments, inside),
        sum_sq_in=sum_sq_in,
        nonfinite=segments.zeros() if finite is None else segments.count(~finite),
        nonfinite_in=segments.zeros() if finite is None else segments.count(_both(~finite, inside)),
        mask_sum=None if rows.mask is None else segments.count(rows.mask),
        mask_fingerprint=None if rows.mask is None else _mask_fingerprints(rows.mask, segments, rows.starts, window),
        nnz_out=segments.count(nonzero & outside) if outside is not None else None,
        max_abs_out=_extreme(np.fmax, np.abs(x, dtype=np.float64), segments, outside) if outside is not None else None,
        prefixes=None if rows.cuts is None else _prefixes(terms, segments, rows.starts, rows.cuts),
    )


class _Segments:
    """Row borders of a flat array, and reductions that give empty rows their neutral value."""

    def __init__(self, lengths: Int64) -> None:
        self.lengths = lengths
        ends = np.cumsum(lengths)
        self.begins = ends - lengths
        self.total = int(ends[-1]) if len(ends) else 0
        self.full = np.flatnonzero(lengths)
        self.all_full = len(self.full) == len(lengths)
        self.reduce_at = self.begins if self.all_full else self.begins[self.full]
        self.positions = np.arange(self.total) - np.repeat(self.begins, lengths)

    def zeros(self) -> Int64:
        return np.zeros(len(self.lengths), dtype=np.int64)

    def reduce(self, ufunc: np.ufunc, x: NDArray[Any], empty: Any) -> NDArray[Any]:
        if self.all_full and self.total:
            return ufunc.reduceat(x, self.reduce_at)
        result = np.full(len(self.lengths), empty, dtype=x.dtype)
        if len(self.full):
            result[self.full] = ufunc.reduceat(x, self.reduce_at)
        return result

    def count(self, flags: NDArray[np.bool_]) -> Int64:
        return self.reduce(np.add, flags.astype(np.int64), 0)

    def take(self, x: NDArray[Any], which: int) -> Float64:
        """First (0) or last (-1) element of each row as float64; NaN where the row is empty."""
        at = self.reduce_at if which == 0 else self.reduce_at + self.lengths[self.full] - 1
        if self.all_full:
            every: Float64 = x[at].astype(np.float64) + 0.0
            return every
        result = np.full(len(self.lengths), np.nan)
        result[self.full] = x[at] + 0.0
        return result

    def window(self, starts: Int64 | None, valid: Int64) -> NDArray[np.bool_]:
        if starts is None:
            return self.positions < np.repeat(valid, self.lengths)
        return (self.positions >= np.repeat(starts, self.lengths)) & (
            self.positions < np.repeat(starts + valid, self.lengths)
        )


def _both(flags: NDArray[np.bool_], inside: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    return flags if inside is None else flags & inside


def _terms(values: NDArray[Any], segments: _Segments, starts: Int64 | None, window: NDArray[np.bool_] | None) -> UInt64:
    """What each element adds to its row's fingerprint: 0 outside the valid window."""
    terms: UInt64 = mix_in_place(image(values))
    table = powers(int(segments.lengths.max(initial=0)))
    positions = segments.positions
    if starts is not None:
        positions = np.maximum(positions - np.repeat(starts, segments.lengths), 0)
    terms *= table[positions]
    if window is not None:
        terms *= window
    return terms


def _mask_fingerprints(
    mask: NDArray[np.bool_], segments: _Segments, starts: Int64 | None, window: NDArray[np.bool_] | None
) -> UInt64:
    return segments.reduce(np.add, _terms(mask, segments, starts, window), np.uint64(0))


def _prefixes(terms: UInt64, segments: _Segments, starts: Int64 | None, cuts: Int64) -> UInt64:
    """Fingerprints of the first ``cuts`` valid elements: differences of one wrapped running sum."""
    running = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(terms)])
    begins = segments.begins if starts is None else segments.begins + starts
    prefixes: UInt64 = running[begins[:, None] + cuts] - running[begins][:, None]
    return prefixes


def _sums(x: NDArray[Any], segments: _Segments, inside: NDArray[np.bool_] | None) -> tuple[Float64, Float64, Float64]:
    """Sum over the container, sum under ``inside``, sum of squares under ``inside``."""
    if x.dtype.kind == "i":
        largest = max(float(x.max(initial=0)), -float(x.min(initial=0)))
        if largest**2 * float(segments.lengths.max(initial=0)) < _EXACT:
            under = x if inside is None else x * inside
            total = segments.reduce(np.add, x, 0).astype(np.float64)
            within = total if inside is None else segments.reduce(np.add, under, 0).astype(np.float64)
            return total, within, segments.reduce(np.add, under * under, 0).astype(np.float64)
        x = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if inside is None:
            total, squares = tree_sum(np.stack([x, x * x]), segments.lengths)
            return total, total, squares
        under = np.where(inside, x, 0.0)
        sums = tree_sum(np.stack([x, under, under * under]), segments.lengths)
    return sums[0], sums[1], sums[2]


def _extreme(ufunc: np.ufunc, x: NDArray[Any], segments: _Segments, inside: NDArray[np.bool_] | None) -> Float64:
    """Least or greatest element under ``inside``, NaN elements ignored; NaN where there is none."""
    if inside is not None:
        x = np.where(inside, x, np.nan)
    elif x.dtype.kind != "f":
        x = x.astype(np.float64)
    extremes: Float64 = segments.reduce(ufunc, x, np.nan) + 0.0
    return extremes


def tree_sum(values: Float64, lengths: Int64) -> Float64:
    """Row sums by a binary tree over positions: neighbours first, zero-padded to a power of two.

    Args:
        values: ``(sum(lengths),)`` float64, row after row; or ``(k, sum(lengths))``, k contents of the same rows.
        lengths: ``(rows,)`` elements of each row; an empty row sums to 0.0.

    Returns:
        ``(rows,)`` or ``(k, rows)``.
    """
    widths = lengths
    with np.errstate(invalid="ignore", over="ignore"):
        while True:
            padded = (widths + _LEAF - 1) // _LEAF * _LEAF
            if not np.array_equal(padded, widths):
                shift = (np.cumsum(padded) - padded) - (np.cumsum(widths) - widths)
                wide = np.zeros((*values.shape[:-1], int(padded.sum())))
                wide[..., np.arange(values.shape[-1]) + np.repeat(shift, widths)] = values
                values = wide
            for _ in range(4):  # log2(_LEAF): rows start at multiples of _LEAF, so pairs never cross a border
                values = values[..., 0::2] + values[..., 1::2]
            widths = padded // _LEAF
            if widths.max(initial=0) <= 1:
                break
    result = np.zeros((*values.shape[:-1], len(lengths)))
    result[..., widths > 0] = values
    return result + 0.0
