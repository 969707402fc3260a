"""Steps that hand over, reorder and deal several batches: each batch is held to its own rows."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
import synthetic
from faults import MERGED_FAULTS, change, lost_rank, reorders

from lineage.checks import check

# What a step may do: S samples a batch, P pads it, R reorders all of it, V samples for a validation.
ORDERS = (
    "SPR",
    "SR",
    "SPRSPR",
    "SRVSPRSR",  # one batch is padded, a validation between two
    "SSPR",  # one batch sampled in two calls
    "SPSPR",  # one batch of two that were padded
    "SPRR",  # a batch reordered twice
    "SPRRSRR",
    "SPV",  # nothing is reordered
)
SIZES = {"S": 4, "V": 3, "P": 2}


def step_of(order: str, number: int, rng: np.random.Generator) -> list[synthetic.Row]:
    """The rows of one step that says only what it hands over and how it reorders it."""
    rows: list[synthetic.Row] = []
    names, batch, last = count(), np.empty(0, dtype=object), ""
    for letter in order:
        if letter == "R":
            source = rng.permutation(len(batch))
            batch = batch[source]
            rows.append(_row("balance", "reorder", number, batch, source_index=source))
        else:
            keys = np.array([f"{number}-{next(names)}_0_0" for _ in range(SIZES[letter])], dtype=object)
            stage, op = ("balance", "pad") if letter == "P" else ("sample", "produce")
            rows.append(_row(stage, op, number, keys, is_padding=np.full(len(keys), letter == "P")))
            if letter == "V":
                rows[-1].scalars["partition"] = "val"
                continue
            batch = keys if last == "R" and letter == "S" else np.concatenate([batch, keys])
        last = letter
    return rows


def _row(stage: str, op: str, number: int, keys: np.ndarray, **lists: np.ndarray) -> synthetic.Row:
    return synthetic.Row(stage, op, "key", scalars={"global_steps": number}, lists={"key": keys, **lists})


@pytest.fixture
def merged() -> list[synthetic.Row]:
    """Two clean steps with padding, as one step of two batches; no row says which batch it is of."""
    rows = [row for step in synthetic.steps(2, synthetic.small(padding=4)) for row in step]
    for row in rows:
        row.scalars["global_steps"] = min(row.scalars["global_steps"], 1)
        for name, value in (("global_steps_tag", 1), ("min_global_steps", 0), ("max_global_steps", 0)):
            if name in row.lists:
                row.lists[name] = np.full(len(row), value)
    return rows


def test_however_a_step_hands_over_its_batches_a_true_reorder_passes(write):
    """Batches in a row, batches sampled in parts, reordered twice or beside a validation are no violation."""
    rng = np.random.default_rng(0)
    rows = [row for number, order in enumerate(ORDERS, start=1) for row in step_of(order, number, rng)]
    (verdict,) = check(write(rows), select=["KEY003"]).verdicts
    assert (str(verdict.kind), verdict.examined) == ("pass", sum(len(row) for row in reorders(rows)))


def test_a_false_place_is_named_whichever_reorder_says_it(write):
    """Of every order, each reorder with two places swapped is reported, and no other."""
    rng = np.random.default_rng(1)
    rows, false = [], set()
    for order in ORDERS:
        for at in range(order.count("R")):
            number = len(false) + 1
            step = step_of(order, number, rng)
            broken = reorders(step)[at]
            source = broken.lists["source_index"]
            change(broken, "source_index", 0, source[1])
            change(broken, "source_index", 1, source[0])
            false.add((number, len(rows) + next(i for i, row in enumerate(step) if row is broken)))
            rows += step
    (verdict,) = check(write(rows), select=["KEY003"]).verdicts
    assert {(one.global_steps, one.seq) for one in verdict.violations} == false


def test_clean_batches_of_one_step_pass(merged, write):
    """Two batches in one step are reordered and dealt each by itself."""
    report = check(write(merged), select=["KEY003", "BAT001"])
    assert {verdict.code: str(verdict.kind) for verdict in report.verdicts} == {"KEY003": "pass", "BAT001": "pass"}


@pytest.mark.parametrize("name", MERGED_FAULTS)
def test_a_fault_in_one_batch_of_a_step_is_found(name, merged, write):
    """What leaves the keys of the whole step as they were is found in its batch."""
    mutate, stage = MERGED_FAULTS[name]
    mutate(merged)
    report = check(write(merged), select=["KEY003"])
    assert report.headline is not None
    violation = report.headline.violation
    assert violation.stage == stage
    assert violation.expected != violation.actual


def test_a_rank_that_gets_no_part_is_reported(rows, write):
    """A batch dealt to fewer ranks than the backend reports has lost a part."""
    lost_rank(rows)
    report = check(write(rows), select=["BAT001"])
    assert report.headline is not None
    violation = report.headline.violation
    assert (violation.stage, violation.global_steps) == ("update_actor", 3)
    assert (violation.expected, violation.actual) == ("a part for each of 2 ranks", "1 parts")


def test_a_rank_that_records_its_own_part_misses_no_other(rows, write):
    """In the rows of one rank's process there is one part, whatever the number of ranks."""
    own = [row for row in rows if row.op != "dispatch" or row.scalars["coord"] == {"dp": 0}]
    for row in own:
        if row.op == "split":
            row.scalars["coord"] = {"dp": 0}
    (verdict,) = check(write(own), select=["BAT001"]).verdicts
    assert (str(verdict.kind), verdict.errors) == ("pass", 0)
