"""Which fact of one side is which of the other, and how the two differ.

First whole rows: rows whose facts are the same facts and say the same, in whatever order. Then single facts that say
the same: rows may be cut otherwise. Last facts that are the same and say something else, in the order of their events;
what is left has no partner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from lineage.traces.diff.facts import Facts
from lineage.traces.diff.hashing import Bool, Int64, UInt64, among, distinct, mixed

NONE = -1
_PLACE = ("process", "rank", "topology", "counters", "rows")
_FORM = ("dtype", "device", "container", "producer", "consumer", "requires_grad")
#: of rows paired by their number on either side, which differ by rounding only
Rounded = Callable[[Int64, Int64], Bool]


@dataclass(frozen=True)
class Found:
    """Facts that differ in one way.

    Attributes:
        aspect: which.
        a: of each, its number on the one side; :data:`NONE` where it is on the other alone.
        b: likewise.
        count: of each, how many facts it stands for: a whole row stands for all of its own.
    """

    aspect: str
    a: Int64
    b: Int64
    count: Int64


@dataclass(frozen=True)
class Matching:
    """What two sides have in common and what not.

    Attributes:
        found: where they differ, in every way.
        rows: rows with a fact in common, ``(2, pairs)`` of ``a`` and ``b``, by those of ``b``: they tell where an event
            of one side belongs on the other.
    """

    found: tuple[Found, ...]
    rows: Int64


def pair(a: UInt64, b: UInt64) -> tuple[Int64, Int64]:
    """Pair equal values, the first of one side with the first of the other and so on; each at most once.

    Returns:
        the numbers of the paired, ``(pairs,)`` on either side.
    """
    order_a, order_b = np.argsort(a, kind="stable"), np.argsort(b, kind="stable")
    value_a, first_a, count_a = np.unique(a[order_a], return_index=True, return_counts=True)
    value_b, first_b, count_b = np.unique(b[order_b], return_index=True, return_counts=True)
    _, at_a, at_b = np.intersect1d(value_a, value_b, assume_unique=True, return_indices=True)
    counts = np.minimum(count_a[at_a], count_b[at_b])
    inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return order_a[np.repeat(first_a[at_a], counts) + inside], order_b[np.repeat(first_b[at_b], counts) + inside]


def match(a: Facts, b: Facts, rtol: float, rounded: Rounded) -> Matching:
    """Hold some steps of two sides against each other.

    Args:
        a, b: their facts, rows in event order.
        rtol: by how much of their greatest value floats may differ to be called rounded.
        rounded: says it of context.
    """
    rows_a, rows_b = _rows(a, b)
    found = list(_moved_rows(a, b, rows_a, rows_b))
    left_a, left_b = _left(a, rows_a), _left(b, rows_b)
    same_a, same_b = pair(a.value[left_a], b.value[left_b])
    found += _moved(a, b, left_a[same_a], left_b[same_b])
    one_a, one_b = np.delete(left_a, same_a), np.delete(left_b, same_b)
    at_a, at_b = pair(a.who[one_a], b.who[one_b])
    other_a, other_b = one_a[at_a], one_b[at_b]
    torn = _torn(a, b)
    found += _changed(a, b, other_a, other_b, torn, rtol, rounded)
    found += _moved(a, b, other_a, other_b)
    alone_a, alone_b = np.delete(one_a, at_a), np.delete(one_b, at_b)
    found += _alone(a, b, alone_a, torn, lambda which: (which, np.full(len(which), NONE)))
    found += _alone(b, a, alone_b, torn, lambda which: (np.full(len(which), NONE), which))
    paired_a = np.concatenate([rows_a, a.row[left_a[same_a]], a.row[other_a]])
    paired_b = np.concatenate([rows_b, b.row[left_b[same_b]], b.row[other_b]])
    rows = distinct((paired_b * len(a.rid) + paired_a).view(np.uint64)).view(np.int64)
    return Matching(tuple(found), np.stack([rows % len(a.rid), rows // len(a.rid)]))


def _rows(a: Facts, b: Facts) -> tuple[Int64, Int64]:
    """Rows with the same facts; where there are several, those of one process first."""
    near_a, near_b = pair(a.total + mixed(a.told["process"], "near"), b.total + mixed(b.told["process"], "near"))
    rest_a = np.delete(np.arange(len(a.rid)), near_a)
    rest_b = np.delete(np.arange(len(b.rid)), near_b)
    far_a, far_b = pair(a.total[rest_a], b.total[rest_b])
    return np.concatenate([near_a, rest_a[far_a]]), np.concatenate([near_b, rest_b[far_b]])


def _left(side: Facts, rows: Int64) -> Int64:
    """The facts of the other rows, in event order."""
    free = np.ones(len(side.rid), dtype=bool)
    free[rows] = False
    left = np.flatnonzero(free[side.row])
    ordered: Int64 = left[np.lexsort((side.at[left], side.row[left]))]
    return ordered


def _moved_rows(a: Facts, b: Facts, rows_a: Int64, rows_b: Int64) -> Iterator[Found]:
    first_a, slots_a = _by_row(a)
    first_b, slots_b = _by_row(b)
    for aspect in _PLACE:
        differs = a.told[aspect][rows_a] != b.told[aspect][rows_b]
        if aspect == "counters":
            differs |= slots_a[rows_a] != slots_b[rows_b]
        if differs.any():
            yield Found(aspect, first_a[rows_a[differs]], first_b[rows_b[differs]], a.size[rows_a[differs]])


def _by_row(side: Facts) -> tuple[Int64, UInt64]:
    """Of each row its first fact, and a hash of the slots of all."""
    order = np.argsort(side.row, kind="stable")
    starts = np.cumsum(side.size) - side.size
    slots = mixed(side.who + side.said["slot"], "slot")[order]
    return order[starts], np.add.reduceat(slots, starts) if len(starts) else np.empty(0, np.uint64)


def _moved(a: Facts, b: Facts, of_a: Int64, of_b: Int64) -> Iterator[Found]:
    """Facts that are elsewhere."""
    row_a, row_b = a.row[of_a], b.row[of_b]
    for aspect in _PLACE:
        differs = a.told[aspect][row_a] != b.told[aspect][row_b]
        if aspect == "counters":
            differs |= a.said["slot"][of_a] != b.said["slot"][of_b]
        yield from _as(aspect, differs, of_a, of_b)


def _torn(a: Facts, b: Facts) -> UInt64:
    """Who is said once a micro-batch and in other numbers on the sides: they were cut otherwise."""
    who_a, count_a = np.unique(a.who[a.micro[a.row] & (a.at == 0)], return_counts=True)
    who_b, count_b = np.unique(b.who[b.micro[b.row] & (b.at == 0)], return_counts=True)
    _, at_a, at_b = np.intersect1d(who_a, who_b, assume_unique=True, return_indices=True)
    cut: UInt64 = who_a[at_a][count_a[at_a] != count_b[at_b]]
    return cut


def _changed(
    a: Facts, b: Facts, of_a: Int64, of_b: Int64, torn: UInt64, rtol: float, rounded: Rounded
) -> Iterator[Found]:
    """The same facts saying something else."""
    clock, cut = a.clock[of_a], among(a.who[of_a], torn)
    yield from _as("timing", clock, of_a, of_b)
    yield from _as("micro_batch", cut, of_a, of_b)
    of_a, of_b = of_a[~(clock | cut)], of_b[~(clock | cut)]
    row_a, row_b = a.row[of_a], b.row[of_b]

    def differs(name: str) -> Bool:
        return np.not_equal(a.said[name][of_a], b.said[name][of_b])

    def told(name: str) -> Bool:
        return np.not_equal(a.told[name][row_a], b.told[name][row_b])

    length, mask, content, width = (differs(name) for name in ("length", "mask", "fingerprint", "width"))
    close = content & ~length & ~mask & a.floating[row_a] & b.floating[row_b]
    close[close] = _close(a, b, of_a[close], of_b[close], rtol)
    attrs = told("attrs")
    of_cut = attrs & a.micro[row_a] & b.micro[row_b] & (a.at[of_a] > 0)  # of the cut that the element lies in
    context = told("context") | (attrs & ~of_cut)
    near = context.copy()
    near[context] = rounded(row_a[context], row_b[context])
    yield from _as("length", length, of_a, of_b)
    yield from _as("mask", mask, of_a, of_b)
    weights, apart = content & a.tensor[row_a], content & ~close & a.difference[of_a]
    yield from _as("weights", weights, of_a, of_b)
    yield from _as("fingerprint", content & ~close & ~weights & ~apart, of_a, of_b)
    yield from _as("rounding", close | near, of_a, of_b)
    same = ~(length | mask | content)
    yield from _as("statistics", same & (differs("inner") | (differs("outer") & ~width)), of_a, of_b)
    yield from _as("comparison", differs("comparison") | apart, of_a, of_b)
    yield from _as("tags", differs("tags"), of_a, of_b)
    yield from _as("context", context & ~near, of_a, of_b)
    yield from _as("micro_batch", of_cut, of_a, of_b)
    yield from _as("layout", told("layout") | (width & ~length), of_a, of_b)
    for aspect in _FORM:
        yield from _as(aspect, told(aspect), of_a, of_b)


def _close(a: Facts, b: Facts, of_a: Int64, of_b: Int64, rtol: float) -> Bool:
    """Floats whose statistics are within ``rtol`` of their greatest value; what has none is not."""

    def both(name: str) -> tuple[np.ndarray, np.ndarray]:
        return a.numbers[name][of_a], b.numbers[name][of_b]

    scale = np.max(np.abs(np.stack([*both("min_in"), *both("max_in")])), axis=0) if len(of_a) else np.empty(0)
    length = np.maximum(both("valid_length")[0], 1)
    bounds = {"min_in": scale, "max_in": scale, "sum_in": scale * length, "sum_sq_in": 2 * scale * scale * length}
    close = np.ones(len(of_a), dtype=bool)
    with np.errstate(invalid="ignore"):
        for name, bound in bounds.items():
            one, other = both(name)
            close &= np.abs(one - other) <= rtol * bound
    return close


def _alone(
    side: Facts, other: Facts, which: Int64, torn: UInt64, sides: Callable[[Int64], tuple[Int64, Int64]]
) -> Iterator[Found]:
    """Facts without a partner."""
    padded = distinct(side.key[side.padding])
    # Which of the equal ranks of a replica has no partner is chance.
    told_again = distinct(side.who[side.further[side.row]])
    again = among(side.who[which], told_again) & among(side.who[which], other.who)
    replica = (side.sliced[side.row[which]] | again) & (not (other.further | other.sliced).any())
    kinds = {
        "replica": replica,
        "timing": side.clock[which],
        "micro_batch": among(side.who[which], torn),
        "copies": among(side.value[which], other.value),
        "padding": among(side.key[which], padded) & ~among(side.key[which], other.key),
    }
    rest = np.ones(len(which), dtype=bool)
    for aspect, of_kind in kinds.items():
        yield from _as(aspect, of_kind & rest, *sides(which))
        rest &= ~of_kind
    yield from _as("missing", rest, *sides(which))


def _as(aspect: str, differs: Bool, of_a: Int64, of_b: Int64) -> Iterator[Found]:
    if differs.any():
        yield Found(aspect, of_a[differs], of_b[differs], np.ones(int(differs.sum()), np.int64))
