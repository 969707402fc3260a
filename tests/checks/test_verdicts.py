"""Verdict kinds and exit codes: a check that could not see is not a pass."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import synthetic
from faults import FAULTS

from lineage.checks import ExitCode, Kind, Verdict, check, select
from lineage.checks.catalogue import CatalogueError, catalogue, get, parse
from lineage.checks.formats import json as json_format
from lineage.checks.formats.text import to_text
from lineage.checks.policy import Policy
from lineage.checks.profiles import load


def _kinds(report):
    return {verdict.code: verdict.kind for verdict in report.verdicts}


def test_without_padding_rows_the_padding_codes_are_vacuous(write):
    """Nothing to examine is vacuous, not pass."""
    rows = [row for step in synthetic.steps(2, synthetic.small()) for row in step]
    path = write(rows)
    report = check(path)
    kinds = _kinds(report)
    assert {kinds["PAD001"], kinds["PAD002"]} == {Kind.VACUOUS}
    assert {kind for code, kind in kinds.items() if code not in ("PAD001", "PAD002")} == {Kind.PASS}
    assert report.exit_code == ExitCode.PASS
    required = check(path, require="PAD001")
    assert required.exit_code == ExitCode.VIOLATIONS
    assert required.complaints == ("PAD001 is required to examine 1 fact and examined 0",)


def test_an_absent_column_makes_its_codes_not_applicable(rows, write, tmp_path):
    """A file without the fingerprint column is read; the codes that need it say so by name."""
    path = write(rows)
    table = pq.read_table(path).drop_columns(["fingerprint"])
    lacking = tmp_path / "lacking.parquet"
    pq.write_table(table, lacking)
    report = check(lacking)
    verdict = next(one for one in report.verdicts if one.code == "TOK001")
    assert verdict.kind is Kind.NOT_APPLICABLE
    assert verdict.needed == "column fingerprint (absent)"
    assert _kinds(report)["LEN001"] is Kind.PASS


def test_a_field_never_recorded_makes_its_codes_not_applicable(rows, write):
    """Without input_ids in the trace there is nothing to compose: not a pass."""
    kept = [row for row in rows if row.field != "input_ids"]
    verdict = next(one for one in check(write(kept)).verdicts if one.code == "TOK001")
    assert (verdict.kind, verdict.needed) == (Kind.NOT_APPLICABLE, "field input_ids (never recorded)")


def test_a_trace_of_a_trainer_without_a_queue_is_judged_where_it_can_be(rows, write):
    """A foreign trace has no queue rows, tags or sample rows: those codes are vacuous, the others judge it."""
    foreign = [row for row in rows if row.op in ("forward", "produce", "split") and row.stage != "sample"]
    for row in foreign:
        row.lists.pop("slot", None)
    kinds = _kinds(check(write(foreign)))
    assert Kind.FAIL not in kinds.values()
    assert (kinds["QUE001"], kinds["QUE003"], kinds["LEN001"]) == (Kind.VACUOUS, Kind.VACUOUS, Kind.PASS)


def test_a_torn_step_is_left_out_and_the_verdict_is_incomplete(rows, write):
    """The complete steps are judged; what would have been a pass is incomplete, and the torn step is named."""
    path = write(rows, state={"torn": [3], "closed": False})
    report = check(path)
    assert set(_kinds(report).values()) == {Kind.INCOMPLETE}
    assert report.exit_code == ExitCode.INCOMPLETE
    assert check(path, allow_incomplete=True).exit_code == ExitCode.PASS
    assert report.steps == 2
    assert "step 3 torn" in report.state


def test_what_an_incomplete_trace_never_recorded_is_not_held_to_be_absent(rows, write):
    """A run killed in its first step recorded no mask: that is incomplete, unless the column itself is not there."""
    kept = [row for row in rows if row.field != "response_mask"]
    path = write(kept, state={"torn": [3], "closed": False})
    report = check(path, select=["MSK"])
    assert set(_kinds(report).values()) == {Kind.INCOMPLETE}
    assert all(verdict.needed.endswith("; field response_mask (never recorded)") for verdict in report.verdicts)
    assert report.exit_code == ExitCode.INCOMPLETE
    assert check(path, allow_incomplete=True, require=["MSK001"]).exit_code == ExitCode.VIOLATIONS


@pytest.mark.parametrize(("torn", "code"), [([2], ExitCode.INCOMPLETE), ([3], ExitCode.VIOLATIONS)])
def test_violations_count_in_complete_steps_only(torn, code, rows, write):
    """A fault in a complete step is a failure however torn the rest; rows of a torn step are not judged."""
    FAULTS["TOK001"][0](rows)  # in step 2
    assert check(write(rows, state={"torn": torn, "closed": False})).exit_code == code


def test_dropped_rows_make_a_trace_incomplete(rows, write):
    """Rows the recorder lost are named, with the reason it gave."""
    dropped = {"rows": 7, "steps": [1], "why": ["no space left on device"]}
    report = check(write(rows, state={"dropped": dropped}))
    assert report.exit_code == ExitCode.INCOMPLETE
    assert "7 rows dropped in step 1 (no space left on device)" in report.state


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        ([Kind.PASS, Kind.VACUOUS, Kind.NOT_APPLICABLE], 0),
        ([Kind.PASS, Kind.INCOMPLETE], 3),
        ([Kind.INCOMPLETE, Kind.FAIL], 1),
        ([], 0),
    ],
)
def test_violations_beat_incomplete_and_incomplete_beats_pass(kinds, code):
    """One exit code for many verdicts."""
    verdicts = [Verdict(f"KEY00{number}", kind, 1, int(kind is Kind.FAIL)) for number, kind in enumerate(kinds)]
    assert Policy().exit_code(verdicts) == code


def test_the_text_report_leads_with_the_first_bad_event(rows, write):
    """Code, step, stage, trajectories, expected, actual and the usual cause, before any table."""
    FAULTS["TOK001"][0](rows)
    text = to_text(check(write(rows)))
    lines = text.splitlines()
    assert lines[0] == "TOK001 input_ids are prompts ++ responses: first broken at step 2, stage rollout"
    head = text.split("\n\n")[0]
    for word in ("produce input_ids", "expected", "actual", get("TOK001").causes):
        assert word in head
    assert any(line.startswith("TOK001") and "FAIL" in line for line in lines[1:])


def test_a_quiet_report_leaves_out_what_passed(rows, write):
    """On a clean trace only the summary line is left."""
    report = check(write(rows))
    assert len(to_text(report, quiet=True).splitlines()) == 1
    assert len(to_text(report).splitlines()) == len(catalogue()) + 1


def test_the_json_report_can_be_read_back(rows, write):
    """The headline and every verdict are there, under stable names."""
    FAULTS["QUE002"][0](rows)
    said = json.loads(json_format.render([check(write(rows))]))
    assert said["exit_code"] == 1
    assert said["headline"]["code"] == "QUE002"
    assert {one["code"] for one in said["verdicts"]} == {one.code for one in catalogue()}


def test_select_and_ignore_take_codes_and_families():
    """A family stands for all its codes; an unknown name is refused with the nearest."""
    assert {one.code for one in select(["KEY"], ["KEY002"])} == {"KEY001", "KEY003"}
    assert [one.code for one in select(["len001", "TOK"])] == ["LEN001", "TOK001"]
    with pytest.raises(CatalogueError, match="did you mean KEY001"):
        select(["KEY01"])


def test_a_header_that_lacks_a_line_is_refused():
    """An invariant that does not say what it needs is not loaded."""
    with pytest.raises(CatalogueError, match=r"X\.sql: header .*needs"):
        parse("-- code: KEY001\n-- name: x\nselect 1", "X.sql")


def test_the_codes_are_stable():
    """Codes are a public surface: one that goes or changes breaks other people's --select."""
    stable = [
        "ADV001", "BAT001", "KEY001", "KEY002", "KEY003", "LEN001", "LEN002", "LEN003", "MSK001", "MSK002", "PAD001",
        "PAD002", "QUE001", "QUE002", "QUE003", "TOK001", "TOP001", "TOP003",
    ]  # fmt: skip
    assert [one.code for one in catalogue() if one.code in stable] == stable
    known = {one.code for one in catalogue()}
    assert all(set(one.subsumed_by) <= known for one in catalogue())


@pytest.mark.parametrize("name", ["lineage", "verl", "trl"])
def test_profiles_load(name):
    """Each profile names its conventions; one nobody wrote falls back and says so."""
    assert load(name).known
    assert float(load(name).values["metrics.relative"]) > 0
    assert not load("../../etc/passwd").known


def test_slots_alone_do_not_make_a_queue_row(rows, write):
    """A read that asked the queue for nothing is not a get, and one without a partition is not a put."""
    for row in rows:
        if (row.stage, row.op) in (("reward", "consume"), ("sample", "produce"), ("old_log_prob", "forward")):
            row.lists["slot"] = list(range(len(row)))
        if row.op in ("score", "reorder"):
            row.lists["slot"] = [None] * len(row)
    assert check(write(rows)).exit_code == ExitCode.PASS
