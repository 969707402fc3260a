"""The recorder: what rows its verbs give, and what happens when the disk, the input or the process fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import lineage
from lineage import hooks
from lineage.compact import compact, materialise
from lineage.errors import RecorderError, UsageError, UserError
from lineage.fingerprint import reference_fingerprint
from lineage.hooks import Weights, traced
from lineage.parts import PARTS
from lineage.recorder import Recorder
from lineage.run import RunInfo
from lineage.schema import META_STATE, schema

KEYS = ["u_0_0", "u_1_0"]
BATCH = {
    "prompts": [[1, 2], [3]],
    "responses": [[5, 6, 7], [8]],
    "response_mask": [[1, 1, 0], [1]],
    "advantages": [[0.5, 0.5, 0.0], [-0.5]],
}


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows of a trace as dicts."""
    return pq.read_table(path).to_pylist()


def row(path: Path, **where: Any) -> dict[str, Any]:
    """The one row with these scalars."""
    found = [r for r in rows_of(path) if all(r[name] == value for name, value in where.items())]
    assert len(found) == 1, (where, len(found))
    return found[0]


def test_ten_lines_in_any_loop_make_a_trace(tmp_path: Path) -> None:
    """Open, name the step and the stage, record, seal: the file has the schema and says the run closed in order."""
    with lineage.record(tmp_path / "run", config={"lr": 1e-3}, run={"seed": 7}) as recorder:
        for step in (1, 2):
            recorder.step(step)
            with recorder.stage("rollout", producer="engine", consumer="trainer") as stage:
                stage.produce(BATCH, keys=KEYS, columns={"finish_reason": ["stop", "length"]})
            recorder.seal()
    trace = tmp_path / "run" / "trace.parquet"
    assert pq.read_schema(trace).equals(schema())
    assert not (tmp_path / "run" / PARTS).exists()
    mask = row(trace, global_steps=2, field="response_mask")
    assert (mask["producer"], mask["consumer"], mask["n"], mask["key"]) == ("engine", "trainer", 2, KEYS)
    assert mask["mask_sum"] == [2, 1]
    advantages = row(trace, global_steps=2, field="advantages")
    assert advantages["sum_in"] == [1.0, -0.5]
    assert advantages["nnz_out"] == [0, 0]
    assert advantages["finish_reason"] == ["stop", "length"]
    assert b'"closed": true' in pq.read_metadata(trace).metadata[META_STATE]


def test_what_is_recorded_does_not_change_after_the_call(tmp_path: Path) -> None:
    """A tensor written over before the step is sealed keeps the content it had when it was recorded."""
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    few, many = values.clone(), torch.cat([values] * 3)
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("advantage") as stage:
            stage.produce({"returns": few}, keys=KEYS)
            stage.produce({"advantages": many}, keys=[f"u_{i}_0" for i in range(6)])
            few.zero_()
            many.zero_()
    trace = tmp_path / "run" / "trace.parquet"
    expected = [reference_fingerprint([1.0, 2.0]), reference_fingerprint([3.0, 4.0])]
    assert row(trace, field="returns")["fingerprint"] == expected
    assert row(trace, field="advantages")["fingerprint"] == expected * 3


def test_reuse_changes_nothing_but_the_work(tmp_path: Path) -> None:
    """With and without sharing statistics between equal contents the rows are the same."""
    found = []
    for reuse in (True, False):
        folder = tmp_path / f"reuse-{reuse}"
        with lineage.record(folder, run_id="r", reuse=reuse) as recorder:
            recorder.step(1)
            for name in ("rollout", "advantage"):
                with recorder.stage(name, producer=name) as stage:
                    stage.produce(BATCH, keys=KEYS)
                    stage.consume({"advantages": BATCH["advantages"]}, keys=KEYS, mask=BATCH["response_mask"])
        table = rows_of(folder / "trace.parquet")
        found.append([{k: v for k, v in r.items() if k != "time_ns"} for r in table])
    assert found[0] == found[1]


def test_stage_opened_inside_another_is_one_stage(tmp_path: Path) -> None:
    """Sessions that each enter the reward stage inside the rollout give one row, elements in their order."""
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with traced("rollout", component="loop"):
            for key in KEYS:
                with traced("reward", component="scorer") as stage:
                    stage.score({"rm_scores": [1.0]}, keys=[key])
    scores = row(tmp_path / "run" / "trace.parquet", stage="reward", op="score")
    assert scores["key"] == KEYS
    assert scores["producer"] == "scorer"


def test_late_writer_makes_a_later_row(tmp_path: Path) -> None:
    """Whoever records into a stage that has ended is a later event, not part of the stage's row."""
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("rollout") as stage:
            stage.produce({"responses": [[1]]}, keys=KEYS[:1])
        with recorder.stage("clear") as clear:
            clear.clear(KEYS)
        stage.produce({"responses": [[2]]}, keys=KEYS[1:])
    table = rows_of(tmp_path / "run" / "trace.parquet")
    assert [(r["stage"], r["op"]) for r in table] == [
        ("rollout", "produce"),
        ("clear", "clear"),
        ("rollout", "produce"),
    ]
    assert [r["seq"] for r in table] == sorted(r["seq"] for r in table)


def test_late_writer_of_an_earlier_step_is_not_lost(tmp_path: Path) -> None:
    """A task of step 1 that writes in step 2 makes a row of step 2."""
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("rollout") as stage:
            stage.produce({"responses": [[1]]}, keys=KEYS[:1])
        recorder.seal()
        recorder.step(2)
        stage.produce({"responses": [[2]]}, keys=KEYS[1:])
        recorder.seal()
    table = rows_of(tmp_path / "run" / "trace.parquet")
    assert [(r["global_steps"], r["key"]) for r in table] == [(1, KEYS[:1]), (2, KEYS[1:])]


def test_comparison_sees_a_shift(tmp_path: Path) -> None:
    """Log-probs rolled by one correlate with the other side at the shift, not at 0."""
    generator = torch.Generator().manual_seed(0)
    rollout = torch.randn(1, 64, generator=generator)
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("old_log_prob") as stage:
            stage.compare("old_log_probs", rollout.roll(1, 1), "rollout_log_probs", rollout, keys=KEYS[:1])
    pair = row(tmp_path / "run" / "trace.parquet", op="compare")
    assert pair["against"] == "rollout_log_probs"
    assert pair["corr_prev"][0] > 0.999
    assert abs(pair["corr0"][0]) < 0.5
    assert pair["n_in"] == [64]


def test_sync_records_one_fingerprint_a_tensor(tmp_path: Path) -> None:
    """Each side of a weight sync is one row of named tensors with the version they have."""
    weights = {"a": torch.ones(2, 2), "b": torch.arange(3.0)}
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("weight_sync") as stage:
            stage.params("sync", weights, weights=Weights(4, "actor"))
            stage.params("sync", weights, weights=Weights(4, "engine", cache_epoch=2))
    sides = [r for r in rows_of(tmp_path / "run" / "trace.parquet") if r["op"] == "sync"]
    assert [side["weights"]["phase"] for side in sides] == ["actor", "engine"]
    assert sides[0]["key"] == ["a", "b"]
    assert sides[0]["fingerprint"] == sides[1]["fingerprint"]
    assert sides[0]["length"] == [4, 3]


def test_off_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disabled by argument or environment, every verb is accepted and nothing is written."""
    monkeypatch.setenv("LINEAGE_DISABLED", "1")
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with traced("rollout") as stage:
            stage.produce(BATCH, keys=KEYS)
            hooks.current().compare("a", [1], "b", [2])
        recorder.seal()
    assert not (tmp_path / "run").exists()


def test_misuse_is_told_and_bad_input_is_counted(tmp_path: Path) -> None:
    """A misspelt column raises; a field nothing can be made of is dropped, and the trace says so."""
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("rollout") as stage:
            with pytest.raises(UsageError, match="unknown context"):
                stage.produce(BATCH, keys=KEYS, minibatch=0)
            stage.produce(3, keys=KEYS)
            stage.produce({"responses": [[1], [2]]}, keys=KEYS)
    trace = tmp_path / "run" / "trace.parquet"
    assert row(trace, field="responses")["n"] == 2
    assert b"cannot record a int" in pq.read_metadata(trace).metadata[META_STATE]


def test_recorder_that_cannot_start_stops_the_run(tmp_path: Path) -> None:
    """A folder that cannot be made is one clear error before training begins."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(RecorderError, match="cannot write a trace"):
        Recorder(blocked / "run", RunInfo("r"))


def test_full_disk_lets_training_go_on_and_the_trace_says_what_it_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails loses that step only; its number and the rows lost are in the trace."""
    with lineage.record(tmp_path / "run") as recorder:
        assert isinstance(recorder, Recorder)
        for step in (1, 2, 3):
            recorder.step(step)
            with recorder.stage("rollout") as stage:
                stage.produce(BATCH, keys=KEYS)
            with monkeypatch.context() as patch:
                if step == 2:
                    patch.setattr(recorder._writer, "write", _no_space)
                recorder.seal()
    trace = tmp_path / "run" / "trace.parquet"
    assert sorted({r["global_steps"] for r in rows_of(trace)}) == [1, 3]
    state = pq.read_metadata(trace).metadata[META_STATE]
    assert b'"rows": 4, "steps": [2]' in state
    assert b"No space left" in state


def _no_space(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def test_every_traces_one_step_of_so_many(tmp_path: Path) -> None:
    """With every=3 the first step and each third after it are in the trace."""
    with lineage.record(tmp_path / "run", every=3) as recorder:
        for step in range(1, 8):
            recorder.step(step)
            with recorder.stage("rollout") as stage:
                stage.produce(BATCH, keys=KEYS)
            recorder.seal()
    assert sorted({r["global_steps"] for r in rows_of(tmp_path / "run" / "trace.parquet")}) == [1, 4, 7]


def test_keep_steps_bounds_what_stays(tmp_path: Path) -> None:
    """Old parts go while the run goes on; about the last keep_steps steps are left."""
    with lineage.record(tmp_path / "run", keep_steps=5) as recorder:
        for step in range(1, 31):
            recorder.step(step)
            with recorder.stage("rollout") as stage:
                stage.produce(BATCH, keys=KEYS)
            recorder.seal()
            assert len(list((tmp_path / "run" / PARTS).glob("*.arrow*"))) <= 3
    steps = sorted({r["global_steps"] for r in rows_of(tmp_path / "run" / "trace.parquet")})
    assert steps == list(range(26, 31))


def test_killed_run_keeps_its_complete_steps_and_names_the_torn_one(tmp_path: Path) -> None:
    """After kill -9 in step 3 the parts hold steps 1 and 2, and the state names 3 as torn."""
    program = textwrap.dedent(
        f"""
        import os, signal, lineage
        from lineage import hooks
        recorder = hooks.open_recorder({str(tmp_path / "run")!r})
        for step in (1, 2, 3):
            recorder.step(step)
            with recorder.stage("rollout") as stage:
                stage.produce({BATCH!r}, keys={KEYS!r})
            if step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            recorder.seal()
        """
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    parquet = materialise(tmp_path / "run")
    assert sorted({r["global_steps"] for r in rows_of(parquet)}) == [1, 2]
    state = pq.read_metadata(parquet).metadata[META_STATE]
    assert b'"closed": false' in state
    assert b'"torn": [3]' in state
    assert compact(tmp_path / "run").exists()  # its process is gone, so the parts may be compacted


def test_torn_batch_at_the_end_of_a_part_is_skipped(tmp_path: Path) -> None:
    """A part cut anywhere gives its whole batches and no error."""
    recorder = Recorder(tmp_path / "run", RunInfo("r"))
    for step in (1, 2):
        recorder.step(step)
        with recorder.stage("rollout") as stage:
            stage.produce(BATCH, keys=KEYS)
        recorder.seal()
    part = next((tmp_path / "run" / PARTS).glob("*.open"))
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) - 100])
    assert sorted({r["global_steps"] for r in rows_of(materialise(tmp_path / "run"))}) == [1]
    part.write_bytes(whole[:10])
    assert rows_of(materialise(tmp_path / "run")) == []


def test_run_that_raises_is_torn_where_it_was(tmp_path: Path) -> None:
    """An exception in step 2 leaves a readable trace that says which step it was and why it ended."""

    def train() -> None:
        with lineage.record(tmp_path / "run") as recorder:
            for step in (1, 2):
                recorder.step(step)
                with recorder.stage("rollout") as stage:
                    stage.produce(BATCH, keys=KEYS)
                if step == 2:
                    raise ZeroDivisionError("boom")
                recorder.seal()

    with pytest.raises(ZeroDivisionError):
        train()
    state = pq.read_metadata(tmp_path / "run" / "trace.parquet").metadata[META_STATE]
    assert b'"torn": [2]' in state
    assert b"ZeroDivisionError: boom" in state


def test_compact_refuses_a_run_that_is_still_written(tmp_path: Path) -> None:
    """Another live process's parts are left alone, with one line that says so."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        try:
            recorder = Recorder(tmp_path / "run", RunInfo("r"))
            recorder.step(1)
            recorder._state.state["pid"] = other.pid
            recorder._state.write()
            with pytest.raises(UserError, match="still being written"):
                compact(tmp_path / "run")
        finally:
            other.kill()


def test_run_that_ends_before_anything_is_recorded_says_only_that(tmp_path: Path) -> None:
    """An error before the first row is the error the user sees, and no trace is left."""
    with pytest.raises(ZeroDivisionError), lineage.record(tmp_path / "run"):
        raise ZeroDivisionError
    assert not (tmp_path / "run" / "trace.parquet").exists()


def test_import_is_light() -> None:
    """import lineage and its hooks loads neither torch nor ray nor transformers."""
    program = (
        "import sys, lineage, lineage.hooks; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


def test_numbers_in_the_trace_are_the_arrays_given(tmp_path: Path) -> None:
    """Metrics and scalar fields keep their exact value in sum and first."""
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("metrics") as stage:
            stage.metrics({"critic/score/mean": 0.1, "actor/lr": 1e-6})
            stage.produce({"num_turns": np.array([2, 5])}, keys=KEYS)
    metrics = row(tmp_path / "run" / "trace.parquet", field="metrics")
    assert dict(zip(metrics["key"], metrics["sum"], strict=True)) == {"critic/score/mean": 0.1, "actor/lr": 1e-6}
    assert row(tmp_path / "run" / "trace.parquet", field="num_turns")["first"] == [2.0, 5.0]
