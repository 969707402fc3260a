"""Faults of the queue's life."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

from tensordict import TensorDict

from lineage import hooks
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import TRAINER
from lineage.trainer.protocol import KVBatchMeta


@fault("QUE001", "rollout")
def late_writer() -> Seams:
    """A session that was retried ends after the step was cleared, and writes its group once more."""
    late: list[tuple[contextvars.Context, Callable[[], Any]]] = []

    async def write(original: Any, *args: Any) -> None:
        await original(*args)
        if not late:
            late.append((contextvars.copy_context(), lambda: original(*args)))

    async def step(original: Any, trainer: Any) -> dict[str, float]:
        metrics = await original(trainer)
        for context, again in late:
            await asyncio.create_task(again(), context=context)
        return metrics

    return {
        "lineage.trainer.agent_loop.worker.AgentLoopWorker._agent_loop_postprocess": write,
        f"{TRAINER}.step": step,
    }


@fault("QUE002", "clear")
def padding_is_never_cleared() -> Seams:
    """The step clears the keys it sampled; the padding rows added since stay in the queue."""

    def clear(original: Any, trainer: Any, batch: KVBatchMeta) -> None:
        tagged = zip(batch.keys, batch.tags, strict=True)
        original(trainer, batch.select_keys([key for key, tag in tagged if not tag["is_padding"]]))

    return {f"{TRAINER}._clear": clear}


@fault("QUE003", "update_actor")
def rows_in_slot_order() -> Seams:
    """The queue answers in the order of its slots, not of the keys asked: rows come back under other keys."""

    def get(original: Any, queue: Any, keys: list[str], partition_id: str, *rest: Any) -> TensorDict:
        if hooks.current().name == "update_actor":
            slots = dict(zip(keys, queue.global_indexes(keys, partition_id), strict=True))
            keys = sorted(keys, key=lambda key: slots[key])
        return original(queue, keys, partition_id, *rest)

    return {"lineage.trainer.queue.local.LocalTransferQueue.kv_batch_get": get}
