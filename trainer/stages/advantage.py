"""The advantage stage: scores to group-relative advantages, in padded form, written back jagged.

On the way, each where it is asked for: the KL comes off the reward, and the rollout correction makes its weights and
takes what it rejects out of the mask.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lineage import hooks
from lineage.hooks import traced
from lineage.trainer.actor import fetch
from lineage.trainer.advantage import compute_advantage
from lineage.trainer.correction.rollout_correction import compute_rollout_correction, rejected_rows
from lineage.trainer.kl_control import apply_kl_penalty
from lineage.trainer.parts import Parts
from lineage.trainer.protocol import DataProto, KVBatchMeta, lengths_of
from lineage.trainer.stages.fields import Metrics, put


@traced("advantage", component="PPOTrainer._compute_advantage", consumer="ActorRolloutRefWorker.update_actor")
def compute_advantages(parts: Parts, batch: KVBatchMeta) -> Metrics:
    """Group-relative advantages of the batch (verl ``_compute_advantage``)."""
    config, metrics = parts.config, Metrics()
    names = ["uid", "response_mask", "rm_scores", "old_log_probs"]
    names += ["rollout_log_probs"] if config.actor_rollout_ref.rollout.calculate_log_probs else []
    names += ["ref_log_prob"] if parts.with_reference else []
    nested = fetch(parts.queue, batch, names)
    lengths = lengths_of(nested["response_mask"])
    stage, spans = hooks.current(), {"response": lengths.tolist()}
    data = DataProto.from_tensordict(nested)
    stage.pad(data, keys=batch.keys, lengths=spans)
    scores = data.batch["rm_scores"]
    made = {"token_level_scores": scores, "token_level_rewards": scores}
    attrs = None
    if config.algorithm.use_kl_in_reward:
        made["token_level_rewards"], attrs = _less_kl(parts, data, metrics)
    mask = _correct(config, data, batch.keys, spans, made, metrics)
    result = compute_advantage(
        made["token_level_rewards"],
        mask,
        batch.keys,
        uids=data.non_tensor_batch["uid"].tolist(),
        is_padding=[tag["is_padding"] for tag in batch.tags],
        norm_by_std=config.algorithm.norm_adv_by_std_in_grpo,
    )
    made |= {"advantages": result.advantages, "returns": result.returns}
    stage.forward(made, keys=batch.keys, mask=mask, lengths=spans, attrs=attrs)
    data.batch.update({**made, "response_mask": mask})
    fields = data.to_nested(_written(config, made), lengths)
    jagged_mask = data.to_nested(["response_mask"], lengths)["response_mask"]
    stage.unpad(fields, keys=batch.keys, mask=jagged_mask)
    put(parts, batch, dict(fields.items()))
    return metrics


def _less_kl(parts: Parts, data: DataProto, metrics: Metrics) -> tuple[Tensor, dict[str, str]]:
    """The rewards, and what the trace says of the coefficient."""
    penalised = apply_kl_penalty(
        data.batch["rm_scores"],
        data.batch["old_log_probs"],
        data.batch["ref_log_prob"],
        data.batch["response_mask"],
        controller=parts.kl_controller,
        kind=parts.config.algorithm.kl_penalty,
    )
    metrics.update(penalised.metrics)
    return penalised.token_level_rewards, penalised.attrs()


def _correct(
    config: Any,
    data: DataProto,
    keys: list[str],
    spans: dict[str, list[int]],
    made: dict[str, Tensor],
    metrics: Metrics,
) -> Tensor:
    """The mask after the rollout correction; its weights go to ``made``. In bypass mode the actor corrects."""
    mask = data.batch["response_mask"]
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode or "rollout_log_probs" not in data.batch.keys():  # noqa: SIM118 - rows otherwise
        return mask
    corrected = compute_rollout_correction(
        data.batch["old_log_probs"], data.batch["rollout_log_probs"], mask, correction
    )
    metrics.update(corrected.metrics)
    if corrected.rollout_is_weights is not None:
        made["rollout_is_weights"] = corrected.rollout_is_weights
    if correction.rollout_rs is None:
        return mask
    reasons = rejected_rows(mask, corrected.response_mask)
    rewritten = {"response_mask": corrected.response_mask}
    hooks.current().forward(rewritten, keys=keys, lengths=spans, columns={"reason": reasons})
    return corrected.response_mask


def _written(config: Any, made: dict[str, Tensor]) -> list[str]:
    """What goes back to the queue, as in verl: the mask only where something may have been rejected."""
    names = ["advantages", "returns"]
    names += ["token_level_rewards"] if config.algorithm.use_kl_in_reward else []
    correction = config.algorithm.rollout_correction
    names += ["response_mask"] if correction.rollout_rs and not correction.bypass_mode else []
    return [*names, *(["rollout_is_weights"] if "rollout_is_weights" in made else [])]
