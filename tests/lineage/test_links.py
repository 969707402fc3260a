"""Reads of the queue name who wrote what they read, in one process and over several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from tensordict import TensorDict

from lineage import hooks
from lineage.hooks import traced
from lineage.recorder import Recorder
from lineage.run import RunInfo
from lineage.trainer.queue import LocalTransferQueue

KEYS = ["u_0_0", "u_1_0", "u_2_0"]


def fields(rows: int, value: float = 1.0) -> TensorDict:
    """A field of so many rows."""
    return TensorDict({"rm_scores": torch.full((rows, 2), value)}, batch_size=[rows])


class Process:
    """A process of the run, with its own eyes on the queue that all of them share."""

    def __init__(self, folder: Path, name: str, store: LocalTransferQueue) -> None:
        self.recorder = Recorder(folder, RunInfo("linked", "lineage", {}, {}), process=name)
        self.queue = hooks.trace_queue(store)

    def step(self, global_steps: int) -> None:
        """Begin a step."""
        self.recorder.step(global_steps)

    def put(self, component: str, keys: list[str], value: float = 1.0) -> None:
        """Write, as a component."""
        hooks.install(self.recorder)
        with traced("reward", component=component):
            self.queue.kv_batch_put(keys=keys, partition_id="train", fields=fields(len(keys), value))

    def get(self, keys: list[str]) -> None:
        """Read."""
        hooks.install(self.recorder)
        with traced("advantage", component="PPOTrainer._compute_advantage"):
            self.queue.kv_batch_get(keys=keys, partition_id="train", select_fields=["rm_scores"])


def reads(folder: Path) -> list[dict[str, Any]]:
    """The rows that read."""
    rows = pq.read_table(folder / "trace.parquet").to_pylist()
    return [row for row in rows if row["op"] == "consume"]


def run(folder: Path, *names: str) -> dict[str, Process]:
    """Processes in their first step."""
    store = LocalTransferQueue()
    processes = {name: Process(folder, name, store) for name in names}
    for process in processes.values():
        process.step(1)
    return processes


def close(processes: dict[str, Process]) -> None:
    """The step and the run end."""
    for process in processes.values():
        process.recorder.seal()
    for process in processes.values():
        process.recorder.close()
    hooks.install(hooks.NullRecorder())


def test_a_read_names_the_process_that_wrote(tmp_path: Path) -> None:
    """The component and the event, whichever process they are of; the last one to write a key counts."""
    processes = run(tmp_path, "agent_loop:0", "actor:0", "driver")
    processes["agent_loop:0"].put("AgentLoopWorker.run", KEYS)
    processes["driver"].get(KEYS)
    processes["actor:0"].put("ActorRolloutRefWorker.rescore", KEYS, 2.0)
    processes["driver"].get(KEYS)
    close(processes)
    first, second = reads(tmp_path)
    assert (first["producer"], first["parent"]["process"]) == ("AgentLoopWorker.run", "agent_loop:0")
    assert (second["producer"], second["parent"]["process"]) == ("ActorRolloutRefWorker.rescore", "actor:0")


def test_most_of_the_keys_decide(tmp_path: Path) -> None:
    """A padding row that another component adds does not take the batch away from its writer."""
    processes = run(tmp_path, "agent_loop:0", "balancer", "driver")
    processes["agent_loop:0"].put("AgentLoopWorker.run", KEYS[:2])
    processes["balancer"].put("PPOTrainer._balance_batch", KEYS[2:])
    processes["driver"].get(KEYS)
    close(processes)
    (read,) = reads(tmp_path)
    assert read["producer"] == "AgentLoopWorker.run"


def test_what_a_process_wrote_itself_is_its_own(tmp_path: Path) -> None:
    """And what nobody has written in the step has no writer."""
    processes = run(tmp_path, "driver", "actor:0")
    processes["driver"].put("PPOTrainer.own", KEYS)
    processes["driver"].get(KEYS)
    close(processes)
    (read,) = reads(tmp_path)
    assert (read["producer"], read["parent"]["process"]) == ("PPOTrainer.own", "driver")
    other = run(tmp_path / "other", "driver", "actor:0")
    other["driver"].queue.kv_batch_put(keys=KEYS, partition_id="train", fields=fields(3))  # in no stage: not recorded
    other["driver"].get(KEYS)
    close(other)
    (read,) = reads(tmp_path / "other")
    assert (read["producer"], read["parent"]) == (None, None)
