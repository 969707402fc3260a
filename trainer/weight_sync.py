"""The life of the weights between actor and rollout (verl ``CheckpointEngineManager``, backend ``naive``).

One round of a synchronous step: the rollout sleeps once the batch is sampled; after the update the actor's tensors are
copied into the rollout's own module under a version, the prefix cache begins anew, and the rollout wakes. What each
side does stands in a function of its own, because the two may be processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from lineage import hooks
from lineage.hooks import Weights, traced
from lineage.trainer.actor import ActorRolloutRefWorker
from lineage.trainer.rollout.base import RolloutEngine

RECEIVER = "RolloutEngine"
SLEEP, UPDATE = "CheckpointEngineManager.sleep_replicas", "CheckpointEngineManager.update_weights"


class CheckpointEngineManager:
    """Moves weights from the actor to every rollout replica.

    Args:
        worker: has the actor's tensors.
        replicas: rollout engines.
        record_weights: fingerprint every tensor on both sides (``trace.weights``).
    """

    def __init__(
        self, worker: ActorRolloutRefWorker, replicas: Sequence[RolloutEngine], *, record_weights: bool = True
    ) -> None:
        self.worker = worker
        self.replicas = list(replicas)
        self.record_weights = record_weights

    @traced("weight_sync", component=SLEEP, consumer=RECEIVER)
    def sleep_replicas(self) -> None:
        """Stop generation: no request is admitted until the next sync has ended."""
        for replica in self.replicas:
            sleep(replica)

    @traced("weight_sync", component=UPDATE, consumer=RECEIVER)
    def update_weights(self, global_steps: int) -> None:
        """Give the actor's weights to every replica as version ``global_steps`` and wake it."""
        recording = hooks.recorder().enabled and self.record_weights
        sent = send(self.worker, global_steps, recording=recording)
        for replica in self.replicas:
            receive(replica, sent, global_steps, recording=recording)


def sleep(replica: RolloutEngine) -> None:
    """The rollout's side of :meth:`CheckpointEngineManager.sleep_replicas`."""
    replica.sleep()
    hooks.current().event("sleep", "rollout", weights=_engine(replica))


def send(worker: ActorRolloutRefWorker, global_steps: int, *, recording: bool) -> dict[str, Tensor]:
    """The actor's side of a sync: the tensors that go as version ``global_steps``.

    Every rank takes part in making each tensor whole; the first one keeps them, on the host where ranks are processes.

    Args:
        recording: fingerprint every tensor.
    """
    if not worker.ranks.first:
        for _ in worker.state_dict():
            pass
        return {}
    apart = worker.ranks.group is not None
    sent = {name: tensor.cpu() if apart else tensor for name, tensor in worker.state_dict()}
    at = replace(worker.weights, version=global_steps)
    if recording:
        hooks.current().params("sync", sent, weights=at)
    else:
        hooks.current().event("sync", "parameters", entity="param", weights=at)
    return sent


def receive(replica: RolloutEngine, sent: dict[str, Tensor], global_steps: int, *, recording: bool) -> None:
    """The rollout's side of a sync: take the tensors, forget what was computed with older ones, and wake."""
    stage = hooks.current()
    replica.update_weights(sent.items(), global_steps)
    if recording:
        stage.params("sync", replica.resident(), weights=_engine(replica))
    else:
        stage.event("sync", "parameters", entity="param", weights=_engine(replica))
    replica.reset_cache()
    stage.event("cache_reset", "rollout", weights=_engine(replica))
    replica.wake_up()
    stage.event("wake", "rollout", weights=_engine(replica))


def _engine(replica: RolloutEngine) -> Weights | None:
    """The engine's weights as it reports them; before the first sync there are none to speak of."""
    if replica.version is None:
        return None
    return Weights(replica.version, "engine", cache_epoch=replica.cache_epoch)
