"""Faults of conservation: rows that are submitted, sampled or handed over and are lost, or come twice, on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.protocol import DataProto, KVBatchMeta

MATERIALIZE = "lineage.trainer.replay_buffer.ReplayBuffer._materialize_batch"
MINI_BATCHES = "lineage.trainer.training.TrainingWorker._mini_batches"


@fault("KEY005", "sample", reports=["nemo-reservation-leak"])
def undeclared_eviction() -> Seams:
    """A finished group counts when it is added to the buffer, and is evicted without a word before it is trained on."""

    async def materialize(original: Any, buffer: Any, uids: list[str], steps: int, partition: str) -> KVBatchMeta:
        gone = uids[-1]
        await buffer.queue.async_kv_clear([gone, *(output.key for output in buffer._outputs[gone])], partition)
        return await original(buffer, uids[:-1], steps, partition)

    return {MATERIALIZE: materialize}


@fault("KEY005", "sample", "+experiment=multi_output")
def second_output_forgotten() -> Seams:
    """The buffer keeps one row a session: where a session wrote two, the final one is not sampled."""

    async def materialize(original: Any, buffer: Any, uids: list[str], steps: int, partition: str) -> KVBatchMeta:
        for uid in uids:
            buffer._outputs[uid] = [output for output in buffer._outputs[uid] if output.number == 0]
        return await original(buffer, uids, steps, partition)

    return {MATERIALIZE: materialize}


@fault("KEY005", "prompt", reports=["slime-char-length-filter"])
def prompts_filtered_by_characters() -> Seams:
    """Prompts over the limit are left out when they are submitted, but their characters are counted, not their tokens:
    one that fits is drawn and never runs."""
    left: list[int] = []

    def next_batch(original: Any, *args: Any) -> DataProto:
        batch = original(*args)
        texts = [str(messages) for messages in batch.non_tensor_batch["raw_prompt"]]
        longest = texts.index(max(texts, key=len))
        left.append(len(batch) - 1)
        return batch[[place for place in range(len(batch)) if place != longest]]

    async def sample(original: Any, parts: Any, manager: Any, steps: int, partition: str, groups: int) -> KVBatchMeta:
        return await original(parts, manager, steps, partition, min(groups, left[-1]))

    return {"lineage.trainer.grpo.next_train_batch": next_batch, "lineage.trainer.grpo.sample_groups": sample}


@fault("KEY005", "update_actor", reports=["oi-packed-rows-dropped"])
def remainder_of_the_deal() -> Seams:
    """Rows that do not divide among the ranks and mini-batches are cut off when the batch is dealt."""

    def deal(original: Any, rows: int, ranks: int) -> list[list[int]]:
        return original(rows // 4 * 4, ranks)  # two ranks, mini-batches of 4 rows

    return {
        "lineage.trainer.batching.batch_sizes.BatchSizes.missing": lambda _, sizes, rows: 0,
        "lineage.trainer.actor.deal": deal,
    }


@fault("KEY006", "update_actor", reports=["nemo-batch-not-multiple"])
def last_mini_batch_dropped() -> Seams:
    """The loop over mini-batches ends one too early, as a loader does that drops the remainder."""

    def split(original: Any, *args: Any) -> list[list[list[int]]]:
        return list(original(*args))[:-1]

    return {MINI_BATCHES: split}


@fault("KEY006", "update_actor", reports=["trl-steps-per-generation-twice"])
def buffer_index_of_the_wrong_period() -> Seams:
    """The index into the buffered mini-batches runs modulo the wrong number: one is trained on twice, one never."""

    def split(original: Any, *args: Any) -> list[list[list[int]]]:
        minis = list(original(*args))
        return [minis[place % max(1, len(minis) - 1)] for place in range(len(minis))]

    return {MINI_BATCHES: split}


@fault("KEY006", "update_actor", "actor_rollout_ref.actor.shuffle=true", "actor_rollout_ref.actor.ppo_epochs=2")
def later_epochs_draw_with_replacement() -> Seams:
    """From the second epoch on the rows of a mini-batch are drawn with replacement."""

    def split(original: Any, worker: Any, rows: int, plan: Any, epoch: int) -> Iterator[list[list[int]]]:
        random = np.random.default_rng(1)
        for mini in original(worker, rows, plan, epoch):
            yield [random.choice(share, len(share)).tolist() for share in mini] if epoch else mini

    return {MINI_BATCHES: split}


@fault("KEY006", "update_actor", "actor_rollout_ref.actor.ppo_epochs=2")
def iterator_used_up() -> Seams:
    """The second epoch goes on with an iterator the first one has begun: its first mini-batch is missing, and the last
    comes again to fill it up."""

    def split(original: Any, worker: Any, rows: int, plan: Any, epoch: int) -> Iterator[list[list[int]]]:
        minis = list(original(worker, rows, plan, epoch))
        yield from minis if not epoch else [*minis[1:], minis[-1]]

    return {MINI_BATCHES: split}
