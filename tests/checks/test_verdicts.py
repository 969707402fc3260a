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
    path, chosen = write(rows), ["PAD001", "PAD002", "ADV006", "KEY001", "MSK002"]
    report = check(path, select=chosen)
    assert _kinds(report) == dict.fromkeys(chosen[:3], Kind.VACUOUS) | dict.fromkeys(chosen[3:], Kind.PASS)
    assert report.exit_code == ExitCode.PASS
    required = check(path, select="PAD001", require="PAD001")
    assert required.exit_code == ExitCode.VIOLATIONS
    assert required.complaints == ("PAD001 is required to examine 1 fact and examined 0",)


def test_an_absent_column_makes_its_codes_not_applicable(rows, write, tmp_path):
    """A file without the fingerprint column is read; the codes that need it say so by name."""
    path = write(rows)
    table = pq.read_table(path).drop_columns(["fingerprint"])
    lacking = tmp_path / "lacking.parquet"
    pq.write_table(table, lacking)
    report = check(lacking, select=["TOK001", "LEN001"])
    verdict = report.verdict("TOK001")
    assert verdict.kind is Kind.NOT_APPLICABLE
    assert verdict.needed == "column fingerprint (absent)"
    assert report.notes == ("without column fingerprint: 1 of 2 codes could not judge",)
    assert f"note: {report.notes[0]}\n" in to_text(report, quiet=True)
    assert check(path, select=["TOK001", "LEN001"]).notes == ()
    assert _kinds(report)["LEN001"] is Kind.PASS


def test_a_field_never_recorded_makes_its_codes_not_applicable(rows, write):
    """Without input_ids in the trace there is nothing to compose: not a pass."""
    kept = [row for row in rows if row.field != "input_ids"]
    (verdict,) = check(write(kept), select="TOK001").verdicts
    assert (verdict.kind, verdict.needed) == (Kind.NOT_APPLICABLE, "field input_ids (never recorded)")


@pytest.mark.slow
def test_a_trace_of_a_trainer_without_a_queue_is_judged_where_it_can_be(write):
    """A foreign trace has no queue rows, tags or sample rows: those codes are vacuous, the others judge it."""
    rows = [row for step in synthetic.steps(3, synthetic.small()) for row in step]
    foreign = [row for row in rows if row.op in ("forward", "produce", "split") and row.stage != "sample"]
    for row in foreign:
        row.lists.pop("slot", None)
    kinds = _kinds(check(write(foreign)))
    assert Kind.FAIL not in kinds.values()
    assert (kinds["QUE001"], kinds["QUE003"], kinds["LEN001"]) == (Kind.VACUOUS, Kind.VACUOUS, Kind.PASS)


def test_a_torn_step_is_left_out_and_the_verdict_is_incomplete(rows, write):
    """The complete steps are judged; what would have been a pass is incomplete, and the torn step is named."""
    path = write(rows, state={"torn": [3], "closed": False})
    chosen = {"select": ["KEY001", "MSK002", "PAD002", "QUE002"]}
    report = check(path, **chosen)
    assert set(_kinds(report).values()) == {Kind.INCOMPLETE}
    assert report.exit_code == ExitCode.INCOMPLETE
    assert check(path, **chosen, allow_incomplete=True).exit_code == ExitCode.PASS
    assert report.steps == 2
    assert "step 3 torn" in report.state


def test_what_an_incomplete_trace_never_recorded_is_not_held_to_be_absent(rows, write):
    """A run killed in its first step recorded no mask: that is incomplete, unless the column itself is not there."""
    kept = [row for row in rows if row.field != "response_mask"]
    path = write(kept, state={"torn": [3], "closed": False})
    report = check(path, select=["MSK001", "MSK002"])
    assert set(_kinds(report).values()) == {Kind.INCOMPLETE}
    assert all(verdict.needed.endswith("; field response_mask (never recorded)") for verdict in report.verdicts)
    assert report.exit_code == ExitCode.INCOMPLETE
    assert check(path, select="MSK001", allow_incomplete=True, require="MSK001").exit_code == ExitCode.VIOLATIONS


@pytest.mark.parametrize(("torn", "code"), [([2], ExitCode.INCOMPLETE), ([3], ExitCode.VIOLATIONS)])
def test_violations_count_in_complete_steps_only(torn, code, rows, write):
    """A fault in a complete step is a failure however torn the rest; rows of a torn step are not judged."""
    FAULTS["TOK001"][0](rows)  # in step 2
    assert check(write(rows, state={"torn": torn, "closed": False}), select="TOK001").exit_code == code


def test_dropped_rows_make_a_trace_incomplete(rows, write):
    """Rows the recorder lost are named, with the reason it gave."""
    dropped = {"rows": 7, "steps": [1], "why": ["no space left on device"]}
    report = check(write(rows, state={"dropped": dropped}), select="KEY001")
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
    text = to_text(check(write(rows), select=["KEY001", "TOK001"]))
    lines = text.splitlines()
    assert lines[0] == "TOK001 input_ids are prompts ++ responses: first broken at step 2, stage rollout"
    head = text.split("\n\n")[0]
    for word in ("produce input_ids", "expected", "actual", get("TOK001").causes):
        assert word in head
    assert any(line.startswith("TOK001") and "FAIL" in line for line in lines[1:])


def test_a_quiet_report_leaves_out_what_passed(rows, write):
    """On a clean trace only the summary line is left."""
    report = check(write(rows), select=["KEY001", "MSK002"])
    assert len(to_text(report, quiet=True).splitlines()) == 1
    assert len(to_text(report).splitlines()) == 3


def test_the_json_report_can_be_read_back(rows, write):
    """The headline and every verdict are there, under stable names."""
    FAULTS["QUE002"][0](rows)
    said = json.loads(json_format.render([check(write(rows), select=["KEY001", "QUE002"])]))
    assert said["exit_code"] == 1
    assert said["headline"]["code"] == "QUE002"
    assert [one["code"] for one in said["verdicts"]] == ["KEY001", "QUE002"]


def test_select_and_ignore_take_codes_and_families():
    """A family stands for all its codes; an unknown name is refused with the nearest."""
    assert [one.code for one in select(["TOP"], ["TOP002"])] == ["TOP001", "TOP003"]
    assert [one.code for one in select(["len001", "VAL"])] == ["LEN001", "VAL001", "VAL002", "VAL003"]
    with pytest.raises(CatalogueError, match="did you mean KEY001"):
        select(["KEY01"])


def test_a_header_that_lacks_a_line_is_refused():
    """An invariant that does not say what it needs is not loaded."""
    with pytest.raises(CatalogueError, match=r"X\.sql: header .*needs"):
        parse("-- code: KEY001\n-- name: x\nselect 1", "X.sql")


def test_the_codes_are_stable():
    """Codes are a public surface: one that goes or changes breaks other people's --select; a new one is added here."""
    stable = [
        "ADV001", "ADV002", "ADV003", "ADV004", "ADV005", "ADV006", "BAT001", "BAT002", "BAT003", "BAT004",
        "KEY001", "KEY002", "KEY003", "KEY004", "KEY005", "KEY006", "KEY007", "KEY008", "KEY009", "LEN001",
        "LEN002", "LEN003", "LEN004", "LEN005", "LEN006", "LEN007", "LEN008", "LGP001", "LGP002", "LGP003",
        "LGP004", "LGP005", "LGP006", "LGP007", "LGP008", "LGP009", "LOS001", "LOS002", "LOS003", "LOS004",
        "LOS005", "MET001", "MET002", "MET003", "MSK001", "MSK002", "MSK003", "MSK004", "MSK005", "MSK006",
        "PAD001", "PAD002", "PAD003", "PAD004", "QUE001", "QUE002", "QUE003", "QUE004", "QUE005", "QUE006",
        "QUE007", "QUE008", "QUE009", "REW001", "REW002", "REW003", "REW004", "REW005", "REW006", "REW007",
        "TOK001", "TOK002", "TOK003", "TOK004", "TOP001", "TOP002", "TOP003", "VAL001", "VAL002", "VAL003",
        "VER001", "VER002", "VER003", "VER004", "VER005", "VER006", "VER007", "VER008",
    ]  # fmt: skip
    assert [one.code for one in catalogue()] == stable
    assert all(set(one.subsumed_by) <= set(stable) for one in catalogue())


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
    assert check(write(rows), select="QUE").exit_code == ExitCode.PASS
