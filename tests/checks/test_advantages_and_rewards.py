"""Advantages and rewards: what no fault shows, because it is lawful or only worth a warning."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pyarrow.parquet as pq
import pytest
import synthetic
from faults import change, everywhere

from lineage.checks import check
from lineage.schema import META_RUN

WIDE = 16 * 2.0**-24 / 1e-6  # what float32 residue may make of equal scores of 1, over epsilon


def made(rows: list[synthetic.Row], field: str, step: int = 2, op: str = "forward") -> synthetic.Row:
    """The row of a step in which the estimator gives a field."""
    found = (row for row in rows if (row.field, row.op, row.scalars["global_steps"]) == (field, op, step))
    return next(row for row in found if row.stage == "advantage")


def groups(rows: list[synthetic.Row]) -> Iterator[tuple[list[str], np.ndarray]]:
    """The keys of each real group of step 2 and their scores."""
    row = made(rows, "token_level_rewards")
    keys = [str(key) for key in row.lists["key"]]
    for uid in sorted({key.split("_")[0] for key in keys if not key.startswith("pad")}):
        at = [place for place, key in enumerate(keys) if key.startswith(uid)]
        yield [keys[place] for place in at], row.lists["sum"][at]


def set_advantage(rows: list[synthetic.Row], key: str, value: float) -> None:
    """Give a session another advantage, wherever it is written."""
    tokens = made(rows, "advantages")
    at = next(place for place, name in enumerate(tokens.lists["key"]) if name == key)
    total = value * tokens.lists["mask_sum"][at]
    for field in ("advantages", "returns"):
        everywhere(rows, field, key, min_in=value, max_in=value, sum_in=total)


def equal_scores(rows: list[synthetic.Row]) -> list[str]:
    """Give the first group of step 2 one score, 1, and advantages of 0; its keys."""
    keys, _ = next(groups(rows))
    for key in keys:
        for field in ("rm_scores", "token_level_scores", "token_level_rewards"):
            everywhere(rows, field, key, sum=1.0, sum_in=1.0, nnz=1)
        set_advantage(rows, key, 0.0)
    return keys


@pytest.mark.parametrize(("value", "errors", "warnings"), [(0.0, 0, 0), (0.02, 0, 1), (1.5 * WIDE, 1, 0)])
def test_float_residue_of_equal_scores_is_a_warning(rows, write, value, errors, warnings):
    """Equal scores give 0; what float32 leaves over epsilon is pointed at, and more than it can leave is an error."""
    keys = equal_scores(rows)
    set_advantage(rows, keys[0], value)
    set_advantage(rows, keys[1], -value)
    (verdict,) = check(write(rows), select=["ADV003"]).verdicts
    residue = [one for one in verdict.violations if (one.field, one.expected) == ("advantages", "advantage 0")]
    assert [one.severity for one in residue].count("error") == errors
    assert [one.severity for one in residue].count("warning") == warnings


@pytest.mark.parametrize(("digits", "kind"), [(24, "pass"), (12, "fail")])
def test_the_tolerance_is_that_of_float32(rows, write, digits, kind):
    """An advantage that was rounded to float32 is the estimator's; one that lost half of its digits is not."""
    keys, _ = next((keys, scores) for keys, scores in groups(rows) if scores[0] != scores[1])
    value = made(rows, "advantages").lists["max_in"][list(made(rows, "advantages").lists["key"]).index(keys[0])]
    set_advantage(rows, keys[0], float(value) * (1 + 2.0**-digits))
    (verdict,) = check(write(rows), select=["ADV002"]).verdicts
    assert str(verdict.kind) == kind


def test_the_id_of_a_request_is_no_second_output(rows, write):
    """An engine's ids may look like keys: a session's one output stays its last, and its advantage is judged."""
    keys, _ = next(groups(rows))
    asked = next(row for row in rows if row.entity == "request" and row.scalars["global_steps"] == 2)
    change(asked, "key", 0, keys[0].removesuffix("0") + "1")
    set_advantage(rows, keys[0], 5.0)
    (verdict,) = check(write(rows), select=["ADV002"]).verdicts
    assert {one.key for one in verdict.violations} == {keys[0]}


def test_without_a_word_on_the_estimator_nothing_is_recomputed(rows, write):
    """A trace that does not say which estimator it used is not held to the group's formula."""
    path = write(rows)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata(synthetic.metadata({})), path)
    verdicts = check(path, select=["ADV002", "ADV003", "ADV004", "ADV005"]).verdicts
    assert {str(one.kind) for one in verdicts} == {"vacuous"}


@pytest.mark.parametrize(("profile", "kind", "warnings"), [("lineage", "fail", 0), ("verl", "pass", 1)])
def test_verl_trains_a_declared_group_of_one_on_its_score(rows, write, profile, kind, warnings):
    """A group declared to have one session trains on its raw score in verl, which is pointed at, and nowhere else."""
    keys, _ = next(groups(rows))
    uid = keys[0].split("_")[0]
    rows = [without(row, keys[1]) for row in rows]
    for row in rows:
        if row.entity == "prompt" and "expected" in row.lists:
            at = [str(key) for key in row.lists["key"]].index(uid) if uid in row.lists["key"] else None
            if at is not None:
                change(row, "expected", at, 1)
    set_advantage(rows, keys[0], 1.0)
    path = write(rows)
    table = pq.read_table(path)
    run = json.loads(table.schema.metadata[META_RUN]) | {"profile": profile}
    pq.write_table(table.replace_schema_metadata(table.schema.metadata | {META_RUN: json.dumps(run)}), path)
    (verdict,) = check(path, select=["ADV005"]).verdicts
    assert (str(verdict.kind), verdict.warnings) == (kind, warnings)


def without(row: synthetic.Row, key: str) -> synthetic.Row:
    """A row less one trajectory."""
    if row.entity != "trajectory" or key not in row.lists.get("key", ()):
        return row
    keep = np.asarray(row.lists["key"], dtype=object) != key
    lists = {}
    for name, values in row.lists.items():
        kept = (
            values[keep]
            if isinstance(values, np.ndarray)
            else [one for one, ours in zip(values, keep, strict=False) if ours]
        )
        lists[name] = kept if len(values) == len(keep) else values  # keys not got are a list of their own length
    return synthetic.Row(row.stage, row.op, row.field, row.entity, row.scalars, lists)


def test_groups_that_teach_nothing_are_pointed_at(rows, write):
    """A data source all of whose groups have one score is a warning, not an error."""
    for row in rows:
        if row.field == "rm_scores":
            row.lists["sum"] = np.zeros(len(row))
        if row.entity == "prompt" and row.stage == "prompt" and row.op == "produce":
            row.lists["data_source"] = np.array(["builtin/add"] * len(row), dtype=object)
    (verdict,) = check(write(rows), select=["REW004"]).verdicts
    assert (str(verdict.kind), verdict.warnings) == ("pass", 1)
    assert verdict.first is not None
    assert (verdict.first.key, verdict.first.actual) == ("builtin/add", "12 of 12 groups")


@pytest.mark.parametrize(("metric", "kind"), [("reward", "fail"), ("seq_final_reward", "vacuous")])
def test_groups_are_filtered_by_the_metric_that_is_named(rows, tmp_path, metric, kind):
    """Only ``reward`` is the score: of any other metric the trace does not say what the groups had of it."""
    equal_scores(rows)
    config = {"algorithm": {"filter_groups": {"enable": True, "metric": metric}}}
    rows = [row for row in rows if row.scalars["global_steps"] == 2]  # too few groups for a share of them
    table = synthetic.to_table(rows).replace_schema_metadata(synthetic.metadata(config))
    pq.write_table(table, tmp_path / "trace.parquet")
    (verdict,) = check(tmp_path / "trace.parquet", select=["REW004"]).verdicts
    assert str(verdict.kind) == kind
