"""State and parts tell the truth: what was lost is named, what is not ours is left alone, restarts add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lineage
from lineage.compact import compact, materialise
from lineage.errors import RecorderError, UserError
from lineage.parts import PARTS, parts_folder
from lineage.recorder import Recorder
from lineage.run import RunInfo
from lineage.schema import META_STATE
from lineage.state import StateFile, read_state
from lineage.steps import Steps

KEYS = ["u_0_0"]


def record(recorder: Any, *steps: int) -> None:
    """One small stage a step."""
    for step in steps:
        recorder.step(step)
        with recorder.stage("rollout") as stage:
            stage.produce({"responses": [[step]]}, keys=KEYS)
        recorder.seal()


def killed(folder: Path, *steps: int, **options: Any) -> None:
    """A process that records these steps and is killed in the next."""
    program = f"""
import os
from lineage.recorder import Recorder
from lineage.run import RunInfo
recorder = Recorder({str(folder)!r}, RunInfo("r"), **{options!r})
for step in {[*steps, steps[-1] + 1]!r}:
    recorder.step(step)
    with recorder.stage("rollout") as stage:
        stage.produce({{"responses": [[step]]}}, keys={KEYS!r})
    if step in {steps!r}:
        recorder.seal()
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9


def state_of(trace: Path) -> dict[str, Any]:
    """What a trace says of itself."""
    state: dict[str, Any] = json.loads(pq.read_metadata(trace).metadata[META_STATE])
    return state


@given(st.lists(st.integers(0, 60), unique=True).map(sorted))
def test_steps_keep_their_numbers_in_the_state(steps: list[int]) -> None:
    """Ranges with strides are the same steps, and few."""
    kept = Steps.of(steps)
    assert list(kept) == steps
    assert len(kept.ranges) <= len(steps)
    assert [step for step in range(61) if step in kept] == steps
    assert list(kept.without(Steps.of(steps[::2]))) == steps[1::2]


def test_state_stays_readable_however_long_it_gets(tmp_path: Path) -> None:
    """Past the size it began with the file still ends where its JSON ends."""
    state = StateFile(tmp_path, "driver")
    state.state["dropped"]["why"] = ["x" * 100] * 60
    state.write()
    state.state["dropped"]["why"] = ["y"]
    state.write()
    state.state["closed"] = True
    state.close()
    assert read_state(tmp_path / "driver.state.json")["dropped"]["why"] == ["y"]


def test_a_sealed_part_that_cannot_be_read_is_named_and_kept(tmp_path: Path) -> None:
    """A step that was sealed and is gone is torn in the trace, and its part is not removed."""
    recorder = Recorder(tmp_path / "run", RunInfo("r"))
    for step in (1, 2, 3):
        record(recorder, step)
        recorder._writer.seal()
    damaged = tmp_path / "run" / PARTS / "driver-00001.arrow"
    damaged.write_bytes(damaged.read_bytes()[:-200])
    trace = recorder.close()
    assert trace is not None
    state = state_of(trace)
    assert (state["steps"], state["torn"]) == ([1, 3], [2])
    assert damaged.exists()


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """Arrow files of the user's beside a trace are neither read nor removed."""
    mine = tmp_path / "mydata.arrow"
    feather.write_feather(pa.table({"a": [1]}), mine)
    with pytest.raises(UserError, match="no parts"):
        compact(tmp_path)
    with lineage.record(tmp_path) as recorder:
        record(recorder, 1)
    assert mine.exists()
    assert pq.read_table(tmp_path / "trace.parquet").num_rows == 1


def test_a_trace_is_never_written_over(tmp_path: Path) -> None:
    """A folder that holds a trace is refused in one line."""
    with lineage.record(tmp_path / "run") as recorder:
        record(recorder, 1)
    with pytest.raises(RecorderError, match="already holds a trace"):
        Recorder(tmp_path / "run", RunInfo("r"))


def test_a_restarted_process_carries_its_record_over(tmp_path: Path) -> None:
    """A worker that died in step 2 and came back at 3 leaves 2 torn."""
    killed(tmp_path / "run", 1, process="actor:0")
    second = Recorder(tmp_path / "run", RunInfo("r"), process="actor:0")
    record(second, 3)
    trace = second.close()
    assert trace is not None
    assert (state_of(trace)["steps"], state_of(trace)["torn"]) == ([1, 3], [2])


def test_the_last_process_to_close_compacts(tmp_path: Path) -> None:
    """The first closes without an error and leaves its parts; the last one makes the file of both."""
    recorders = [Recorder(tmp_path / "run", RunInfo("r"), process=f"actor:{rank}") for rank in (0, 1)]
    for step in (1, 2):
        for recorder in recorders:
            record(recorder, step)
    assert recorders[0].close() is None
    trace = recorders[1].close()
    assert trace is not None
    table = pq.read_table(trace, columns=["global_steps", "process"]).to_pylist()
    assert [row["global_steps"] for row in table] == [1, 1, 2, 2]
    assert {row["process"] for row in table} == {"actor:0", "actor:1"}
    assert parts_folder(tmp_path / "run") is None


def test_a_part_that_cannot_be_sealed_stays_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the rename fails the batches written so far are still there, and later steps go to another part."""
    recorder = Recorder(tmp_path / "run", RunInfo("r"))
    record(recorder, 1)

    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lineage.writer.os.replace", refuse)
        with pytest.raises(OSError, match="No space"):
            recorder._writer.seal()
    record(recorder, 2)
    assert pq.read_table(materialise(tmp_path / "run"))["global_steps"].to_pylist() == [1, 2]


def test_a_row_arrow_refuses_is_lost_alone(tmp_path: Path) -> None:
    """A value of the wrong type costs its row; the rest of the step is written and the loss is named."""
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("rollout") as stage:
            stage.produce({"responses": [[1]]}, keys=KEYS)
            stage.split(KEYS, mini_batch="zero")
    trace = tmp_path / "run" / "trace.parquet"
    assert pq.read_table(trace)["field"].to_pylist() == ["responses"]
    assert state_of(trace)["dropped"]["rows"] == 1


@pytest.mark.parametrize("options", [{"every": 0}, {"keep_steps": 0}])
def test_senseless_options_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    """every and keep_steps count from 1."""
    with pytest.raises(RecorderError, match=next(iter(options))):
        Recorder(tmp_path / "run", RunInfo("r"), **options)
