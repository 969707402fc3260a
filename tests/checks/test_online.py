"""Judged step by step, a run is told what a check of its whole trace says, at the step where it can be known."""

from __future__ import annotations

import copy
import json
import logging
import pickle
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

import lineage
from lineage.buffers import part_schema
from lineage.checks.catalogue import Invariant, catalogue, get
from lineage.checks.formats.text import headline_lines
from lineage.checks.online import SETTLED_LATER, StepChecker
from lineage.checks.window import Window, keys_of
from lineage.errors import CheckError, ViolationError

SAMPLES = Path(lineage.__file__).parent / "traces" / "samples"
QUICK = ("ADV001", "BAT001", "QUE003")  # of the others each is slow: CI runs them all
Rows = list[synthetic.Row]
Write = Callable[..., Path]


def steps_of(path: Path) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The batches a recorder would have sealed, and their steps."""
    table = pq.read_table(path).replace_schema_metadata(None)
    for step in sorted(set(table["global_steps"].to_pylist())):
        rows = table.filter(pc.field("global_steps") == step).cast(part_schema())
        (batch,) = rows.combine_chunks().to_batches()
        yield batch, step


def checker(path: Path, on_violation: Any = "raise", **options: Any) -> StepChecker:
    """One for the run of this trace."""
    metadata = pq.read_metadata(path).metadata
    run, config = (json.loads(metadata[name]) for name in (b"lineage.run", b"lineage.config"))
    return StepChecker(on_violation, run=run, config=config, **options)


def play(path: Path, judge: StepChecker) -> ViolationError | None:
    """What it raised, at the first step where it raised."""
    for batch, step in steps_of(path):
        try:
            judge(batch, step)
        except ViolationError as error:
            return error
    return None


def without_counts(lines: list[str]) -> list[str]:
    """A headline's lines but for what counts the steps to come too."""
    return [line for line in lines if not line.startswith("  also: ") and not line.endswith(" in all")]


def compare(path: Path) -> None:
    """The first step that raises, and what it says, are the headline of the whole trace."""
    report = lineage.check(path)
    assert report.headline is not None
    step, code = report.headline.violation.global_steps, report.headline.invariant.code
    error = play(path, checker(path))
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


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((SAMPLES / "bad").glob("*.parquet")), ids=lambda path: path.stem)
def test_a_bad_sample_is_raised_where_the_check_says_it_happened(path: Path) -> None:
    """The same of the recorded runs that ship with the checker."""
    compare(path)


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
    with pytest.raises(CheckError, match=r"step 1 could not be checked \(CatalogueError: BAD001: .*nowhere"):
        play(path, checker(path, invariants=[_broken()]))


def test_a_check_that_fails_is_said_once_under_warn(rows: Rows, write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on; the steps that were not judged are counted."""
    path = write(rows)
    judge = checker(path, "warn", invariants=[_broken()])
    assert play(path, judge) is None
    assert len(caplog.records) == 1
    assert "step 1 is not checked: CatalogueError: BAD001" in caplog.text
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
