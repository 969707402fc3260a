"""A long trace judged in slices: the report is that of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
from faults import FAULTS, pick

from lineage.checks import Kind, Report, check, slices
from lineage.checks.catalogue import catalogue
from lineage.checks.window import beside

Write = Callable[..., Path]
SAMPLES = Path(__file__).parents[2] / "traces" / "samples"
# what a slice holds at most: a single step, two, all
FACTS = (1, 1500, 1 << 40)
# Codes that weigh a share over what lies before them: a slice of a single step is too small to say anything by.
SHARES = ("REW004",)
# Their codes look from one step into another: they are judged by the whole catalogue, the others by their own code.
ACROSS_STEPS = ("KEY007", "MET001", "QUE001", "VAL002", "VER002")


def judged(path: Path, facts: int, monkeypatch: pytest.MonkeyPatch, **options: object) -> Report:
    monkeypatch.setattr(slices, "SLICE_FACTS", facts)
    report = check(path, **{"ignore": SHARES, **options})  # type: ignore[arg-type]
    # where an event stands is the same too, but for the time it took to say so
    return replace(report, seconds=0.0, verdicts=tuple(replace(one, seconds=0.0) for one in report.verdicts))


def same(path: Path, monkeypatch: pytest.MonkeyPatch, facts: int = 1, **options: object) -> Report:
    """Judge it in slices and as a whole; both say the same."""
    part, whole = (judged(path, size, monkeypatch, **options) for size in (facts, FACTS[-1]))
    assert {one.code: one for one in part.verdicts} == {one.code: one for one in whole.verdicts}
    assert part == whole
    return part


def late(rows: list[synthetic.Row], field: str = "entropy") -> None:
    """A key of step 1, cleared there, is written again at the end of step 3."""
    ghost = pick(rows, "old_log_prob", "produce", field, step=1)
    rows.append(
        synthetic.Row(ghost.stage, "produce", field, scalars=ghost.scalars | {"global_steps": 3}, lists=ghost.lists)
    )


@pytest.mark.slow
@pytest.mark.parametrize("facts", FACTS[:2])
def test_a_clean_trace_is_clean_in_slices_and_examined_adds_up(facts, rows, write, monkeypatch) -> None:
    report = same(write(rows), monkeypatch, facts)
    assert report.exit_code == 0
    assert sum(verdict.kind is Kind.PASS for verdict in report.verdicts) > 15


def test_a_late_write_across_slices_is_told_once_where_it_happens(rows, write, monkeypatch) -> None:
    late(rows)
    report = same(write(rows), monkeypatch, select=["QUE"])
    ghosts = report.verdict("QUE001")
    assert ghosts.errors == 12
    assert {one.global_steps for one in ghosts.violations} == {3}


def test_a_clear_that_comes_steps_later_is_told_in_the_step_that_lacks_it(rows, write, monkeypatch) -> None:
    clear = pick(rows, "clear", "clear", "status", step=1)
    rows.remove(clear)
    clear.scalars["global_steps"] = 3
    rows.append(clear)
    report = same(write(rows), monkeypatch, select=["QUE002"])
    assert {(one.global_steps, one.actual) for one in report.verdict("QUE002").violations} == {(1, "cleared in step 3")}


@pytest.mark.parametrize(
    "code", [code if code == "MSK002" else pytest.param(code, marks=pytest.mark.slow) for code in FAULTS]
)
def test_a_faulty_trace_has_one_report(code, rows, write, monkeypatch) -> None:
    FAULTS[code][0](rows)
    late(rows)
    assert same(write(rows), monkeypatch, select=[code, "QUE001", "LEN", "ADV002"]).exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize("code", [one.code for one in catalogue() if one.code not in SHARES])
def test_a_recorded_fault_has_one_verdict(code, monkeypatch) -> None:
    report = same(SAMPLES / "bad" / f"{code}.parquet", monkeypatch, select=[code])
    assert report.verdict(code).violations
    assert report.state == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["good", *(f"bad/{code}" for code in ACROSS_STEPS)])
def test_a_recorded_trace_has_one_report(name, monkeypatch) -> None:
    report = same(SAMPLES / f"{name}.parquet", monkeypatch)
    said = {one.code for one in report.verdicts if one.violations}
    assert said >= {name.removeprefix("bad/")} - {"good"}
    assert (name == "good") == (said == set())


@pytest.mark.slow
def test_two_runs_in_one_file_keep_their_steps_apart(rows, write, tmp_path, monkeypatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = pq.read_table(write(rows))
    second = first.set_column(first.schema.get_field_index("run_id"), "run_id", pa.array(["other"] * len(first)))
    pq.write_table(pa.concat_tables([first, second]), tmp_path / "two.parquet", row_group_size=100)
    assert same(tmp_path / "two.parquet", monkeypatch, facts=1500, select=["KEY", "QUE", "VER"]).steps == 6


def test_what_was_recorded_in_another_slice_is_recorded(rows, write, monkeypatch) -> None:
    """A code is not applicable by the whole trace, not by a slice of it."""
    some = [row for row in rows if row.scalars["global_steps"] != 1 or row.field not in ("advantages", "returns")]
    assert same(write(some), monkeypatch, select=["ADV001"]).verdict("ADV001").kind is Kind.PASS
    none = [row for row in rows if row.field != "advantages"]
    assert (
        same(write(none, "none.parquet"), monkeypatch, select=["ADV001"]).verdict("ADV001").kind is Kind.NOT_APPLICABLE
    )


def test_a_code_of_the_run_sees_all_its_steps_at_once(rows, write, tmp_path, monkeypatch) -> None:
    """Groups and events of the whole run, judged once, and nobody's content."""
    (tmp_path / "RUN001.sql").write_text(
        """-- code: RUN001
-- name: prompts come once
-- severity: error
-- says: No prompt comes twice in a run.
-- needs: key
-- fields:
-- examines: select count(*) from group_cells where field = 'uid'
-- looks: run
-- subsumed_by:
-- source: a test
-- causes: a test
select max(rid) as rid, any_value(key) as key, 'once' as expected, count(*) || ' steps' as actual,
    null as detail, null as severity
from group_cells join keys using (id) where entity = 'metric' and field = 'metrics' and key = 'critic/score/mean'
group by id having count(*) > 1
"""
    )
    report = same(write(rows), monkeypatch, checks=tmp_path, select=["RUN001"])
    (one,) = report.verdict("RUN001").violations
    assert (one.actual, one.global_steps) == ("3 steps", 3)
    assert report.verdict("RUN001").examined == 12


def test_steps_that_share_keys_with_too_many_others_are_named(rows, write, monkeypatch) -> None:
    """Beside a slice stand only so many facts; what that leaves out is said."""
    clear = pick(rows, "clear", "clear", "status", step=1)
    for step in (2, 3):
        rows.append(replace(clear, scalars=clear.scalars | {"global_steps": step}))
    monkeypatch.setattr(slices, "BESIDE_FACTS", 0)
    report = judged(write(rows), 1, monkeypatch, select=["QUE001"])
    assert report.notes == ("3 steps share keys with too many others to be judged beside all of them",)


@pytest.mark.parametrize(
    ("own", "shared", "among"),
    [([3], (), [0, 2, 3]), ([3, 4], (1,), [0, 1, 2, 3, 4]), ([0], (5,), [0, 5]), ([1], (), [0, 1])],
)
def test_steps_are_judged_beside_step_0_the_step_before_and_those_that_share_a_key(own, shared, among) -> None:
    assert beside([0, 1, 2, 3, 4, 5], own, shared.__contains__) == among


def test_every_code_says_how_far_it_looks() -> None:
    assert {one.looks for one in catalogue()} <= {"step", "run"}
