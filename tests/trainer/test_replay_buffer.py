"""The replay buffer: terminal groups, oldest first, prompt keys cleared at sample."""

from __future__ import annotations

import asyncio

import pytest

from lineage.trainer.queue import LocalTransferQueue
from lineage.trainer.replay_buffer import ReplayBuffer, ReplayBufferError


def prompt(queue, uid, status, step=1, **tag):
    """A prompt key with a status."""
    tags = [{"is_prompt": True, "status": status, "global_steps": step, "expected": 2, **tag}]
    queue.kv_batch_put(keys=[uid], partition_id="train", tags=tags)


def outputs(queue, *keys):
    """Trajectory keys with tags and no fields."""
    queue.kv_batch_put(keys=list(keys), partition_id="train", tags=[{"status": "success"} for _ in keys])


def sample(queue, size, **options):
    """One batch."""
    return asyncio.run(ReplayBuffer(queue).sample(1, "train", size, **options))


def test_batch_is_by_group_session_and_index():
    """Outputs come group by group in the order of submission, whatever order they were written in."""
    queue = LocalTransferQueue()
    prompt(queue, "a", "finished")
    prompt(queue, "b", "finished")
    outputs(queue, "b_1_0", "a_10_0", "a_2_0", "b_0_1", "b_0_0")
    batch = sample(queue, 2)
    assert batch.keys == ["a_2_0", "a_10_0", "b_0_0", "b_0_1", "b_1_0"]
    assert batch.partition_id == "train"


def test_oldest_step_goes_first_and_the_rest_stays():
    """Groups of an earlier step are taken first; the others keep their prompt keys and outputs."""
    queue = LocalTransferQueue()
    prompt(queue, "new", "finished", step=2)
    prompt(queue, "old", "failure", step=1)
    outputs(queue, "new_0_0", "old_0_0")
    assert sample(queue, 1).keys == ["old_0_0"]
    assert set(queue.kv_list("train")["train"]) == {"new", "new_0_0", "old_0_0"}


def test_sample_waits_for_terminal_groups():
    """Pending and running groups are not taken; the call returns when they end."""
    queue = LocalTransferQueue()
    prompt(queue, "a", "running")
    outputs(queue, "a_0_0")

    async def finish_later():
        waiting = asyncio.create_task(ReplayBuffer(queue).sample(1, "train", 1))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        prompt(queue, "a", "finished")
        return await waiting

    assert asyncio.run(finish_later()).keys == ["a_0_0"]


def test_uid_may_hold_underscores():
    """A uid like data_7 keeps its outputs, and data does not get them."""
    queue = LocalTransferQueue()
    prompt(queue, "data", "finished")
    prompt(queue, "data_7", "finished")
    outputs(queue, "data_7_0_0", "data_0_0")
    assert sample(queue, 2).keys == ["data_0_0", "data_7_0_0"]


def test_a_failed_group_gives_what_it_has():
    """Survivors of a failed group are part of the batch, as in verl."""
    queue = LocalTransferQueue()
    prompt(queue, "a", "failure", reason="failed", error="ValueError: x")
    prompt(queue, "b", "failure", reason="failed", error="ValueError: x")
    outputs(queue, "a_1_0")
    assert sample(queue, 2).keys == ["a_1_0"]


def test_a_batch_that_failed_wholly_says_so():
    """No output at all is an error with the first reason."""
    queue = LocalTransferQueue()
    prompt(queue, "a", "failure", reason="failed", error="ValueError: bad tool")
    with pytest.raises(ReplayBufferError, match=r"all 1 prompt groups failed.*ValueError: bad tool"):
        sample(queue, 1)


def test_nothing_left_that_could_finish_is_an_error():
    """When no rollout runs and a group is still pending, waiting would never end."""
    queue = LocalTransferQueue()
    prompt(queue, "a", "pending")
    with pytest.raises(ReplayBufferError, match="no rollout is running"):
        sample(queue, 1, still_running=lambda: False)


def test_a_key_of_neither_kind_is_refused():
    """A row that is no prompt and whose key is not a trajectory's is named: it would be lost in silence."""
    queue = LocalTransferQueue()
    prompt(queue, "a", "finished")
    queue.kv_batch_put(keys=["a_007_0"], partition_id="train", tags=[{"is_prompt": False}])
    with pytest.raises(ReplayBufferError, match="queue key 'a_007_0' is no trajectory key"):
        sample(queue, 1)


def test_unknown_status_is_refused():
    """A status that is none of the four is named with the four."""
    queue = LocalTransferQueue()
    prompt(queue, "a", "done")
    with pytest.raises(ReplayBufferError, match="pending, running, finished, failure"):
        sample(queue, 1)
