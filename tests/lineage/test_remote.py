"""The recorder in a process of its own gives the same trace, and outlives the process it records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import lineage
from lineage.attach.transfer_queue import TracedQueue
from lineage.compact import materialise
from lineage.errors import RecorderError, UsageError
from lineage.hooks import LossTerm, Topology, Weights, traced
from lineage.remote import RemoteRecorder
from lineage.run import RunInfo
from lineage.schema import META_STATE

KEYS = [f"u_{i}_0" for i in range(6)]


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
    parquet = materialise(tmp_path / "run")
    assert pq.read_table(parquet)["global_steps"].to_pylist() == [1, 2]
    assert b'"torn": [3]' in pq.read_metadata(parquet).metadata[META_STATE]


def _wait_for(folder: Path, steps: int) -> None:
    """Wait until the recorder's process has written so many steps."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        table = pq.read_table(materialise(folder), columns=["global_steps"])
        if len(set(table["global_steps"].to_pylist())) >= steps:
            return
        time.sleep(0.1)
    pytest.fail(f"{steps} steps were not written in 30 s")
