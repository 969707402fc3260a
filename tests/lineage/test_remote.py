"""The recorder in a process of its own gives the same trace, and outlives the process it records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import lineage
from lineage.attach.transfer_queue import TracedQueue
from lineage.checks.catalogue import select
from lineage.checks.formats.text import headline_lines
from lineage.checks.online import StepChecker
from lineage.compact import materialise
from lineage.errors import CheckError, RecorderError, UsageError, ViolationError
from lineage.hooks import LossTerm, Topology, Weights, open_recorder, traced
from lineage.parts import PARTS
from lineage.remote import RemoteRecorder
from lineage.run import RunInfo
from lineage.schema import META_STATE
from lineage.state import run_state

KEYS = [f"u_{i}_0" for i in range(6)]
SOME = ["KEY001", "LEN001", "MSK001", "MSK002"]


def judge(on_violation: str) -> StepChecker:
    """A checker of the codes these tests break, and of no others."""
    return StepChecker(on_violation, invariants=select(SOME))


class Store:
    """The least a queue must have."""

    def kv_batch_put(self, keys: Any, partition_id: str, fields: Any = None, tags: Any = None) -> None:
        """Keep nothing."""

    def kv_clear(self, keys: Any, partition_id: str) -> None:
        """Forget nothing."""

    def global_indexes(self, keys: list[str], partition_id: str) -> list[int]:
        """Slots by the session."""
        return [int(key.split("_")[1]) for key in keys]


def nested(dtype: torch.dtype) -> torch.Tensor:
    """Jagged rows of 1 to 6 elements."""
    return torch.nested.nested_tensor([torch.arange(i + 1).to(dtype) for i in range(6)], layout=torch.jagged)


def train(recorder: Any) -> None:
    """Two steps that use every verb, every container and a nested stage."""
    queue = TracedQueue(Store())
    mask = torch.nested.nested_tensor([torch.ones(i + 1, dtype=torch.int64) for i in range(6)], layout=torch.jagged)
    for step in (1, 2):
        recorder.step(step)
        with traced("rollout", component="loop", consumer="buffer"):
            for i, key in enumerate(KEYS):
                with traced("reward", component="scorer") as reward:
                    reward.score({"rm_scores": [float(i)]}, keys=[key], columns={"data_source": ["a"]})
                tag = {"prompt_len": 2, "response_len": i + 1, "seq_len": i + 3, "is_padding": i == 5}
                fields = {"responses": [list(range(i + 1))], "extra_fields": [{"i": i}], "uid": ["u"]}
                queue.kv_batch_put([key], "train", fields, [tag])
        with traced("advantage", component="driver") as stage:
            padded = torch.nested.to_padded_tensor(nested(torch.float32), 0.0)
            stage.consume({"responses": nested(torch.int64), "response_mask": mask}, keys=KEYS)
            stage.pad({"old_log_probs": padded}, keys=KEYS, lengths={"response": [1, 2, 3, 4, 5, 6]})
            stage.forward({"log_probs": nested(torch.bfloat16)}, keys=KEYS, span="response")
            stage.compare("a", nested(torch.float32), "b", nested(torch.float64), mask=mask, keys=KEYS)
            stage.reorder(KEYS[::-1], source_index=[5, 4, 3, 2, 1, 0], tags=[{"status": "success"}] * 6)
            stage.split(KEYS[:3], mini_batch=0, topology=Topology("fsdp", 2, 2))
            stage.loss(LossTerm("pg", "token-mean", 1.0, 2.0, 1.0, 6, 21), mini_batch=0)
            stage.params("sync", {"w": torch.ones(2, 3), "b": torch.arange(3.0)}, weights=Weights(step))
            stage.metrics({"critic/score/mean": 0.5}, attrs={"over": 6})
            padded.zero_()  # what was recorded is not what happens after
        with traced("clear", component="driver"):
            queue.kv_clear(KEYS, "train")
        recorder.seal()


def test_both_recorders_give_the_same_rows(tmp_path: Path) -> None:
    """In the process or beside it: the same rows, value for value, but for the clock."""
    found = []
    for sidecar in (False, True):
        with lineage.record(tmp_path / str(sidecar), run_id="r", sidecar=sidecar) as recorder:
            train(recorder)
        table = pq.read_table(tmp_path / str(sidecar) / "trace.parquet")
        found.append(table.drop_columns(["time_ns"]).to_pylist())
        assert b'"closed": true' in pq.read_metadata(tmp_path / str(sidecar) / "trace.parquet").metadata[META_STATE]
    assert len(found[0]) > 30
    assert found[0] == found[1]


def test_recorder_that_cannot_start_stops_the_run(tmp_path: Path) -> None:
    """The other process's refusal is the same one clear error here."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(RecorderError, match="cannot write a trace"):
        RemoteRecorder(blocked / "run", RunInfo("r"))


def test_misuse_is_told_here(tmp_path: Path) -> None:
    """A misspelt option raises where it is written, and what cannot be recorded is counted there."""
    with lineage.record(tmp_path / "run", sidecar=True) as recorder:
        recorder.step(1)
        with recorder.stage("rollout") as stage:
            with pytest.raises(UsageError, match="minibatch"):
                stage.produce({"a": [1]}, keys=KEYS[:1], minibatch=0)
            stage.produce({"a": [1]}, keys=KEYS[:1])
            stage.produce(3, keys=KEYS[:1])
            stage.produce({"a": [1]}, keys=KEYS[:1], columns={"reason": [lambda: None]})
    trace = tmp_path / "run" / "trace.parquet"
    assert pq.read_table(trace)["n"].to_pylist() == [1]
    state = pq.read_metadata(trace).metadata[META_STATE]
    assert b"cannot record a int" in state
    assert b"cannot be pickled" in state


class Finish(Enum):
    """A class that the recorder's process cannot import, as none of a script's own can be."""

    STOP = "stop"


class Name(str):
    """Another one, of strings."""


UNREADABLE: dict[str, Callable[[Any], None]] = {
    "columns": lambda stage: stage.produce({"a": [1]}, keys=KEYS[:1], columns={"finish_reason": [Finish.STOP]}),
    "tag": lambda stage: stage.tag(KEYS[:1], columns={"status": [Finish.STOP]}),
    "keys": lambda stage: stage.produce({"a": [1]}, keys=[Name(KEYS[0])]),
    "producer": lambda stage: stage.produce({"a": [1]}, keys=KEYS[:1], producer=Finish.STOP),
    "partition": lambda stage: stage.produce({"a": [1]}, keys=KEYS[:1], partition=Name("train")),
    "stage": lambda stage: stage.recorder.make_stage("rollout", Finish.STOP, None, {}, None).produce({"a": [1]}),
}


@pytest.mark.slow
def test_what_the_other_process_cannot_read_is_lost_alone(tmp_path: Path) -> None:
    """A value of a class of the script costs its own call: the seal that is waited for comes, and all other rows."""
    program = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import lineage
        from test_remote import KEYS, UNREADABLE, judge
        with lineage.record({str(tmp_path / "run")!r}, sidecar=True, on_step_sealed=judge("raise")) as recorder:
            for step, call in enumerate([*UNREADABLE.values(), lambda stage: None], start=1):
                recorder.step(step)
                with recorder.stage("rollout", producer="engine") as stage:
                    stage.produce({{"responses": [[11, 12]]}}, keys=KEYS[:1])
                    call(stage)
                    stage.produce({{"uid": ["u"]}}, keys=KEYS[:1])
                recorder.seal()
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    trace = tmp_path / "run" / "trace.parquet"
    rows = pq.read_table(trace, columns=["global_steps", "field"]).to_pylist()
    assert [(row["global_steps"], row["field"]) for row in rows] == [
        (step, field) for step in range(1, len(UNREADABLE) + 2) for field in ("responses", "uid")
    ]
    state = json.loads(pq.read_metadata(trace).metadata[META_STATE])
    assert state["dropped"]["steps"] == [*range(1, len(UNREADABLE) + 1)]
    assert state["dropped"]["why"][0].startswith("a call could not be read: ")
    assert state["closed"]


def masked(folder: Path, judged_by: Any, *, sidecar: bool, steps: int = 4) -> None:
    """A loop whose advantages lose their mask in step 3."""
    with lineage.record(folder, run_id="r", sidecar=sidecar, on_step_sealed=judged_by) as recorder:
        for step in range(1, steps + 1):
            recorder.step(step)
            with recorder.stage("rollout", producer="engine") as stage:
                rollout = {"responses": [[11, 12], [13]], "response_mask": [[1, 1], [1]]}
                stage.produce(rollout, keys=KEYS[:2])
            with recorder.stage("advantage", producer="trainer") as stage:
                mask = [[1, 0], [1]] if step == 3 else [[1, 1], [1]]
                stage.produce({"advantages": [[0.5, 0.0], [-0.5]]}, keys=KEYS[:2], mask=mask)
            recorder.seal()


@pytest.mark.parametrize("sidecar", [False, True])
def test_a_violation_stops_the_loop_at_its_step(tmp_path: Path, sidecar: bool) -> None:
    """In the process or beside it: the step's seal raises the check's headline, and the trace is closed in order."""
    folder = tmp_path / "run"
    with pytest.raises(ViolationError, match=r"^MSK002 .*: first broken at step 3, stage advantage\n") as raised:
        masked(folder, judge("raise"), sidecar=sidecar)
    report = lineage.check(folder / "trace.parquet", select=SOME)
    assert report.headline is not None
    assert raised.value.headline == "\n".join(headline_lines(report.headline, report.name))
    assert (raised.value.global_steps, report.steps, report.state) == (3, 3, "")
    assert b"ViolationError: MSK002" in pq.read_metadata(folder / "trace.parquet").metadata[META_STATE]


@pytest.mark.slow
@pytest.mark.parametrize("sidecar", [False, True])
def test_a_warning_lets_the_loop_run_to_its_end(
    tmp_path: Path, sidecar: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whichever process judges says it in one line, and all steps are recorded."""
    masked(tmp_path / "run", judge("warn"), sidecar=sidecar)
    said = capfd.readouterr().err if sidecar else caplog.text
    assert said.count("MSK002 consumers use the rollout's mask: broken at step 3, stage advantage") == 1
    assert lineage.check(tmp_path / "run" / "trace.parquet", select="KEY001").steps == 4


@pytest.mark.slow
@pytest.mark.parametrize("sidecar", [False, True])
def test_what_is_sealed_by_the_next_step_or_the_end_is_judged_too(tmp_path: Path, sidecar: bool) -> None:
    """A loop that never seals is stopped by the verb that seals for it; the trace is closed and whole."""
    for verb in ("step", "close"):
        recorder = open_recorder(tmp_path / verb, run_id="r", sidecar=sidecar, on_step_sealed=judge("raise"))
        recorder.step(1)
        with recorder.stage("rollout", producer="engine") as stage:
            stage.produce({"responses": [[11, 12]], "response_mask": [[1, 1]]}, keys=KEYS[:1])
            stage.produce({"rm_scores": [[0.5]]}, keys=KEYS[:1], span="response")
        with pytest.raises(ViolationError, match=r"^LEN001 "):
            recorder.step(2) if verb == "step" else recorder.close()
        recorder.close()
        report = lineage.check(tmp_path / verb / "trace.parquet", select="KEY001")
        assert (report.steps, report.state) == (1, "")


@pytest.mark.parametrize("sidecar", [False, True])
def test_a_step_whose_rows_were_lost_is_judged_by_nobody(tmp_path: Path, sidecar: bool) -> None:
    """Its rows are not all there: training goes on, and the trace says that it is incomplete."""
    with lineage.record(tmp_path / "run", run_id="r", sidecar=sidecar, on_step_sealed=judge("raise")) as recorder:
        recorder.step(1)
        with recorder.stage("rollout", producer="engine") as stage:
            stage.produce({"responses": [[11, 12]], "response_mask": [[1, 1]]}, keys=KEYS[:1])
            stage.produce({"rm_scores": [[0.5]]}, keys=KEYS[:1], span="response")
            stage.produce(3, keys=KEYS[:1])
        recorder.seal()
    assert "1 rows dropped in step 1" in lineage.check(tmp_path / "run" / "trace.parquet", select="KEY001").state


def test_a_torn_step_is_not_judged(tmp_path: Path) -> None:
    """An error inside a step is what the run ends with, not what its half of a step looks like."""
    recorder = open_recorder(tmp_path / "run", run_id="r", on_step_sealed=judge("raise"))
    recorder.step(1)
    with recorder.stage("rollout", producer="engine") as stage:
        stage.produce({"responses": [[11, 12]], "response_mask": [[1, 1]]}, keys=KEYS[:1])
        stage.produce({"rm_scores": [[0.5]]}, keys=KEYS[:1], span="response")
    recorder.close(RuntimeError("a bug"))
    assert lineage.check(tmp_path / "run" / "trace.parquet", select="KEY001").state.startswith("step 1 torn")


def test_a_judge_that_is_gone_stops_the_run(tmp_path: Path) -> None:
    """When the process that judges dies, no step passes unchecked."""
    recorder = open_recorder(tmp_path / "run", sidecar=True, on_step_sealed=judge("raise"))
    assert isinstance(recorder, RemoteRecorder)
    recorder.step(1)
    recorder._pipe._process.kill()
    with pytest.raises(CheckError, match="the recorder's process is gone: step 1 could not be checked"):
        recorder.seal()
    recorder.close()


def test_a_callback_that_cannot_travel_is_one_clear_error(tmp_path: Path) -> None:
    """A function of the program itself cannot be called in another process, and the error says what to do."""
    with pytest.raises(RecorderError, match="sidecar=False"):
        open_recorder(tmp_path / "run", sidecar=True, on_step_sealed=lambda batch, step: None)


def test_a_callback_with_a_bug_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Any error but a verdict is logged once, and the callback is left alone from then on."""
    calls = []

    def buggy(batch: Any, step: int) -> None:
        calls.append(step)
        raise KeyError("mine")

    masked(tmp_path / "run", buggy, sidecar=False)
    assert calls == [1]
    assert "on_step_sealed failed at step 1" in caplog.text


def test_death_of_the_recorders_process_lets_training_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Killed in step 2, the recorder's process leaves step 1 readable; the training process ends in order."""
    with lineage.record(tmp_path / "run", sidecar=True) as recorder:
        assert isinstance(recorder, RemoteRecorder)
        for step in (1, 2, 3):
            recorder.step(step)
            with recorder.stage("rollout") as stage:
                stage.produce({"responses": [[step]]}, keys=KEYS[:1])
            if step == 2:
                _wait_for(tmp_path / "run", steps=1)
                recorder._pipe._process.kill()
                recorder._pipe._process.wait()
            recorder.seal()
    assert "the recorder's process is gone" in caplog.text
    table = pq.read_table(materialise(tmp_path / "run"))
    assert table["global_steps"].to_pylist() == [1]


@pytest.mark.slow
def test_kill_of_the_training_process_leaves_whole_steps(tmp_path: Path) -> None:
    """After kill -9 in step 3 the parts hold steps 1 and 2, and the state names 3 as torn."""
    program = textwrap.dedent(
        f"""
        import os, signal, lineage
        from lineage import hooks
        recorder = hooks.open_recorder({str(tmp_path / "run")!r}, sidecar=True)
        for step in (1, 2, 3):
            recorder.step(step)
            with recorder.stage("rollout") as stage:
                stage.produce({{"responses": [[step]]}}, keys={KEYS[:1]!r})
            if step == 3:
                import time; time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)
            recorder.seal()
        """
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    _wait_for(tmp_path / "run", steps=2)
    _wait_for_end(tmp_path / "run")
    parquet = materialise(tmp_path / "run")
    assert pq.read_table(parquet)["global_steps"].to_pylist() == [1, 2]
    assert b'"torn": [3]' in pq.read_metadata(parquet).metadata[META_STATE]


def _wait_for_end(folder: Path) -> None:
    """Wait until the recorder's process has seen that its input ended."""
    deadline = time.monotonic() + 30
    while run_state(folder / PARTS)["live"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _wait_for(folder: Path, steps: int) -> None:
    """Wait until the recorder's process has written so many steps."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        table = pq.read_table(materialise(folder), columns=["global_steps"])
        if len(set(table["global_steps"].to_pylist())) >= steps:
            return
        time.sleep(0.1)
    pytest.fail(f"{steps} steps were not written in 30 s")
