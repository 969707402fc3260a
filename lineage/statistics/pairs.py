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
    rows, total = len(lengths), len(a)
    row = np.repeat(np.arange(rows), lengths)
    near = mask[1:] & mask[:-1] & (row[1:] == row[:-1])  # a token and the one before it, both in the row and counted
    # one line a side: a and b at shift 0, a with b one token earlier, a with b one token later
    sides = np.zeros((7, total))
    np.copyto(sides[0], a, where=mask)
    np.copyto(sides[1], b, where=mask)
    np.copyto(sides[2, 1:], a[1:], where=near)
    np.copyto(sides[3, 1:], b[:-1], where=near)
    np.copyto(sides[4, :-1], a[:-1], where=near)
    np.copyto(sides[5, :-1], b[1:], where=near)
    with np.errstate(invalid="ignore"):  # two infinities differ by NaN
        difference = np.abs(sides[0] - sides[1])
    sides[6] = difference
    sums = tree_sum(sides, lengths)
    n_in, n_near = np.bincount(row[mask], minlength=rows), np.bincount(row[1:][near], minlength=rows)
    largest = np.zeros(rows)
    full = np.flatnonzero(lengths)
    if len(full):
        largest[full] = np.fmax.reduceat(difference, (np.cumsum(lengths) - lengths)[full])
    corr0, corr_prev, corr_next = _correlations(
        sides[:6], sums[:6], [n_in, n_near, n_near], [mask, near, near], row, lengths
    )
    return PairStatistics(
        sums[6],
        np.where(n_in > 0, largest, np.nan),
        corr0,
        corr_prev,
        corr_next,
        n_equal=np.bincount(row[mask & (a == b)], minlength=rows).astype(np.int64),
        n_in=n_in.astype(np.int64),
    )


def _correlations(
    sides: Float64,
    sums: Float64,
    counts: list[NDArray[np.int64]],
    masks: list[NDArray[np.bool_]],
    row: NDArray[np.int64],
    lengths: Int64,
) -> list[Float64]:
    """Pearson's correlation of each pair of lines; NaN where one is constant or fewer than two tokens count."""
    products = np.zeros((9, sides.shape[1]))
    places = [slice(None), slice(1, None), slice(None, -1)]  # where a line's counted tokens lie
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for pair, (count, mask, place) in enumerate(zip(counts, masks, places, strict=True)):
            left, right = (sides[line] - (sums[line] / count)[row] for line in (2 * pair, 2 * pair + 1))
            for line, product in enumerate((left * left, right * right, left * right)):
                np.copyto(products[3 * pair + line, place], product[place], where=mask)
        moments = tree_sum(products, lengths)
        spreads = moments[0::3] * moments[1::3]
        found = moments[2::3] / np.sqrt(spreads)
    enough = np.stack(counts) >= 2
    return list(np.where(enough & (spreads > 0), found, np.nan))
