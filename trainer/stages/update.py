"""The update stage: the batch goes to the actor with the plan of its update in ``extra_info``."""

from __future__ import annotations

from collections.abc import Sequence

from lineage.trainer.batching.batch_sizes import BatchSizes
from lineage.trainer.parts import Parts
from lineage.trainer.protocol import KVBatchMeta
from lineage.trainer.stages.fields import Metrics


def update_actor(parts: Parts, batch: KVBatchMeta, global_steps: int, before: Sequence[KVBatchMeta] = ()) -> Metrics:
    """Hand the batch to the actor (verl ``_update_actor``).

    Args:
        before: batches of this training step the actor has been updated on already.
    """
    actor = parts.config.actor_rollout_ref.actor
    sizes = BatchSizes.of(parts.config, parts.worker.get_data_parallel_size())
    seed = parts.config.trainer.seed if actor.data_loader_seed is None else actor.data_loader_seed
    batch.extra_info.update(
        global_steps=global_steps,
        sub_step=len(before),
        first_update=sum(sizes.updates(len(done)) for done in before),
        global_batch_size=sizes.mini_batch_rows,
        mini_batch_size=sizes.mini_batch_rows,
        trajectories=batch.real,
        rows=len(batch),
        mini_batches=sizes.mini_batches(len(batch)),
        updates=sizes.updates(len(batch)),
        epochs=actor.ppo_epochs,
        seed=seed,
        shuffle=actor.shuffle,
        shuffle_seed=shuffle_seed(seed, global_steps, len(before)) if actor.shuffle else None,
        temperature=parts.config.actor_rollout_ref.rollout.temperature,
    )
    return parts.worker.update_actor(batch)


def shuffle_seed(seed: int, global_steps: int, sub_step: int) -> int:
    """Seed of the order of one update: verl begins every update with the same order, here each has its own."""
    return seed * 100_003 + global_steps + sub_step * 50_021
