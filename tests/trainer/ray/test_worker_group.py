"""What the driver tells each rank, without Ray's processes."""

from __future__ import annotations

import pytest

from lineage.hooks import LineageError
from lineage.trainer.protocol import KVBatchMeta
from lineage.trainer.ray.worker_group import WorkerGroup


class Rank:
    """A rank that may not be asked."""

    def __getattr__(self, method: str) -> object:
        raise AssertionError(f"{method} was called: the other ranks wait for this one in a collective")


@pytest.mark.parametrize(
    ("method", "rows", "ranks"),
    [
        ("compute_log_prob", 5, 4),  # two each for the first two, one for the third, none for the last
        ("compute_ref_log_prob", 1, 2),
        ("update_actor", 3, 4),
        ("compute_log_prob", 0, 2),
    ],
)
def test_a_batch_with_rows_for_some_ranks_only_is_one_line(method: str, rows: int, ranks: int) -> None:
    """Every rank takes part in what follows, so none is asked."""
    keys = [f"u_{row}_0" for row in range(rows)]
    batch = KVBatchMeta(keys, [{}] * rows, "train", extra_info={})
    with pytest.raises(LineageError) as caught:
        getattr(WorkerGroup([Rank()] * ranks), method)(batch)
    said = str(caught.value)
    assert said.startswith(f"{method}: ")
    assert f"none for some of the {ranks} ranks" in said
    assert "\n" not in said
