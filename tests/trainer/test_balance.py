"""Balance: rows dealt to ranks, none lost, never less even than before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.trainer.batching.balance import balance_rows, karmarkar_karp, workload


@st.composite
def batches(draw):
    """Sequence lengths that deal equally to a number of ranks."""
    ranks = draw(st.integers(1, 5))
    share = draw(st.integers(0, 8))
    lengths = draw(st.lists(st.integers(1, 2000), min_size=ranks * share, max_size=ranks * share))
    return lengths, ranks


@given(batches())
def test_balance_is_a_permutation(batch):
    """Every row comes once in the new order."""
    lengths, ranks = batch
    assert sorted(balance_rows(lengths, ranks).order) == list(range(len(lengths)))


@given(batches())
def test_balance_never_widens_the_spread(batch):
    """The spread of the ranks' work is at most what it was, and is that of the order returned."""
    lengths, ranks = batch
    balance = balance_rows(lengths, ranks)
    share = len(lengths) // ranks
    parts = [balance.order[rank * share : (rank + 1) * share] for rank in range(ranks)]
    assert balance.loads_after == [sum(workload(lengths[row]) for row in part) for part in parts]
    spread = max(balance.loads_after) - min(balance.loads_after)
    assert spread <= max(balance.loads_before) - min(balance.loads_before)


@given(batches())
def test_differencing_makes_equal_sets(batch):
    """Each rank gets the same number of rows, all rows together once."""
    costs, parts = batch
    sets = karmarkar_karp(costs, parts)
    assert {len(rows) for rows in sets} == {len(costs) // parts}
    assert sorted(row for rows in sets for row in rows) == list(range(len(costs)))


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=30), st.integers(1, 8))
def test_differencing_without_equal_sizes_spreads_the_cost(costs, parts):
    """Rows come once; a set is heavier than the mean by less than one row, the heaviest."""
    sets = karmarkar_karp(costs, parts, equal_size=False)
    assert len(sets) == parts
    assert sorted(row for rows in sets for row in rows) == list(range(len(costs)))
    heaviest = max(sum(costs[row] for row in rows) for rows in sets)
    assert heaviest < sum(costs) / parts + max(costs)


def test_balance_evens_out_sorted_rows():
    """Rows sorted by length, the worst order to cut in contiguous parts, become nearly even."""
    balance = balance_rows([10, 20, 30, 40, 50, 60, 70, 80], 2)
    before = max(balance.loads_before) - min(balance.loads_before)
    after = max(balance.loads_after) - min(balance.loads_after)
    assert after < before / 50


def test_one_rank_keeps_the_order():
    """With a single rank there is nothing to deal."""
    assert balance_rows([5, 1, 9], 1).order == [0, 1, 2]


def test_balance_refuses_a_batch_that_does_not_deal():
    """Seven rows for two ranks are a mistake of the caller, who pads first."""
    with pytest.raises(ValueError, match="7 rows do not deal equally to 2 ranks"):
        balance_rows([1] * 7, 2)
