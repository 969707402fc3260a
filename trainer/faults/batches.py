"""Faults of batches, mini-batches and their dealing to ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from lineage.trainer.faults.registry import Seams, fault


@fault("BAT001", "update_actor", "actor_rollout_ref.actor.ppo_mini_batch_size=3")
def mini_batch_in_trajectories() -> Seams:
    """ppo_mini_batch_size is not multiplied by rollout.n: mini-batches of 3 trajectories are dealt to 2 ranks."""

    def split(original: Any, worker: Any, rows: int, plan: Any, epoch: int) -> list[list[list[int]]]:
        # the reference trainer refuses such a plan; others deal what there is
        whole = [range(rows)[start : start + plan.mini_batch_size] for start in range(0, rows, plan.mini_batch_size)]
        return [[share.tolist() for share in np.array_split(mini, worker.topology.reported_dp)] for mini in whole]

    return {
        "lineage.trainer.batching.batch_sizes.BatchSizes.mini_batch_rows": lambda _, sizes: sizes.ppo_mini_batch_size,
        "lineage.trainer.training.TrainingWorker._mini_batches": split,
    }
