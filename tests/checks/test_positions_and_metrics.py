"""Positions, attention, metrics and kinds of values: what is legal stays silent, and who is told of what."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import synthetic
from faults import change, pick

from lineage.checks import Kind, Verdict, check


def verdict(path: object, code: str) -> Verdict:
    """What one code says of a trace."""
    (only,) = check(path, select=[code]).verdicts
    return only


def of_field(rows: list[synthetic.Row], field: str) -> Iterator[synthetic.Row]:
    return (row for row in rows if row.field == field and row.entity == "trajectory" and row.lists)


def logged(rows: list[synthetic.Row], name: str) -> tuple[synthetic.Row, int]:
    row = pick(rows, "metrics", "produce", "metrics")
    return row, list(row.lists["key"]).index(name)


def test_positions_of_several_axes_are_judged_by_shape_alone(rows, write):
    """What an image model's positions are no rule of the text says."""
    for row in of_field(rows, "position_ids"):
        row.scalars["shape"] = [len(row), -1, 3]
        row.lists |= {name: row.lists[name] * 3 for name in ("length", "valid_length")}
        row.lists["fingerprint"] = row.lists["fingerprint"] + np.uint64(1)
    assert verdict(write(rows), "LEN006").kind is Kind.VACUOUS


def test_padding_that_is_attended_to_is_told_from_a_row_that_is_not(rows, write):
    """Ones behind the row's end are in the container, not in its valid elements."""
    row = next(row for row in of_field(rows, "attention_mask") if row.stage == "update_actor")
    change(row, "nnz", 0, row.lists["nnz"][0] + 2)
    found = verdict(write(rows), "LEN008")
    assert found.kind is Kind.FAIL
    assert [one.detail for one in found.violations] == ["padding is attended to"]


def test_a_metric_over_padding_is_not_any_wrong_metric(rows, write):
    """A mean that is right over all rows is PAD002's, one that is right over none MET001's."""
    row, at = logged(rows, "critic/score/mean")
    padding = pick(rows, "balance", "reorder", "key").lists["is_padding"]
    right = float(row.lists["sum"][at])
    for factor, wrong, silent in ((1 - padding.mean(), "PAD002", "MET001"), (0.5, "MET001", "PAD002")):
        change(row, "sum", at, right * factor)
        path = write(rows)
        assert (verdict(path, wrong).kind, verdict(path, silent).kind) == (Kind.FAIL, Kind.PASS)


def test_a_metric_nobody_can_recompute_is_not_judged(rows, write):
    """A user's own metric, whatever it says."""
    row, at = logged(rows, "critic/score/mean")
    change(row, "key", at, "own/score/mean")
    change(row, "sum", at, 1e9)
    assert verdict(write(rows), "MET001").kind is Kind.PASS


def test_an_undefined_metric_is_a_warning(rows, write):
    """A mean over nothing is NaN: no training has gone wrong by it."""
    row, at = logged(rows, "critic/score/mean")
    row.lists |= {name: np.zeros(len(row), dtype=np.int64) for name in ("nonfinite", "nonfinite_in")}
    change(row, "nonfinite_in", at, 1)
    found = verdict(write(rows), "VAL001")
    assert (found.kind, found.warnings) == (Kind.PASS, 1)


@pytest.mark.parametrize(("dtype", "kind"), [("bool", Kind.PASS), ("int32", Kind.PASS), ("float32", Kind.FAIL)])
def test_masks_are_integers_or_bools(rows, write, dtype, kind):
    """How wide they are is their own affair."""
    for row in of_field(rows, "response_mask"):
        row.scalars["dtype"] = dtype
    assert verdict(write(rows), "VAL002").kind is kind
