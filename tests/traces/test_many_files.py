"""Several files, ranks or runs in one check: ranks of a run are one trace, runs are told apart, a file counts once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import lineage
from lineage.checks import check
from lineage.compact import compact
from lineage.recorder import Recorder
from lineage.run import RunInfo
from lineage.schema import META_RUN, META_STATE
from lineage.traces import open_trace

SAMPLE = Path(lineage.traces.__file__).parent / "samples" / "good.parquet"
KEYS = ["u_0_0", "u_1_0"]


def as_run(source: Path, target: Path, run_id: str) -> Path:
    """The same trace under another run id."""
    table = pq.read_table(source)
    place = table.schema.get_field_index("run_id")
    renamed = table.set_column(place, "run_id", pa.array([run_id] * table.num_rows))
    metadata = {**table.schema.metadata, META_RUN: f'{{"run_id": "{run_id}", "profile": "lineage"}}'.encode()}
    metadata[META_STATE] = pq.read_metadata(source).metadata[META_STATE]
    pq.write_table(renamed.replace_schema_metadata(metadata), target)
    return target


def record(folder: Path, rank: int, mask: list[list[int]], use: list[list[int]] | None = None) -> Recorder:
    """One rank's share of a step: it rolls out one trajectory, or trains on the one of the other rank."""
    recorder = Recorder(folder, RunInfo("r"), process=f"actor:{rank}", rank=rank)
    recorder.step(1)
    if rank == 0:
        with recorder.stage("rollout", producer="engine") as stage:
            stage.produce({"responses": [[1, 2], [3, 4]], "response_mask": mask}, keys=KEYS)
    else:
        with recorder.stage("advantage", producer="trainer") as stage:
            stage.produce({"advantages": [[0.5, 0.5], [-0.5, 0.0]]}, keys=KEYS, mask=use or mask)
    recorder.seal()
    return recorder


@pytest.mark.parametrize(
    "how",
    [
        "parts",
        "glob",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("parts folder", "one file", "a file a rank")),
    ],
)
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.slow
def test_a_check_across_ranks_sees_them_as_one(tmp_path, how, wrong):
    """One rank writes the mask, another uses it: a mask of its own is found however the ranks' rows lie."""
    mask = [[1, 1], [1, 0]]
    ranks = [record(tmp_path / "run", rank, mask, [[1, 1], [1, 1]] if wrong else None) for rank in (0, 1)]
    target = tmp_path / "run"
    if how in ("parts", "parts folder"):
        target = target / "parts" if how == "parts folder" else target
    else:
        for recorder in ranks:
            recorder.close()
        target = compact(target)
    if how in ("a file a rank", "glob"):
        table = pq.read_table(target)
        (tmp_path / "ranks").mkdir()
        for rank in (0, 1):
            rows = table.filter(pc.equal(table["process"], f"actor:{rank}"))
            pq.write_table(rows, tmp_path / "ranks" / f"rank{rank}.parquet")
        target = tmp_path / "ranks" / ("*.parquet" if how == "glob" else "")
    report = check(target, select=["KEY", "MSK", "QUE"])
    verdict = report.verdict("MSK002")
    assert verdict.examined
    assert verdict.errors == (1 if wrong else 0)
    assert [one.code for one in report.verdicts if one.errors] == (["MSK002"] if wrong else [])


@pytest.mark.slow
def test_two_runs_in_one_glob_raise_no_alarm(tmp_path):
    """The same keys in two runs are two trajectories."""
    for run_id in ("a", "b"):
        as_run(SAMPLE, tmp_path / f"{run_id}.parquet", run_id)
    one, both = check(SAMPLE), check(tmp_path / "*.parquet")
    assert both.exit_code == 0, both.headline
    assert (both.rows, both.facts, both.steps) == (2 * one.rows, 2 * one.facts, 2 * one.steps)
    examined = [{one.code: one.examined for one in report.verdicts} for report in (one, both)]
    assert {code for code in examined[0] if examined[1][code] < examined[0][code]} == set()


def test_runs_of_the_same_keys_and_other_contents_raise_no_alarm(tmp_path):
    """Two trainings from one seed: what a key holds in one run says nothing of it in the other."""
    generator = np.random.default_rng(0)
    for run_id, mask in (("a", [[1, 1, 1], [1, 1, 0]]), ("b", [[1, 0, 0], [1, 0, 0]])):
        with lineage.record(tmp_path / run_id, run_id=run_id) as recorder:
            recorder.step(1)
            content = {"responses": generator.integers(0, 9, (2, 3)).tolist(), "response_mask": mask}
            with recorder.stage("rollout", producer="engine") as stage:
                stage.produce(content, keys=KEYS)
            with recorder.stage("advantage", producer="trainer") as stage:
                stage.consume(content, keys=KEYS)
                stage.produce({"advantages": [[0.5, 0.0, 0.0]] * 2}, keys=KEYS, mask=mask)
            recorder.seal()
    report = check(tmp_path / "*" / "trace.parquet")
    assert [one.code for one in report.verdicts if one.errors] == []
    assert next(one for one in report.verdicts if one.code == "MSK002").examined


def test_a_file_given_twice_counts_once(tmp_path):
    """runs/latest is a link to a run that the glob finds too."""
    (tmp_path / "runs" / "one").mkdir(parents=True)
    as_run(SAMPLE, tmp_path / "runs" / "one" / "trace.parquet", "a")
    (tmp_path / "runs" / "latest").symlink_to("one")
    for glob in ("runs/*/trace.parquet", "runs/*"):
        report = check(tmp_path / glob, select=["KEY001", "KEY002", "QUE001"])
        assert report.exit_code == 0
        with open_trace(tmp_path / glob) as trace:
            assert len(trace.source.files) == 1
