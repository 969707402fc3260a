"""Two sides of one field compared row by row: differences, and correlations at shift 0, -1 and +1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lineage.statistics.rows import Float64, Int64
from lineage.statistics.with_numpy import tree_sum


@dataclass(frozen=True)
class PairStatistics:
    """One array of ``(rows,)`` a statistic; names as in the schema. NaN stands for null."""

    absdiff_sum: Float64
    absdiff_max: Float64
    corr0: Float64
    corr_prev: Float64
    corr_next: Float64
    n_equal: Int64
    n_in: Int64


def pair_statistics(a: Float64, b: Float64, lengths: Int64, mask: NDArray[np.bool_]) -> PairStatistics:
    """Compare two ragged contents of the same lengths under one mask.

    Args:
        a: ``(sum(lengths),)`` float64, the field.
        b: ``(sum(lengths),)`` float64, what it is compared against.
        lengths: ``(rows,)`` elements of each row.
        mask: ``(sum(lengths),)`` which elements count.
    """
    row = np.repeat(np.arange(len(lengths)), lengths)
    difference = np.where(mask, np.abs(a - b), 0.0)
    counts = _counts(row, mask, len(lengths))
    shifts = [(b, mask), _shifted(b, mask, row, -1), _shifted(b, mask, row, 1)]
    correlations, absdiff_sum = _correlations(a, shifts, difference, row, lengths)
    largest = np.zeros(len(lengths))
    full = np.flatnonzero(lengths)
    if len(full):
        largest[full] = np.fmax.reduceat(difference, (np.cumsum(lengths) - lengths)[full])
    return PairStatistics(
        absdiff_sum,
        np.where(counts > 0, largest, np.nan),
        *correlations,
        n_equal=_counts(row, mask & (a == b), len(lengths)),
        n_in=counts,
    )


def _counts(row: NDArray[np.int64], flags: NDArray[np.bool_], rows: int) -> Int64:
    return np.bincount(row[flags], minlength=rows).astype(np.int64)


def _shifted(
    b: Float64, mask: NDArray[np.bool_], row: NDArray[np.int64], shift: int
) -> tuple[Float64, NDArray[np.bool_]]:
    """``b[i + shift]``, and where both it and ``i`` lie in one row and under the mask."""
    both = mask & np.roll(mask, -shift) & (row == np.roll(row, -shift))
    if len(both):
        both[-1 if shift > 0 else 0] = False  # np.roll wraps from one end of the block to the other
    return np.roll(b, -shift), both


def _correlations(
    a: Float64,
    others: list[tuple[Float64, NDArray[np.bool_]]],
    difference: Float64,
    row: NDArray[np.int64],
    lengths: Int64,
) -> tuple[list[Float64], Float64]:
    """Pearson's correlation of ``a`` with each other under its mask, and the row sums of ``difference``.

    NaN where a side is constant or fewer than two elements count. All sums of a pass share one tree.
    """
    sides = [np.where(mask, side, 0.0) for b, mask in others for side in (a, b)]
    sums = tree_sum(np.stack([difference, *sides]), lengths)
    products: list[Float64] = []
    counts = [_counts(row, mask, len(lengths)) for _, mask in others]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for number, (b, mask) in enumerate(others):
            mean_a, mean_b = sums[1 + 2 * number] / counts[number], sums[2 + 2 * number] / counts[number]
            da, db = np.where(mask, a - mean_a[row], 0.0), np.where(mask, b - mean_b[row], 0.0)
            products += [da * da, db * db, da * db]
        moments = tree_sum(np.stack(products), lengths)
        result = []
        for number, count in enumerate(counts):
            squares_a, squares_b, crossed = moments[3 * number : 3 * number + 3]
            spread = squares_a * squares_b
            result.append(np.where((count >= 2) & (spread > 0), crossed / np.sqrt(spread), np.nan))
    return result, sums[0]
