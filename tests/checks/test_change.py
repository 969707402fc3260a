"""Between which two events the content at fault changed, as the headline says it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from faults import FAULTS, change, pick

from lineage.checks import check
from lineage.checks.formats.json import render as as_json


def report_of(rows, write, code):
    """What a code says of a trace with its fault."""
    FAULTS[code][0](rows)
    return check(write(rows), select=[code])


def test_content_that_changed_is_between_two_events(rows, write):
    """Written in the rollout, read as written before the update, read as something else there."""
    for row in rows:
        if (row.stage, row.op, row.field) == ("update_actor", "consume", "input_ids"):
            row.lists["fingerprint"] = row.lists["fingerprint"] + np.uint64(1)
    head = check(write(rows), select=["QUE003"]).headline
    assert head is not None
    found = head.change
    assert found is not None
    assert (found.what, found.whose) == ("content", None)
    assert (found.written.op, found.written.stage) == ("produce", "rollout")
    assert found.producer == pick(rows, "rollout", "produce", "input_ids").scalars["producer"]
    assert found.before.stage != "update_actor"
    assert (found.after.op, found.after.field, found.after.stage) == ("consume", "input_ids", "update_actor")
    assert (found.after.process, found.after.seq) == (head.violation.process, head.violation.seq)


def test_content_that_is_another_row_s_names_that_row(rows, write):
    """Rows that come back in another order have each other's content."""
    row = pick(rows, "update_actor", "consume", "input_ids")
    for column in ("fingerprint", "valid_length", "length"):
        if column in row.lists:
            row.lists[column] = np.roll(row.lists[column], 1)
    head = check(write(rows), select=["QUE003"]).headline
    assert head is not None
    assert head.change is not None
    keys = list(row.lists["key"])
    assert head.change.whose == keys[keys.index(head.violation.key) - 1]


def test_a_mask_that_changed_is_held_against_the_one_written(rows, write):
    """A field made under another mask: the last event under the rollout's, the first under the other."""
    head = report_of(rows, write, "MSK002").headline
    assert head is not None
    assert head.change is not None
    assert head.change.what == "mask"
    assert (head.change.written.field, head.change.written.stage) == ("response_mask", "rollout")
    assert head.change.after.seq == head.violation.seq


@pytest.mark.parametrize("code", ["TOK001", "KEY002", "TOP001"])
def test_what_was_wrong_from_the_start_changed_nowhere(rows, write, code):
    """Wrong when it was first written, or no content of a trajectory at all: nothing is said."""
    report = report_of(rows, write, code)
    assert report.headline is not None
    assert report.headline.change is None
    assert "changed" not in str(report)


def test_every_form_of_the_report_says_it(rows, write):
    """The text names both events; the JSON holds them."""
    report = report_of(rows, write, "MSK002")
    head = report.headline
    assert head is not None
    assert head.change is not None
    text = str(report)
    assert f"the first that had another: {head.change.after}" in text
    said = json.loads(as_json([report]))["headline"]["change"]
    assert said["after"] == {
        name: getattr(head.change.after, name) for name in ("op", "field", "stage", "process", "seq")
    }


def test_a_change_is_asked_for_only_when_something_failed(rows, write, monkeypatch):
    """A clean trace costs no query."""

    def never(*arguments):
        raise AssertionError

    monkeypatch.setattr("lineage.checks.blame.change", never)
    assert check(write(rows), select=["KEY001", "MSK002"]).exit_code == 0
    change(pick(rows, "advantage", "pad", "rm_scores"), "mask_sum", 0, 10_000)
    with pytest.raises(AssertionError):
        check(write(rows), select=["MSK002"])
