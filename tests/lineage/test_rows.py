"""Rows say what was asked, of which keys, and in which stage, also when calls merge into one row."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import lineage
from lineage import hooks
from lineage.attach.transfer_queue import TracedQueue
from lineage.hooks import Resident, traced

KEYS = [f"u_{i}_0" for i in range(6)]


class Batch(dict[str, Any]):
    """A batch with the size a TensorDict says."""

    @property
    def batch_size(self) -> list[int]:
        """Rows of the batch."""
        return [len(next(iter(self.values())))]


class Store:
    """A queue that knows some keys and answers without the others."""

    def __init__(self) -> None:
        self.keys: dict[str, dict[str, Any]] = {}

    def kv_batch_put(self, keys: Any, partition_id: str, fields: Any = None, tags: Any = None) -> None:
        """Take tags."""
        self.keys.update(zip(keys, tags or [{}] * len(keys), strict=True))

    def kv_batch_get(self, keys: Any, partition_id: str, select_fields: Any = None) -> Batch:
        """Rows of the keys there are."""
        return Batch({name: [[1] for key in keys if key in self.keys] for name in select_fields})

    def kv_list(self, partition_id: str) -> dict[str, dict[str, Any]]:
        """Keys and tags."""
        return {partition_id: self.keys}

    def kv_clear(self, keys: Any, partition_id: str) -> None:
        """Forget keys."""
        for key in keys:
            self.keys.pop(key, None)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of a trace."""
    return pq.read_table(folder / "trace.parquet").to_pylist()


def test_missing_keys_are_those_of_their_own_field(tmp_path: Path) -> None:
    """Each field says what was asked for it, also when gets of one stage merge, and in batches of one."""
    queue = TracedQueue(Store())
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with traced("rollout"):
            queue.kv_batch_put(KEYS, "train", None, [{"status": "success"}] * 6)
        with traced("advantage"):
            queue.kv_batch_get(KEYS, "train", ["v"])
            queue.kv_batch_get([*KEYS, "gone_0_0"], "train", ["w"])
            queue.kv_batch_get(["gone_1_0", KEYS[0]], "train", ["x"])
            queue.kv_batch_get([KEYS[1]], "train", ["x"])
    found = {r["field"]: (r["asked_n"], r["missing"], r["n"]) for r in rows(tmp_path / "run") if r["op"] == "consume"}
    assert found == {"v": (6, [], 6), "w": (7, ["gone_0_0"], 6), "x": (3, ["gone_1_0"], 2)}


def test_the_last_clear_says_what_is_left(tmp_path: Path) -> None:
    """Two clears of one stage are one row with the later count."""
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("clear") as stage:
            stage.clear(KEYS[:1], resident=Resident(0, 1, 8))
            stage.clear(KEYS[1:2], resident=Resident(0, 0, 0))
    (cleared,) = rows(tmp_path / "run")
    assert cleared["key"] == KEYS[:2]
    assert cleared["resident"] == {"prompts": 0, "trajectories": 0, "bytes": 0}


def test_keys_that_do_not_fit_their_rows_cost_that_batch_only(tmp_path: Path) -> None:
    """Six keys for five rows are dropped and counted; the next batch keeps its own keys."""
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("rollout") as stage:
            stage.produce({"responses": [[1]] * 5}, keys=KEYS)
            stage.produce({"rewards": [0.5] * 6}, keys=KEYS)
    (kept,) = rows(tmp_path / "run")
    assert (kept["field"], kept["key"]) == ("rewards", KEYS)


@pytest.mark.parametrize("mask", [[[1, 1, 1], [1, 1]], [[1]], [[1, 1], [1], [1]], torch.ones(2, 3), "ab"])
def test_a_mask_that_does_not_fit_its_field_is_lost_and_said(tmp_path: Path, mask: Any) -> None:
    """A mask off by one would otherwise be seen by nobody, and the trace would pass."""
    with lineage.record(tmp_path) as recorder:
        recorder.step(1)
        with recorder.stage("advantage") as stage:
            stage.produce({"uid": ["u", "u"]}, keys=KEYS[:2])
            stage.produce({"advantages": [[0.5, 0.5], [-0.5]]}, keys=KEYS[:2], mask=mask)
    report = lineage.check(tmp_path, select="ADV001")
    assert report.exit_code == 3
    assert "rows dropped in step 1" in report.state or "mask" in report.state


def test_nested_stages_of_other_context_are_other_rows(tmp_path: Path) -> None:
    """A stage entered once a mini-batch inside another keeps the producer and the mini-batch of each."""
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("update_actor"):
            for number in (0, 1):
                with recorder.stage("forward", producer=f"p{number}", mini_batch=number) as stage:
                    stage.forward({"log_probs": [[0.5]]}, keys=[KEYS[number]])
    found = [(r["producer"], r["mini_batch"], r["key"]) for r in rows(tmp_path / "run")]
    assert found == [("p0", 0, KEYS[:1]), ("p1", 1, KEYS[1:2])]


def test_a_padded_field_takes_its_lengths_from_its_keys(tmp_path: Path) -> None:
    """Without an attention mask a dense field is as long as its keys' responses were."""
    nested = torch.nested.nested_tensor([torch.arange(i + 1) for i in range(6)], layout=torch.jagged)
    padded = torch.nested.to_padded_tensor(nested.float(), 0.0)
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("rollout") as stage:
            stage.produce({"responses": nested}, keys=KEYS)
        with recorder.stage("old_log_prob") as stage:
            stage.produce({"old_log_probs": padded}, keys=KEYS)
    (dense,) = [r for r in rows(tmp_path / "run") if r["layout"] == "dense"]
    assert dense["valid_length"] == [1, 2, 3, 4, 5, 6]
    assert dense["length"] == [6] * 6


def test_uid_names_prompts_and_not_trajectories(tmp_path: Path) -> None:
    """A batch without keys gives its uid as keys only where its rows are prompts."""
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("prompt") as stage:
            stage.produce({"uid": ["a", "b"]}, entity="prompt")
            stage.produce({"uid": ["a", "a"]})
    assert [r["key"] for r in rows(tmp_path / "run")] == [["a", "b"], None]


def test_a_small_batch_brings_its_mask_to_the_stage(tmp_path: Path) -> None:
    """Few rows or many: what the stage computes after a get is seen under the mask it got."""
    mask = [[1, 0], [1, 1]]
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("advantage") as stage:
            stage.consume({"response_mask": mask}, keys=KEYS[:2])
            stage.forward({"advantages": torch.ones(2, 2)}, keys=KEYS[:2], lengths={"response": [2, 2]})
    (advantages,) = [r for r in rows(tmp_path / "run") if r["field"] == "advantages"]
    assert advantages["nnz_out"] == [1, 0]


def test_a_key_is_what_it_was_tagged_as(tmp_path: Path) -> None:
    """A malformed trajectory key is still a trajectory, a uid that reads like one is still a prompt."""
    queue = TracedQueue(Store())
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with traced("rollout"):
            queue.kv_batch_put(["abc-0-0"], "train", None, [{"status": "success"}])
            queue.kv_batch_put(["gsm8k_12_3"], "train", None, [{"is_prompt": True, "status": "pending"}])
        with traced("sample"):  # tagged first elsewhere
            queue.kv_batch_put(["gsm8k_13_4"], "train", None, [{"status": "running"}])
        with traced("clear"):
            queue.kv_clear(["abc-0-0", "gsm8k_12_3"], "train")
    found = {(r["op"], r["key"][0]): r["entity"] for r in rows(tmp_path / "run")}
    assert found == {
        ("tag", "abc-0-0"): "trajectory",
        ("tag", "gsm8k_12_3"): "prompt",
        ("tag", "gsm8k_13_4"): "prompt",
        ("clear", "abc-0-0"): "trajectory",
        ("clear", "gsm8k_12_3"): "prompt",
    }


def test_a_stage_goes_on_in_another_process(tmp_path: Path) -> None:
    """What a scope is made of opens the same stage in the recorder of whoever it is handed to."""
    with lineage.record(tmp_path / "driver") as recorder:
        recorder.step(1)
        with traced("rollout", component="AgentLoopWorker.run", consumer="ReplayBuffer.sample", partition="val"):
            handed = pickle.loads(pickle.dumps(hooks.scope()))
        assert hooks.scope() is None
    with lineage.record(tmp_path / "replica") as recorder:
        recorder.step(1)
        with hooks.inside(handed) as stage:
            stage.produce({"responses": [[1]]}, keys=KEYS[:1])
        with hooks.inside(None) as stage:
            stage.produce({"responses": [[1]]}, keys=KEYS[:1])  # no stage was open: nothing is recorded
    (row,) = rows(tmp_path / "replica")
    assert (row["stage"], row["producer"], row["consumer"]) == (
        "rollout",
        "AgentLoopWorker.run",
        "ReplayBuffer.sample",
    )
    assert row["partition"] == "val"
