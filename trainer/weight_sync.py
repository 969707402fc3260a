"""The life of the weights between actor and rollout (verl ``CheckpointEngineManager``, backend ``naive``).

One round of a synchronous step: the rollout sleeps once the batch is sampled; after the update the actor's tensors are
copied into the rollout's own module under a version, the prefix cache begins anew, and the rollout wakes. What each
side does stands in a function of its own, because the two may be processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lineage import hooks
from lineage.hooks import Weights, traced
from lineage.trainer.actor import ActorRolloutRefWorker
from lineage.trainer.log_prob import score_tokens
from lineage.trainer.models import vocab_size
from lineage.trainer.protocol import nested_from_list
from lineage.trainer.rollout.base import RolloutEngine

RECEIVER = "RolloutEngine"
#: tokens of the prompt that actor and engine both score after a sync; drawn once from the vocabulary
PROBE_TOKENS, _PROBE_SEED = 64, 20260
SLEEP, UPDATE = "CheckpointEngineManager.sleep_replicas", "CheckpointEngineManager.update_weights"


@dataclass(frozen=True)
class Sent:
    """What goes from the actor to each replica.

    Attributes:
        tensors: the actor's, by name.
        probe: token ids of a prompt and the actor's log-probs of all but its first; empty where nothing is recorded.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    probe: tuple[list[int], Tensor] | None = None


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


def send(worker: ActorRolloutRefWorker, global_steps: int, *, recording: bool) -> Sent:
    """The actor's side of a sync: what goes as version ``global_steps``.

    Every rank takes part in making each tensor whole; the first one keeps them, on the host where ranks are processes.

    Args:
        recording: fingerprint every tensor, and score the probe's prompt.
    """
    probe = _scored_probe(worker, recording)
    if not worker.ranks.first:
        for _ in worker.state_dict():
            pass
        return Sent()
    apart = worker.ranks.group is not None
    sent = {name: tensor.cpu() if apart else tensor for name, tensor in worker.state_dict()}
    at = replace(worker.weights, version=global_steps)
    if recording:
        hooks.current().params("sync", sent, weights=at)
    else:
        hooks.current().event("sync", "parameters", entity="param", weights=at)
    return Sent(sent, probe)


@torch.no_grad()
def _scored_probe(worker: ActorRolloutRefWorker, recording: bool) -> tuple[list[int], Tensor] | None:
    """The probe's prompt as the actor scores it, by a forward pass of all ranks; None where nobody would record it."""
    module: Any = worker.actor.module
    # in training mode a forward pass would draw numbers, and another mode for it would change what is drawn later
    if not worker.ranks.agreed(recording and hooks.recorder().tracing and not module.training):
        return None
    longest = int(module.config.max_position_embeddings) - 1  # the engine answers with a token
    drawn = torch.randint(
        vocab_size(module), (min(PROBE_TOKENS, longest),), generator=torch.Generator().manual_seed(_PROBE_SEED)
    )
    ids = drawn.unsqueeze(0).to(worker.actor.device)
    scores = score_tokens(
        module,
        ids,
        torch.ones_like(ids),
        torch.arange(ids.shape[1], device=ids.device).unsqueeze(0),
        temperature=1.0,
        with_entropy=False,
        sequence=worker.ranks.sequence,
    )
    return drawn.tolist(), scores.log_probs[0, :-1].cpu()


def receive(replica: RolloutEngine, sent: Sent, global_steps: int, *, recording: bool) -> None:
    """The rollout's side of a sync: take the tensors, forget what was computed with older ones, and wake.

    Tensors that are all there may still be computed with otherwise, so the probe's prompt is scored here once more.
    """
    stage = hooks.current()
    replica.update_weights(sent.tensors.items(), global_steps)
    if recording:
        stage.params("sync", replica.resident(), weights=_engine(replica))
    else:
        stage.event("sync", "parameters", entity="param", weights=_engine(replica))
    if recording and sent.probe is not None:
        ids, log_probs = sent.probe
        sides = nested_from_list([log_probs]), nested_from_list([replica.score(ids)])
        at = _engine(replica)
        stage.compare("probe_log_probs", sides[0], "probe", sides[1], keys=["probe"], entity="param", weights=at)
    replica.reset_cache()
    stage.event("cache_reset", "rollout", weights=_engine(replica))
    replica.wake_up()
    stage.event("wake", "rollout", weights=_engine(replica))


def _engine(replica: RolloutEngine) -> Weights | None:
    """The engine's weights as it reports them; before the first sync there are none to speak of."""
    if replica.version is None:
        return None
    return Weights(replica.version, "engine", cache_epoch=replica.cache_epoch)
