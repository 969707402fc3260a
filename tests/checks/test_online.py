"""Judged step by step, a run is told what a check of its whole trace says, at the step where it can be known."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import synthetic
from faults import FAULTS, ghost_write, kept_key, pick
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lineage
from lineage.buffers import part_schema
from lineage.checks.baseline import Baseline
from lineage.checks.catalogue import Invariant, catalogue, get
from lineage.checks.formats.text import headline_lines
from lineage.checks.online import OWN_ROWS, SETTLED_LATER, StepChecker
from lineage.checks.own import Finding, Tables
from lineage.checks.plugins import invariant
from lineage.checks.policy import Match
from lineage.checks.window import Window, keys_of
from lineage.errors import CheckError, ViolationError
from lineage.recorder import Recorder
from lineage.run import RunInfo

SAMPLES = Path(lineage.__file__).parent / "traces" / "samples"
QUICK = ("QUE003",)  # of the others each is slow: CI runs them all
Rows = list[synthetic.Row]
Write = Callable[..., Path]


def steps_of(path: Path) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The batches a recorder would have sealed, and their steps."""
    return batches_of(part_of(path))


def batches_of(rows: pa.Table) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The same of some rows of a trace."""
    for step in sorted(set(rows["global_steps"].to_pylist())):
        (batch,) = rows.filter(pc.field("global_steps") == step).cast(part_schema()).combine_chunks().to_batches()
        yield batch, step


def checker(path: Path, on_violation: Any = "raise", **options: Any) -> StepChecker:
    """One for the run of this trace."""
    metadata = pq.read_metadata(path).metadata
    run, config = (json.loads(metadata[name]) for name in (b"lineage.run", b"lineage.config"))
    return StepChecker(on_violation, run=run, config=config, **options)


def play(path: Path, judge: StepChecker) -> ViolationError | None:
    """What it raised, at the first step where it raised."""
    return feed(part_of(path), judge)


def part_of(path: Path) -> pa.Table:
    """The rows of a trace."""
    return pq.read_table(path).replace_schema_metadata(None)


def feed(rows: pa.Table, judge: StepChecker) -> ViolationError | None:
    """As :func:`play`, of some rows of a trace."""
    for batch, step in batches_of(rows):
        try:
            judge(batch, step)
        except ViolationError as error:
            return error
    return None


def without_counts(lines: list[str]) -> list[str]:
    """A headline's lines but for what counts the steps to come too."""
    return [line for line in lines if not line.startswith("  also: ") and not line.endswith(" in all")]


def compare(path: Path) -> None:
    """The first step that raises, and what it says, are the headline of the whole trace; warnings stop nobody."""
    report = lineage.check(path)
    error = play(path, checker(path))
    if report.headline is None:  # of a code that only warns
        assert error is None
        return
    step, code = report.headline.violation.global_steps, report.headline.invariant.code
    assert error is not None
    assert error.global_steps == (1 if step == 0 and code in SETTLED_LATER else step)
    said, expected = error.headline.splitlines(), list(headline_lines(report.headline, report.name))
    assert without_counts(said) == without_counts(expected)


@pytest.mark.parametrize(
    "code", [code if code in QUICK else pytest.param(code, marks=pytest.mark.slow) for code in sorted(FAULTS)]
)
def test_a_fault_is_raised_where_the_check_says_it_happened(code: str, rows: Rows, write: Write) -> None:
    """Step by step and afterwards: the same code, step, event, trajectories, expected and actual."""
    FAULTS[code][0](rows)
    compare(write(rows))


# one of each family: every code's own sample is judged in test_samples, and here the same statements are asked
ONE_OF_EACH = {path.stem[:3]: path for path in sorted((SAMPLES / "bad").glob("*.parquet"), reverse=True)}.values()


@pytest.mark.slow
@pytest.mark.parametrize("path", ONE_OF_EACH, ids=lambda path: path.stem)
def test_a_bad_sample_is_raised_where_the_check_says_it_happened(path: Path) -> None:
    """The same of the recorded runs that ship with the checker."""
    compare(path)


@pytest.mark.slow
def test_a_clean_run_is_never_stopped(rows: Rows, write: Write) -> None:
    """Neither the synthetic run nor the recorded one raises at any step, and every step is judged."""
    for path in (write(rows), SAMPLES / "good.parquet"):
        judge = checker(path)
        assert play(path, judge) is None
        assert (judge.judged, judge.unjudged) == (len(list(steps_of(path))), 0)


def test_codes_that_settle_later_are_said_and_are_few() -> None:
    """Every code is judged online; those step 0 cannot decide are named with the reason."""
    assert set(SETTLED_LATER) < {one.code for one in catalogue()}
    assert all(SETTLED_LATER.values())


def _moved(row: synthetic.Row, step: int) -> synthetic.Row:
    return replace(row, scalars=row.scalars | {"global_steps": step}, lists=copy.deepcopy(row.lists))


@pytest.mark.slow
def test_a_write_many_steps_late_is_a_ghost(write: Write) -> None:
    """A key cleared in step 1 and written in step 5 is raised there, by the rows of step 1 that were kept."""
    rows = [row for step in synthetic.steps(5, synthetic.small()) for row in step]
    rows.append(_moved(pick(rows, "rollout", "produce", "rm_scores", step=1), 5))
    path = write(rows)
    compare(path)
    error = play(path, checker(path))
    assert error is not None
    assert (error.global_steps, error.headline[:6]) == (5, "QUE001")


@pytest.mark.slow
def test_a_clear_that_comes_twice_is_raised_when_it_comes(write: Write) -> None:
    """The check blames the step the key belongs to; online it is known, and raised, with the second clear."""
    rows = [row for step in synthetic.steps(4, synthetic.small()) for row in step]
    rows.append(_moved(pick(rows, "clear", "clear", "status", step=1), 4))
    path = write(rows)
    error, report = play(path, checker(path)), lineage.check(path, select=["QUE002"])
    assert report.headline is not None
    assert report.headline.violation.global_steps == 1
    assert error is not None
    assert (error.global_steps, error.headline.splitlines()[0]) == (
        4,
        next(headline_lines(report.headline, report.name)),
    )


@pytest.mark.slow
def test_a_key_of_a_step_no_longer_kept_is_named(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """With no room for old steps a late write cannot be compared with them, and that is said, not passed over."""
    rows = [row for step in synthetic.steps(5, synthetic.small()) for row in step]
    late = _moved(pick(rows, "rollout", "produce", "rm_scores", step=1), 5)
    path = write([*rows, late])
    play(path, checker(path, "warn", keep_bytes=0))
    assert f"step 5 has a key of step 1, whose rows are no longer kept ({min(late.lists['key'])} and" in caplog.text


def test_warnings_name_each_place_once(rows: Rows, write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """The same fault in two steps is one warning in one line; another place is another; training goes on."""
    for step in (2, 3):
        row = pick(rows, "advantage", "forward", "advantages", step=step)
        row.lists["nnz_out"] = np.array(row.lists["nnz_out"]) + 1
    kept_key(rows)
    path = write(rows)
    judge = checker(path, "warn")
    assert play(path, judge) is None
    said = [record.getMessage() for record in caplog.records]
    assert [line.split()[1] for line in said] == ["ADV001"]
    assert "broken at step 2, stage advantage, forward advantages at " in said[0]
    assert said[0].endswith("; also QUE002")
    assert (judge.judged, judge.unjudged) == (4, 0)


def _broken() -> Invariant:
    return replace(get("KEY001"), code="BAD001", sql="select nothing from nowhere")


def test_a_check_that_fails_lets_no_step_pass_under_raise(rows: Rows, write: Write) -> None:
    """Its error stops the run: a step that was not judged is not a step that passed."""
    path = write(rows)
    with pytest.raises(CheckError, match=r"step 1 could not be checked \(.*BAD001.*nowhere"):
        play(path, checker(path, invariants=[_broken()]))


def test_a_check_that_fails_is_said_once_under_warn(rows: Rows, write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on; the steps that were not judged are counted."""
    path = write(rows)
    judge = checker(path, "warn", invariants=[_broken()])
    assert play(path, judge) is None
    assert len(caplog.records) == 1
    assert "step 1 is not checked: " in caplog.text
    assert (judge.judged, judge.unjudged) == (1, 3)  # step 0 has no trajectories to query


def test_a_step_with_lost_rows_is_not_judged(rows: Rows, write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """Nor are the steps after it judged by what is left of it."""
    ghost_write(rows)
    path = write(rows)
    judge = checker(path)
    for batch, step in steps_of(path):
        judge(None if step == 2 else batch, step)
    assert (judge.judged, judge.unjudged) == (3, 1)
    assert "step 2 is not checked: rows of it were lost" in caplog.text


def test_a_misspelt_wish_is_refused() -> None:
    """Anything but raise or warn would otherwise be one of the two, unasked."""
    wish: Any = "rais"
    with pytest.raises(CheckError, match="takes 'raise' or 'warn'"):
        StepChecker(wish)


def test_it_travels_to_another_process(rows: Rows, write: Write) -> None:
    """Pickled before its first call, it judges as the original would."""
    kept_key(rows)
    path = write(rows)
    error = play(path, pickle.loads(pickle.dumps(checker(path))))
    assert error is not None
    assert error.headline.startswith("QUE002 ")


def test_the_window_is_bounded_and_keeps_what_a_step_needs(write: Write) -> None:
    """Step 0, the step before and those that share a key; the oldest go when there is no room."""
    rows = [row for step in synthetic.steps(6, synthetic.small()) for row in step]
    rows.append(_moved(pick(rows, "rollout", "produce", "rm_scores", step=3), 6))
    window = Window(keep_bytes=1 << 30)
    batches = {step: batch for batch, step in steps_of(write(rows))}
    for step, batch in batches.items():
        window.add(batch, step)
    assert [batch["global_steps"][0].as_py() for batch in window.rows(6)] == [0, 3, 5, 6]
    assert [batch["global_steps"][0].as_py() for batch in window.rows(2)] == [0, 1, 2]
    small = Window(keep_bytes=3 * batches[2].nbytes)
    for step, batch in batches.items():
        small.add(batch, step)
        assert small.nbytes <= 3 * batches[2].nbytes
    assert set(small.forgotten(6)) == keys_of(batches[6]) & keys_of(batches[3])


def test_nothing_is_logged_of_a_clean_run(rows: Rows, write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """A warning that is always there is read by nobody."""
    path = write(rows)
    with caplog.at_level(logging.INFO):
        play(path, checker(path, "warn"))
    assert caplog.records == []


# -- one process of several -----------------------------------------------------------------------------------------


def shard(table: pa.Table, rank: int, world: int) -> pa.Table:
    """The elements a data-parallel rank has; what counts the whole batch stays with every rank."""
    lists = [field.name for field in table.schema if pa.types.is_list(field.type) and field.name != "shape"]
    rows = []
    for row in table.to_pylist():
        if row["entity"] == "trajectory" and row["key"] and row["op"] not in ("split", "dispatch"):
            keep = [i for i, key in enumerate(row["key"]) if zlib.crc32(key.encode()) % world == rank]
            row |= {name: [row[name][i] for i in keep] for name in lists if len(row[name] or ()) == row["n"]}
            row["n"] = len(keep)
        if row["n"]:
            rows.append(row)
    return pa.Table.from_pylist(rows, table.schema)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_process_of_a_clean_run_is_stopped(data: st.DataObject, rows: Rows, write: Write) -> None:
    """Whatever stages, events and shards of the trajectories it records: its rows alone accuse nobody."""
    path = data.draw(st.sampled_from([write(rows), SAMPLES / "good.parquet"]))
    table = part_of(path)
    world = data.draw(st.sampled_from([1, 2, 4]))
    if world > 1:
        table = shard(table, data.draw(st.integers(0, world - 1)), world)
    by = data.draw(st.sampled_from([("stage",), ("stage", "op"), ("stage", "op", "field")]))
    places = [tuple(row.values()) for row in table.select(by).to_pylist()]
    # a conversion is one process's: it pads what it has read
    mine = data.draw(st.sets(st.sampled_from(sorted(set(places))), min_size=1))
    part = table.filter(pa.array([place in mine for place in places]))
    judge = checker(path, alone=False)
    assert feed(part, judge) is None
    assert judge.unjudged == 0


@pytest.mark.parametrize(
    ("stages", "code"),
    [
        (["rollout", "reward"], "QUE002"),
        (["old_log_prob", "update_actor"], "QUE001"),
        (["sample", "balance", "clear", "prompt"], "QUE005"),
    ],
)
@pytest.mark.slow
def test_stages_of_one_process_are_judged_by_what_they_decide(
    stages: list[str], code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A code that looks for what another process records is left out, and the warning names it, once."""
    path = SAMPLES / "good.parquet"
    part = part_of(path).filter(pc.is_in(pc.field("stage"), pa.array(stages)))
    error = feed(part, checker(path, alone=True))
    assert error is not None
    assert error.headline.startswith(code)
    judge = checker(path, alone=False)
    assert feed(part, judge) is None
    assert (judge.unjudged, len(caplog.records)) == (0, 1)
    assert code in caplog.text
    assert not OWN_ROWS & set(caplog.text.replace(",", " ").split())


def test_a_mask_another_process_has_declared_is_no_fault(rows: Rows, write: Write) -> None:
    """A rank is handed a smaller mask and the driver says why: the whole trace passes, so the rank is not stopped."""
    mask = pick(rows, "update_actor", "forward", "log_probs", step=2)
    said = pick(rows, "sample", "produce", "key", step=2)
    at = int(np.argmax(mask.lists["mask_sum"]))
    key = mask.lists["key"][at]
    mask.lists["mask_sum"] = np.array(mask.lists["mask_sum"])
    mask.lists["mask_sum"][at] -= 1
    said.lists["reason"] = [None if one != key else "rejected" for one in said.lists["key"]]
    path = write(rows)
    assert lineage.check(path, select=["MSK002"]).ok
    part = part_of(path).filter(pc.is_in(pc.field("stage"), pa.array(["rollout", "update_actor"])))
    error = feed(part, checker(path, alone=True, invariants=[get("MSK002")]))
    assert error is not None
    assert error.global_steps == 2
    assert feed(part, checker(path, alone=False)) is None


def test_a_fault_in_the_rows_of_one_process_still_stops_it(rows: Rows, write: Write) -> None:
    """What its own rows decide is raised in the step it happens."""
    FAULTS["ADV001"][0](rows)
    path = write(rows)
    error = play(path, checker(path, alone=False))
    assert error is not None
    assert error.headline.startswith("ADV001 ")


def unfinished(recorder: Recorder, step: int) -> None:
    """A step whose key another process would clear."""
    recorder.step(step)
    with recorder.stage("rollout", producer="engine") as stage:
        keys = [f"u{step}_0_0"]
        stage.record("tag", {"status": ["running"]}, keys=keys, partition="train", columns={"slot": [step]})
    recorder.seal()


@pytest.mark.parametrize("process", [{"process": "actor:0", "rank": 0}, {"process": "rollouter"}])
def test_a_recorder_with_company_says_so(
    tmp_path: Path, process: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """By its name or rank it is known from the start; the warning comes before the first step, and no other."""
    recorder = Recorder(tmp_path, RunInfo("r"), on_step_sealed=StepChecker("raise"), **process)
    assert "QUE002" in caplog.text
    for step in (1, 2):
        unfinished(recorder, step)
    assert len(caplog.records) == 1
    recorder.close()


def test_a_driver_that_gets_company_is_no_longer_alone(tmp_path: Path) -> None:
    """Another recorder in its folder is seen before the next step is judged; without one the step is stopped."""
    driver = Recorder(tmp_path / "a", RunInfo("r"), on_step_sealed=StepChecker("raise"))
    with pytest.raises(ViolationError, match="QUE002"):
        unfinished(driver, 1)
    driver.close()
    driver = Recorder(tmp_path / "b", RunInfo("r"), on_step_sealed=StepChecker("raise"))
    other = Recorder(tmp_path / "b", RunInfo("r"), process="actor:0", rank=0)
    unfinished(driver, 1)
    driver.close()
    other.close()


# -- a gate's invariants and known violations -----------------------------------------------------------------------


@invariant(
    code="TEAM001", name="no second step", says="x", examines="select count(*) from events", causes="a test", source="y"
)
def no_second_step(tables: Tables) -> Iterator[Finding]:
    """An invariant in Python, as a plugin has them: the decorator puts it where the function was."""
    for (rid,) in tables.sql("select min(rid) from events where global_steps = 2 having count(*) > 0").fetchall():
        yield Finding(rid, expected="one step", actual="two")


OWN = replace(no_second_step, origin="a test")


def test_a_function_judges_here_and_in_another_process(rows: Rows, write: Write, tmp_path: Path) -> None:
    """A plugin's invariant stops the step it accuses; pickled it is found by the name of its function."""
    path = write(rows)
    for judge in (checker(path, invariants=[OWN]), pickle.loads(pickle.dumps(checker(path, invariants=[OWN])))):
        error = play(path, judge)
        assert error is not None
        assert (error.global_steps, error.headline[:8]) == (2, "TEAM001 ")


def test_a_function_no_other_process_can_find_is_one_line(tmp_path: Path) -> None:
    """Inside another function, or in the script itself: the recorder does not start, and says which code it is."""
    local = replace(OWN, check=lambda tables: [])
    with pytest.raises(lineage.errors.RecorderError, match=r"TEAM001: its function .* top of a module.*sidecar=False"):
        lineage.record(tmp_path / "run", sidecar=True, on_step_sealed=StepChecker("raise", [local])).__enter__()


@pytest.mark.slow
@pytest.mark.parametrize("match", list(Match))
def test_known_violations_let_the_run_go_on(rows: Rows, write: Write, match: Match) -> None:
    """What a baseline accepts stops nothing; the same fault once more does, at its step."""
    for step in (2, 3):
        row = pick(rows, "advantage", "forward", "advantages", step=step)
        row.lists["nnz_out"] = np.array(row.lists["nnz_out"]) + 1
    path = write(rows)
    baseline = Baseline.of([lineage.check(path)], match)
    assert play(path, checker(path, baseline=baseline)) is None
    again = pick(rows, "advantage", "forward", "returns", step=3)
    again.lists["nnz_out"] = np.array(again.lists["nnz_out"]) + 1
    path = write(rows, "again.parquet")
    error = play(path, checker(path, baseline=baseline))
    assert error is not None
    assert (error.global_steps, error.headline[:6]) == (3, "ADV001")
    assert "forward returns" in error.headline
