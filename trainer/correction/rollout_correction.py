"""Rollout correction: the policy that sampled is not quite the policy that is trained.

Two answers, each optional: importance weights ``pi_train / pi_rollout`` on the loss, cut from above, and rejection,
which takes tokens or whole responses out of the mask where an estimate of the divergence leaves its bounds. Both are
constants to the gradient. Sources: verl ``rollout_corr_helper``; truncated importance sampling
(https://fengyao.notion.site/off-policy-rl). What verl reports beside them is in ``off_policy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lineage.hooks import UserError
from lineage.trainer.correction.off_policy import off_policy_metrics, rejection_metrics, weight_metrics
from lineage.trainer.correction.rejection_rules import RejectionRule, rejection_rules

# a ratio outside exp(-20) .. exp(20) is as good as that
BOUND = 20.0


class CorrectionError(UserError):
    """An unknown level of importance weights."""


@dataclass(frozen=True)
class Correction:
    """Result for one batch.

    Attributes:
        response_mask: ``(rows, response_len)``, the mask less what was rejected, in the dtype of the mask.
        rollout_is_weights: ``(rows, response_len)``, 0 outside the mask as it came; None when none were asked for.
        metrics: ``rollout_corr/*``.
    """

    response_mask: Tensor
    rollout_is_weights: Tensor | None
    metrics: dict[str, float]


@torch.no_grad()
def compute_rollout_correction(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor, config: Any) -> Correction:
    """Weights, mask and metrics of a batch by ``algorithm.rollout_correction``.

    Args:
        log_prob: ``(rows, response_len)`` of the trained policy: the old one, or the current one in bypass mode.
        rollout_log_prob: same shape, of the policy that sampled.
        mask: same shape, 1 on policy tokens; rows without any (padding) are in no metric.
        config: ``algorithm.rollout_correction``.
    """
    log_ratio = torch.where(mask.bool(), log_prob - rollout_log_prob, torch.zeros_like(log_prob))
    metrics = off_policy_metrics(log_prob, rollout_log_prob, mask)
    weights = None
    if config.rollout_is is not None:
        raw = importance_weights(log_ratio, mask, config.rollout_is)
        cut = raw.clamp(max=config.rollout_is_threshold)
        metrics.update(weight_metrics(cut, raw, mask, config.rollout_is, config.rollout_is_threshold))
        weights = cut
        if config.rollout_is_batch_normalize:
            mean = _mean_weight(cut, mask, config.rollout_is)
            weights = cut / mean
            metrics["rollout_is_batch_norm_factor"] = mean
    kept = mask
    rules = rejection_rules(config.rollout_rs, config.rollout_rs_threshold)
    if rules:
        kept, rejected = reject(log_ratio, mask, rules)
        metrics.update(rejected)
    return Correction(kept, weights, {f"rollout_corr/{name}": value for name, value in metrics.items()})


def importance_weights(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """``pi_train / pi_rollout`` of each token, or of the whole response at each of its tokens; 0 outside the mask.

    Args:
        log_ratio: ``(rows, response_len)``, 0 outside the mask.
        level: ``token``, or ``sequence``: the product over the tokens, unbiased and of greater variance.

    Raises:
        CorrectionError: another level.
    """
    if level not in ("token", "sequence"):
        raise CorrectionError(f"algorithm.rollout_correction.rollout_is={level!r} is unknown: choose token or sequence")
    exponent = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio) if level == "sequence" else log_ratio
    return exponent.clamp(-BOUND, BOUND).exp() * mask


def _mean_weight(weights: Tensor, mask: Tensor, level: str) -> float:
    """Mean over tokens, or over responses; 1 when there is nothing to divide by."""
    kept = mask.bool()
    values = weights.amax(dim=-1)[kept.any(dim=-1)] if level == "sequence" else weights[kept]
    mean = float(values.double().mean()) if values.numel() else 1.0
    return mean if mean > 1e-8 else 1.0


def reject(log_ratio: Tensor, mask: Tensor, rules: Sequence[RejectionRule]) -> tuple[Tensor, dict[str, float]]:
    """The mask less what breaks a rule, and the metrics of each.

    Args:
        log_ratio: ``(rows, response_len)``, 0 outside the mask.
        rules: all must be kept to. A rule of level ``token`` takes out tokens, every other one whole responses.
    """
    kept, metrics = mask.bool(), dict[str, float]()
    for rule in rules:
        values = estimate(log_ratio, mask, rule)
        inside = (values >= rule.lower) & (values <= rule.upper)
        metrics.update(rejection_metrics(rule, values, inside, mask))
        kept = kept & inside
    gone = mask.bool() & ~kept
    metrics["rollout_rs_masked_fraction"] = float(gone.sum() / mask.bool().sum().clamp(min=1))
    rows = mask.bool().any(dim=-1)
    metrics["rollout_rs_seq_masked_fraction"] = float(gone.any(dim=-1).sum() / rows.sum().clamp(min=1))
    return (mask * kept).to(mask.dtype), metrics


def rejected_rows(before: Tensor, after: Tensor) -> list[str | None]:
    """What a trace says of each row whose mask lost a token: ``rejected``."""
    return ["rejected" if changed else None for changed in (before != after).any(dim=-1).tolist()]


def estimate(log_ratio: Tensor, mask: Tensor, rule: RejectionRule) -> Tensor:
    """A rule's estimate at every token ``(rows, response_len)``: its own, or its response's at each of its tokens."""
    ratio = log_ratio.clamp(-BOUND, BOUND)
    values = {"k1": -ratio, "k2": 0.5 * ratio.square(), "k3": ratio.exp() - 1.0 - ratio}[rule.estimator]
    if rule.level == "token":
        return values
    # 0 where the ratio is 1, so outside the mask; k2 and k3, the ones with a maximum, are never negative
    if rule.level == "seq_max":
        whole = values.amax(dim=-1, keepdim=True)
    else:
        whole = values.sum(dim=-1, keepdim=True)
        if rule.level == "seq_mean":
            whole = whole / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return whole.expand_as(values)
