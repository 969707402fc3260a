"""Every invariant: passes on a clean trace, fails on its own fault, and is the headline there."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from faults import FAULTS, change, pick

from lineage.checks import Kind, check
from lineage.checks.catalogue import FOLDER, catalogue
from lineage.checks.cells import CELLS
from lineage.fingerprint import fingerprint_strings


def test_a_clean_trace_breaks_no_code(rows, write):
    """On a clean trace with padding rows no code fails, and those with a fault here pass and say what they examined."""
    report = check(write(rows))
    kinds = {verdict.code: verdict.kind for verdict in report.verdicts}
    assert [code for code, kind in kinds.items() if kind is Kind.FAIL] == []
    assert {code: kinds[code] for code in FAULTS} == dict.fromkeys(FAULTS, Kind.PASS)
    assert all(verdict.examined > 0 for verdict in report.verdicts if verdict.kind is Kind.PASS)
    assert report.exit_code == 0
    assert report.headline is None


@pytest.mark.parametrize(
    "code",
    [code if code == "QUE001" else pytest.param(code, marks=pytest.mark.slow) for code in sorted(FAULTS)],
)
def test_a_fault_makes_its_code_the_headline(code, rows, write):
    """The report on a faulty trace leads with the fault's own code, at the stage where it happened."""
    mutate, stage = FAULTS[code]
    mutate(rows)
    report = check(write(rows))
    assert report.headline is not None
    assert (report.headline.invariant.code, report.headline.violation.stage) == (code, stage)
    assert report.exit_code == 1
    violation = report.headline.violation
    assert violation.expected != violation.actual


def test_a_queue_fault_folds_what_follows_from_it(rows, write):
    """Content changed between put and get is one headline; codes that only see the consequence fold under it."""
    for row in rows:
        if (row.stage, row.op, row.field) == ("update_actor", "consume", "input_ids"):
            row.lists["valid_length"] = row.lists["valid_length"] - 1
            row.lists["fingerprint"] = row.lists["fingerprint"] + np.uint64(1)
    report = check(write(rows), select=["LEN002", "QUE003", "TOK001"])
    assert report.headline is not None
    assert report.headline.invariant.code == "QUE003"
    assert {one.code: one.follows for one in report.headline.consequences} == {"LEN002": "QUE003", "TOK001": "QUE003"}


def test_a_uid_with_an_underscore_is_a_warning(rows, write):
    """verl reads such keys from the left in places: it is said, and the run still passes."""
    uid = pick(rows, "prompt", "produce", "uid").lists["key"][0]
    for row in rows:
        if "key" in row.lists:
            keys = [str(key).replace(uid, f"x_{uid}") for key in row.lists["key"]]
            row.lists["key"] = np.array(keys, dtype=object)
            if row.field == "uid" and row.entity == "trajectory":
                uids = [key.rsplit("_", 2)[0] for key in keys]
                row.lists["fingerprint"] = fingerprint_strings(uids)
    report = check(write(rows), select=["KEY001"])
    (verdict,) = report.verdicts
    assert (verdict.kind, verdict.errors, verdict.warnings) == (Kind.PASS, 0, 1)
    assert report.exit_code == 0


def test_a_declared_smaller_mask_is_legal(rows, write):
    """A mask made smaller for a recorded reason (truncation masking) is a declared subset, not a violation."""
    row = pick(rows, "advantage", "pad", "rm_scores")
    at = int(np.argmax(row.lists["mask_sum"]))
    change(row, "mask_sum", at, 0)
    change(row, "mask_fingerprint", at, 0)
    row.lists["reason"] = [("truncated_masked" if i == at else None) for i in range(len(row))]
    assert check(write(rows), select=["MSK002"]).exit_code == 0
    change(row, "mask_sum", at, 10_000)
    assert check(write(rows), select=["MSK002"]).exit_code == 1


def test_full_length_entropy_is_not_a_short_response(rows, write):
    """verl re-uses the names log_probs and entropy at two lengths: a sequence-long row of theirs is legal."""
    row = pick(rows, "old_log_prob", "produce", "entropy")
    assert row.scalars["span"] == "sequence"
    row.scalars["span"] = "response"
    assert check(write(rows), select=["LEN001"]).exit_code == 0


def test_a_missing_session_with_a_reason_is_not_reported(rows, write):
    """A group that failed may train with fewer sessions: its status says so."""
    FAULTS["KEY002"][0](rows)
    uid = str(pick(rows, "sample", "filter", "status").lists["key"][-1])
    for row in rows:
        if row.entity == "prompt" and "status" in row.lists and row.stage == "sample":
            keys = list(row.lists["key"])
            row.lists["status"] = ["failure" if key == uid else "finished" for key in keys]
    assert check(write(rows), select=["KEY002"]).exit_code == 0


def test_a_doubled_real_key_is_reported(rows, write):
    """A key handed to the step twice breaks uniqueness."""
    row = pick(rows, "sample", "produce", "key")
    row.lists = {name: np.concatenate([values, values[:1]]) for name, values in row.lists.items()}
    report = check(write(rows), select=["KEY002"])
    assert report.headline is not None
    assert report.headline.violation.actual == "2 times"


@pytest.mark.parametrize(
    ("topology", "reported", "code"),
    [
        ({"backend": "fsdp", "world_size": 8, "sp": 2, "fsdp_size": 2}, 4, 0),
        ({"backend": "fsdp2", "world_size": 8, "sp": 2, "fsdp_size": 2}, 2, 1),
        ({"backend": "megatron", "world_size": 16, "tp": 2, "pp": 2, "cp": 2, "dynamic_cp": False}, 2, 0),
        ({"backend": "megatron", "world_size": 16, "tp": 2, "pp": 2, "cp": 2, "dynamic_cp": True}, 1, 0),
        ({"backend": "megatron", "world_size": 16, "tp": 2, "pp": 2, "cp": 2, "dynamic_cp": True}, 2, 1),
        ({"backend": "single", "world_size": 1}, 1, 0),
    ],
)
def test_the_data_parallel_size_follows_from_the_backend(topology, reported, code, rows, write):
    """FSDP: world/SP whatever fsdp_size; Megatron: world/(TP PP CP); dynamic CP: 1."""
    for row in rows:
        row.scalars.pop("topology", None)
        row.scalars.pop("map_attrs", None)
    rows[0].scalars["topology"] = topology | {"reported_dp": reported, "rollout_tp": 1}
    assert check(write(rows), select=["TOP001"]).exit_code == code


def test_temporary_tables_have_names_of_their_own():
    """Codes share connections: a table of one must be no other's, and hide none that all of them ask."""
    texts = [
        *(one.sql for one in catalogue()),
        *(path.read_text("utf-8") for path in sorted((FOLDER.parent / "tables").glob("*.sql"))),
    ]
    made = re.findall(r"^create or replace (?:temp )?table (\w+)", "\n".join(texts), re.M)
    assert [name for name, count in Counter([*made, *CELLS]).items() if count > 1] == []
