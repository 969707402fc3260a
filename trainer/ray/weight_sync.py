"""The weights between processes: the first rank sends, the rollout takes (verl ``CheckpointEngineManager``)."""

from __future__ import annotations

from typing import Any

from lineage import hooks
from lineage.trainer.ray.errors import gather_results
from lineage.trainer.ray.worker_group import WorkerGroup


class RayCheckpointEngineManager:
    """Moves weights from the ranks to the rollout; the tensors do not pass through the driver.

    Args:
        group: the ranks; each has a share of the tensors.
        replica: handle of the rollout.
    """

    def __init__(self, group: WorkerGroup, replica: Any) -> None:
        self.group = group
        self.replica = replica

    def sleep_replicas(self) -> None:
        """Stop generation: no request is admitted until the next sync has ended."""
        gather_results({"rollout:0": self.replica.sleep.remote(hooks.scope())}, "sleep_replicas")

    def update_weights(self, global_steps: int) -> None:
        """Give the actor's weights to the rollout as version ``global_steps`` and wake it."""
        self.group.call("update_weights", hooks.scope(), self.replica, global_steps)
