"""Spreading the work of a batch evenly over data-parallel ranks.

The second half of verl's ``_balance_batch`` (``get_seqlen_balanced_partitions``, the Karmarkar-Karp differencing
method); the first, padding rows, is ``padding.py``. The order of dispatch changes, group membership never does: rows
travel with their keys and tags.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def workload(seq_len: int) -> int:
    """Relative cost of a sequence: linear layers plus attention (verl ``calculate_workload``, a 7B model's ratio)."""
    return 24576 * seq_len + seq_len * seq_len


@dataclass(frozen=True)
class Balance:
    """A new order of the rows: rank ``r`` gets the ``r``-th contiguous part of it.

    Attributes:
        order: ``order[i]`` is the old position of the row now at ``i``.
        loads_before: work of each rank in the old order.
        loads_after: work of each rank in the new order.
    """

    order: list[int]
    loads_before: list[int]
    loads_after: list[int]


def balance_rows(seq_lens: Sequence[int], dp_size: int) -> Balance:
    """Deal rows to ``dp_size`` ranks in equal numbers with nearly equal work.

    Differencing is a heuristic, so the old order is kept when it is already as even: the spread never grows.

    Args:
        seq_lens: tokens of each row, in dispatch order; their number is a multiple of ``dp_size``.
    """
    rows = len(seq_lens)
    if rows % dp_size:
        raise ValueError(f"{rows} rows do not deal equally to {dp_size} ranks")
    costs = [workload(length) for length in seq_lens]
    old = deal(rows, dp_size)
    before = _loads(old, costs)
    new = karmarkar_karp(costs, dp_size) if dp_size > 1 else old
    after = _loads(new, costs)
    if _spread(after) >= _spread(before):
        new, after = old, before
    return Balance([row for part in new for row in part], before, after)


def deal(rows: int, ranks: int) -> list[list[int]]:
    """Positions of the rows each data-parallel rank is handed: equal parts, in order."""
    share = rows // ranks
    return [list(range(rank * share, (rank + 1) * share)) for rank in range(ranks)]


def deal_to_score(rows: int, ranks: int) -> list[list[int]]:
    """Positions of the rows each data-parallel rank scores, in order; any number of rows may be scored.

    Where the rows divide these are :func:`deal`'s; else the last ranks have fewer, and one without rows is left out.
    """
    share = max(-(-rows // ranks), 1)
    return [list(range(rows))[start : start + share] for start in range(0, rows, share)]


def karmarkar_karp(costs: Sequence[int], parts: int, *, equal_size: bool = True) -> list[list[int]]:
    """Split positions into ``parts`` sets with nearly equal total cost.

    The largest differencing method on tuples: start from groups of ``parts`` rows of neighbouring cost, one row a set,
    and keep merging the two most uneven states, the heaviest set of one with the lightest of the other.

    Args:
        equal_size: sets of equally many rows, whose number is then a multiple of ``parts``; else each state starts
            from one row, and sets are even in cost alone.

    Returns:
        Positions of each set, rising inside a set.
    """
    by_cost = sorted(range(len(costs)), key=lambda row: (costs[row], row))
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    a_state = parts if equal_size else 1
    for start in range(0, len(by_cost), a_state):
        state = [(costs[row], [row]) for row in by_cost[start : start + a_state]]
        empty: list[tuple[int, list[int]]] = [(0, []) for _ in range(parts - len(state))]
        _push(heap, start, empty + state)
    serial = len(by_cost)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(one, reversed(other), strict=True)]
        _push(heap, serial, merged)
        serial += 1
    if not heap:
        return [[] for _ in range(parts)]
    return sorted(sorted(rows) for _, rows in heap[0][2])


def _push(heap: list[Any], serial: int, state: list[tuple[int, list[int]]]) -> None:
    """Add a state, sets in rising cost; the serial number breaks ties the same way in every run."""
    state.sort(key=lambda part: part[0])
    heapq.heappush(heap, (state[0][0] - state[-1][0], serial, state))


def _loads(parts: Sequence[Sequence[int]], costs: Sequence[int]) -> list[int]:
    return [sum(costs[row] for row in part) for part in parts]


def _spread(loads: Sequence[int]) -> int:
    return max(loads) - min(loads)
