"""The real TransferQueue's life: who starts it, who attaches, who may end it."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from typing import Any

import psutil
import pytest
import torch
from columns_of import batch, nested, rows_of
from tensordict import TensorDict

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


def worker(ray: Any) -> Any:
    """An actor of another process; its class is made here, so that it is pickled by value."""

    class Worker:
        """Holds the queue it is given."""

        def __init__(self, queue: Any) -> None:
            self.queue = queue

        async def attach(self) -> None:
            """By name, to the one of the cluster."""
            self.queue.attach()

        async def double(self, keys: list[str]) -> list[int]:
            """Read x by an asynchronous function, write y by a plain one, in the actor's own loop."""
            data = await self.queue.async_kv_batch_get(keys, "train", "x")
            y = TensorDict({"y": data["x"] * 2}, batch_size=[len(keys)])
            self.queue.kv_batch_put(keys, "train", y, [{"by": "worker"}] * len(keys))
            return self.queue.global_indexes(keys, "train")

        async def leave(self) -> None:
            """Close, as a worker at the end of a run."""
            self.queue.close()

    return ray.remote(num_cpus=0)(Worker)


def test_another_process_attaches_and_leaves(cluster: Any, real: Any) -> None:
    """Its writes are seen here with its tags and slots; its close ends nothing, and it may come back."""
    real.kv_batch_put(["a", "b"], "train", batch(x=nested([1.0], [2.0, 3.0])))
    other = worker(cluster).remote(real)
    cluster.get(other.attach.remote())
    assert cluster.get(other.double.remote(["a", "b"])) == real.global_indexes(["a", "b"], "train")
    cluster.get(other.leave.remote())
    assert rows_of(real.kv_batch_get(["a", "b"], "train"), "y") == [[2.0], [4.0, 6.0]]
    assert real.kv_list("train")["train"] == {"a": {"by": "worker"}, "b": {"by": "worker"}}
    assert cluster.get(other.double.remote(["b"])) == real.global_indexes(["b"], "train")  # without attach()
    cluster.kill(other)
    assert real.kv_batch_get("a", "train", "x").batch_size == torch.Size([1])


def test_a_copy_does_not_own_the_queue(real: Any) -> None:
    """What was pickled or made beside the owner cannot end it for the others."""
    copy = pickle.loads(pickle.dumps(real))
    copy.close()
    real.kv_put("a", "train", tag={"x": 1})
    assert asyncio.run(real.async_kv_list("train")) == {"train": {"a": {"x": 1}}}


def test_a_second_start_is_refused(real: Any) -> None:
    """TransferQueue would ignore the second configuration without a word."""
    from lineage.trainer.queue.transfer_queue import QueueStartError, TransferQueue

    with pytest.raises(QueueStartError, match="runs in this Ray cluster already"):
        TransferQueue().init()


def test_where_none_runs_the_error_says_so(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attaching to nothing, and a start that would wait for CPUs without an end."""
    from lineage.trainer.queue import transfer_queue

    monkeypatch.setattr(transfer_queue, "CONTROLLER", ("TransferQueueController", "elsewhere"))
    with pytest.raises(transfer_queue.QueueStartError, match="the first process starts it"):
        transfer_queue.TransferQueue().attach()
    conf = {"backend": {"SimpleStorage": {"num_data_storage_units": 100}}}
    with pytest.raises(transfer_queue.QueueStartError, match=r"needs 101 free CPUs .* of 8 are: raise ray\.init"):
        transfer_queue.TransferQueue().init(conf)


def end(ray: Any, actor: Any) -> None:
    """Kill an actor and wait until its process is gone: its threads answer for a while after Ray calls it dead."""
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    ray.kill(actor)
    while psutil.pid_exists(pid):
        time.sleep(0.05)


def test_an_actor_that_ended_is_one_error(cluster: Any, real: Any) -> None:
    """A storage unit, then the controller: the call that waits for one ends with its name; what is left closes."""
    from lineage.trainer.queue.transfer_queue import CONTROLLER, QueueLostError, QueueStartError

    try:
        keys = [f"k{row}" for row in range(300)]
        end(cluster, cluster.get_actor("TransferQueueStorageUnit#1"))
        with pytest.raises(QueueLostError, match="lost TransferQueueStorageUnit#1 "):
            real.kv_batch_put(keys, "train", TensorDict({"x": torch.ones(300, 2)}, batch_size=[300]))
        end(cluster, cluster.get_actor(*CONTROLLER))
        with pytest.raises(QueueLostError, match="lost TransferQueueController, TransferQueueStorageUnit#1 "):
            asyncio.run(real.async_kv_list())
    finally:
        real.close()
    with pytest.raises(QueueStartError, match="the first process starts it"):
        real.kv_list()
