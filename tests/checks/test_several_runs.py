"""Several runs in one check: each is judged by what it declared, without its own torn steps and no other's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lineage.checks import check
from lineage.checks.profiles import load
from lineage.checks.workbench import Workbench
from lineage.schema import META_CONFIG, META_RUN, META_STATE, schema
from lineage.traces import TraceError, open_trace
from lineage.traces.source import locate

SAMPLES = Path(__file__).parents[2] / "traces" / "samples"
GOOD, BAD = SAMPLES / "good.parquet", SAMPLES / "bad" / "MSK002.parquet"  # broken at step 2


def as_run(
    source: Path,
    target: Path,
    *,
    profile: str = "lineage",
    n: int | None = None,
    state: Mapping[str, Any] | None = None,
    says: bool = True,
) -> Path:
    """A sample as the run its file's name says, in which only the configuration declares the sessions of a prompt."""
    table = pq.read_table(source)
    run_id = pa.array([target.stem.partition("-")[0]] * table.num_rows)
    table = table.set_column(table.schema.get_field_index("run_id"), "run_id", run_id).drop(["expected"])
    config = {} if n is None else {"actor_rollout_ref": {"rollout": {"n": n}}}
    metadata = {
        META_RUN: json.dumps({"run_id": target.stem, "profile": profile} if says else {}),
        META_CONFIG: json.dumps(config),
        META_STATE: json.dumps(state or {}),
    }
    pq.write_table(table.replace_schema_metadata(metadata), target)
    return target


def failed(path: Path | str) -> dict[str, set[tuple[str, int]]]:
    """Run and step of the violations of groups and padding, by code."""
    report = check(path, select=("KEY001", "KEY002", "PAD001"))
    found = {one.code: one.violations for one in report.verdicts if one.errors}
    return {code: {(one.run_id, one.global_steps) for one in violations} for code, violations in found.items()}


@pytest.mark.parametrize("column", ["run_id", "e.run_id"])
@pytest.mark.parametrize("asked", ["where", "select"])
def test_a_setting_is_that_of_the_run_asked_about(tmp_path, column, asked):
    """However a query writes the column, and wherever it asks: another run's settings are not its own."""
    for name, n in (("a", 2), ("b", 3)):
        as_run(GOOD, tmp_path / f"{name}.parquet", n=n)
    three = f"setting({column}, 'actor_rollout_ref.rollout.n') = '3' and synchronous({column}) and band({column}) > 0"
    query = {
        "where": f"select distinct run_id from events as e where {three}",
        "select": f"select distinct run_id from (select run_id, {three} as said from events as e) where said",
    }[asked]
    with open_trace(tmp_path) as trace:
        assert Workbench(trace, load(trace.profile)).run(query) == [("b",)]


@pytest.mark.parametrize("wrong", ["a", "b"])
def test_a_run_is_held_to_its_own_number_of_sessions(tmp_path, wrong):
    """Whichever file comes first: the run that lost sessions is named, the one that declared fewer is not."""
    for name in ("a", "b"):
        as_run(GOOD, tmp_path / f"{name}.parquet", n=3 if name == wrong else 2)
    assert failed(tmp_path / f"{wrong}.parquet") == {"KEY002": {(wrong, 1), (wrong, 2)}}
    assert failed(tmp_path) == {"KEY002": {(wrong, 1), (wrong, 2)}}


def test_a_run_that_declares_nothing_is_not_held_to_another_s_number(tmp_path):
    """The configuration of one run says nothing of a run without one."""
    as_run(GOOD, tmp_path / "a.parquet", n=3)
    as_run(GOOD, tmp_path / "b.parquet")
    assert failed(tmp_path) == {"KEY002": {("a", 1), ("a", 2)}}


def test_a_torn_step_hides_nothing_of_another_run(tmp_path):
    """Step 2 of run a is torn and left out; that of run b is broken and found."""
    as_run(BAD, tmp_path / "a.parquet", state={"torn": [2], "closed": False})
    as_run(BAD, tmp_path / "b.parquet")
    report = check(tmp_path, select=["MSK002"])
    assert {(one.run_id, one.global_steps) for one in report.verdict("MSK002").violations} == {("b", 2)}
    assert (report.exit_code, report.steps) == (1, 3)


def test_a_torn_step_of_one_rank_is_torn_for_the_run(tmp_path):
    """The file of another rank, which says nothing of itself, has only a part of that step."""
    as_run(BAD, tmp_path / "a-0.parquet", state={"torn": [2], "closed": False})
    as_run(BAD, tmp_path / "a-1.parquet", says=False)
    assert locate(tmp_path).unseen == {("a", 2)}
    report = check(tmp_path, select=["KEY005"])  # which the doubled step 1 breaks
    assert report.steps == 1
    assert report.headline is not None


def test_runs_of_two_profiles_are_refused(tmp_path):
    """A check follows the conventions of one trainer."""
    as_run(GOOD, tmp_path / "a.parquet", profile="lineage")
    as_run(GOOD, tmp_path / "b.parquet", profile="verl")
    as_run(GOOD, tmp_path / "c.parquet", profile="verl")
    apart = f"lineage: {tmp_path}/a.parquet; verl: {tmp_path}/b.parquet {tmp_path}/c.parquet"
    with pytest.raises(TraceError, match=rf"its runs follow different profiles, check them apart: {apart}$"):
        check(tmp_path)


def test_the_runs_of_one_file_are_found(tmp_path):
    """Where a row group holds several runs its statistics do not name them; rows without a run are one."""
    tables = [pq.read_table(as_run(GOOD, tmp_path / f"{name}.parquet", n=2)) for name in ("a", "b", "c")]
    nameless = tables[2].set_column(
        tables[2].schema.get_field_index("run_id"), "run_id", pa.nulls(len(tables[2]), pa.string())
    )
    target = tmp_path / "all.parquet"
    pq.write_table(pa.concat_tables([*tables[:2], nameless.cast(tables[0].schema)]), target)
    assert [run.run_id for run in locate(target).runs] == ["a", "b", ""]
    assert check(target, select=["KEY001"]).steps == 6
    without = tmp_path / "without.parquet"
    pq.write_table(tables[0].drop(["run_id"]), without)
    assert [run.run_id for run in locate(without).runs] == [""]
    assert check(without, select=["KEY002"]).verdict("KEY002").examined
    assert set(tables[0].column_names) < set(schema().names)


def test_an_odd_configuration_declares_nothing(tmp_path):
    """A number that is none is not guessed at."""
    as_run(GOOD, tmp_path / "a.parquet", n=1.5)
    assert failed(tmp_path) == {}
    table = pq.read_table(tmp_path / "a.parquet")
    for odd in ("two", "²", [2], None):
        meta = {**table.schema.metadata, META_CONFIG: json.dumps({"actor_rollout_ref.rollout.n": odd})}
        pq.write_table(table.replace_schema_metadata(meta), tmp_path / "a.parquet")
        assert failed(tmp_path) == {}


def without(source: Path, **words: str) -> None:
    """Take the rows with these words out of a trace."""
    table = pq.read_table(source)
    gone = np.ones(len(table), dtype=bool)
    for column, word in words.items():
        gone &= np.array([value == word for value in table[column].to_pylist()])
    assert gone.any()
    pq.write_table(table.filter(pa.array(~gone)), source)


@pytest.mark.parametrize(
    ("code", "rows"),
    [
        ("BAT002", [{"op": "optim_step"}]),
        ("BAT003", [{"stage": "update_actor", "op": "forward"}]),
        ("LOS003", [{"op": "optim_step"}]),
        ("QUE002", [{"op": "tag"}, {"op": "produce"}]),
        ("QUE003", [{"stage": "advantage", "op": "produce"}]),
    ],
)
def test_a_run_is_not_held_to_what_another_one_records(tmp_path, code, rows):
    """A run that does not record some kind of row says nothing of it, whoever stands beside it."""
    for name in ("a", "b"):
        as_run(GOOD, tmp_path / f"{name}.parquet", n=2)
    for words in rows:
        without(tmp_path / "b.parquet", **words)
    verdict = check(tmp_path, select=[code]).verdict(code)
    assert (verdict.violations, str(verdict.kind)) == ((), "pass")


def test_the_same_key_in_two_runs_is_two_rows(tmp_path):
    """What is wrong in one run is told once, and a reason recorded in another excuses nothing."""
    as_run(BAD, tmp_path / "a.parquet")
    alone = check(tmp_path / "a.parquet", select=["MSK002"]).verdict("MSK002")
    as_run(GOOD, tmp_path / "b.parquet")
    beside = check(tmp_path, select=["MSK002"]).verdict("MSK002")
    assert {one.run_id for one in beside.violations} == {"a"}
    assert (beside.errors, beside.warnings) == (alone.errors, alone.warnings)
