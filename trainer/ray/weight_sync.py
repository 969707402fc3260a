"""The weights between processes: the first rank sends, every replica takes (verl ``CheckpointEngineManager``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lineage import hooks
from lineage.trainer.ray.errors import gather_results
from lineage.trainer.ray.worker_group import WorkerGroup


class RayCheckpointEngineManager:
    """Moves weights from the ranks to the rollout; the tensors do not pass through the driver.

    Args:
        group: the ranks; each has a share of the tensors.
        replicas: handles of the rollout's replicas, by number.
    """

    def __init__(self, group: WorkerGroup, replicas: Sequence[Any]) -> None:
        self.group = group
        self.replicas = {f"rollout:{number}": replica for number, replica in enumerate(replicas)}

    def sleep_replicas(self) -> None:
        """Stop generation: no request is admitted until the next sync has ended."""
        scope = hooks.scope()
        gather_results({name: each.sleep.remote(scope) for name, each in self.replicas.items()}, "sleep_replicas")

    def update_weights(self, global_steps: int) -> None:
        """Give the actor's weights to every replica as version ``global_steps`` and wake it."""
        self.group.call("update_weights", hooks.scope(), self.replicas, global_steps)
