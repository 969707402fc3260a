"""The prompt stage: what of a prompt enters the queue, and that nobody waits for its sessions."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from lineage.trainer.agent_loop import AgentLoopManager
from lineage.trainer.protocol import DataProto
from lineage.trainer.queue import LocalTransferQueue
from lineage.trainer.stages.prompts import register_prompts


def test_only_the_tag_of_a_prompt_enters_the_queue():
    """In sync mode the uid is a key with a tag and no field: the row goes to the agent loop with the call."""
    queue = LocalTransferQueue()
    columns = {"uid": ["u", "v"], "index": [3, 1], "data_source": ["made", "made"], "raw_prompt": [[{}], [{}]]}
    batch = DataProto.from_dict(columns, {"global_steps": 7, "partition_id": "train", "expected": 2})
    register_prompts(SimpleNamespace(queue=queue), batch)
    tag = {"is_prompt": True, "status": "pending", "global_steps": 7, "expected": 2}
    assert queue.kv_list() == {"train": {"u": tag, "v": tag}}
    with pytest.raises(Exception, match="field"):
        queue.kv_batch_get(keys=["u"], partition_id="train")


def test_sessions_are_started_and_not_waited_for():
    """generate_sequences deals the prompts over the workers and returns before any of them has begun."""
    begun: list[list[str]] = []

    class Worker:
        async def run(self, batch):
            begun.append(batch.non_tensor_batch["uid"].tolist())

    async def submit():
        manager = AgentLoopManager([Worker(), Worker()])
        manager.generate_sequences(DataProto.from_dict({"uid": ["u", "v", "w"]}))
        assert (begun, manager.running) == ([], True)
        await manager.join()
        assert not manager.running

    asyncio.run(submit())
    assert sorted(begun) == [["u", "v"], ["w"]]
