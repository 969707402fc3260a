"""The log-prob stages: the proximal anchor of the update, and the reference the KL is measured against."""

from __future__ import annotations

from torch import Tensor

from lineage import hooks
from lineage.hooks import traced
from lineage.trainer.actor import fetch
from lineage.trainer.loss import MiniBatch, aggregate
from lineage.trainer.metrics import compute_rollout_metrics
from lineage.trainer.parts import Parts
from lineage.trainer.protocol import KVBatchMeta, nested_to_padded
from lineage.trainer.stages.fields import Metrics, put, response_part


@traced("old_log_prob", component="PPOTrainer._compute_old_log_prob", consumer="PPOTrainer._compute_advantage")
def compute_old_log_prob(parts: Parts, batch: KVBatchMeta) -> Metrics:
    """The actor scores the batch; its values cut to the response become ``old_log_probs`` and ``entropy``.

    In bypass mode nobody scores anything: the sampler's log-probs are the anchor, and there is no entropy.
    """
    if parts.config.algorithm.rollout_correction.bypass_mode:
        put(parts, batch, {"old_log_probs": fetch(parts.queue, batch, ["rollout_log_probs"])["rollout_log_probs"]})
        return {}
    parts.worker.compute_log_prob(batch)
    sampled = ["rollout_log_probs"] if parts.config.actor_rollout_ref.rollout.calculate_log_probs else []
    data = fetch(parts.queue, batch, ["log_probs", "entropy", "response_mask", *sampled])
    mask = data["response_mask"]
    old_log_probs = response_part(data["log_probs"], mask)
    entropy = response_part(data["entropy"], mask)
    put(parts, batch, {"old_log_probs": old_log_probs, "entropy": entropy})
    metrics = {"actor/entropy": mean_entropy(entropy, mask, parts.config.actor_rollout_ref.actor.loss_agg_mode)}
    if sampled:
        rollout = data["rollout_log_probs"]
        hooks.current().compare(
            "old_log_probs", old_log_probs, "rollout_log_probs", rollout, mask=mask, keys=batch.keys
        )
        metrics.update(compute_rollout_metrics(old_log_probs.values(), rollout.values(), mask.values()))
    return metrics


def mean_entropy(entropy: Tensor, mask: Tensor, mode: str) -> float:
    """Entropy of a batch reduced as its loss would be, nats; jagged ``(rows, response_len)`` both."""
    padded = nested_to_padded(mask)
    batch = MiniBatch.of(padded.sum(dim=-1).tolist())
    return float(aggregate(nested_to_padded(entropy).double(), padded, mode, batch).value)


@traced("ref_log_prob", component="PPOTrainer._compute_ref_log_prob", consumer="PPOTrainer._compute_advantage")
def compute_ref_log_prob(parts: Parts, batch: KVBatchMeta) -> None:
    """The reference scores the batch; cut to the response it becomes ``ref_log_prob``."""
    parts.worker.compute_ref_log_prob(batch)
    data = fetch(parts.queue, batch, ["log_probs", "response_mask", "old_log_probs"])
    mask = data["response_mask"]
    ref_log_prob = response_part(data["log_probs"], mask)
    put(parts, batch, {"ref_log_prob": ref_log_prob})
    hooks.current().compare(
        "ref_log_prob", ref_log_prob, "old_log_probs", data["old_log_probs"], mask=mask, keys=batch.keys
    )
