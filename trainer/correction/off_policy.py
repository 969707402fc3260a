"""How far the policy that sampled is from the one that is trained: verl's ``rollout_corr/*`` metrics.

Source: verl ``rollout_corr_helper``. Every mean is over tokens under the mask or over the rows that have one, so
padding rows are in none (verl counts them as sequences). Matrices are ``(rows, response_len)``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lineage.trainer.correction.rejection_rules import RejectionRule


def off_policy_metrics(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> dict[str, float]:
    """Divergence, perplexity and chi squared of the trained policy against the sampler; empty without a token.

    Args:
        log_prob: of the trained policy.
        rollout_log_prob: of the sampler.
        mask: 1 on policy tokens.
    """
    keep = mask.bool()
    rows = keep.any(dim=-1)
    if not rows.any():
        return {}
    train, sampled = _masked(log_prob, keep)[rows], _masked(rollout_log_prob, keep)[rows]
    ratio = (train - sampled).clamp(-20.0, 20.0)
    counts = keep[rows].sum(dim=-1)
    tokens = keep[rows]
    train_mean, sampled_mean = train.sum(dim=-1) / counts, sampled.sum(dim=-1) / counts
    gap = sampled_mean - train_mean
    whole = (train - sampled).sum(dim=-1).clamp(-20.0, 20.0)
    return {
        "kl": float(-(train - sampled)[tokens].mean()),
        "k3_kl": float((ratio.exp() - 1.0 - ratio)[tokens].mean()),
        "training_ppl": float((-train_mean).exp().mean()),
        "training_log_ppl": float((-train_mean).mean()),
        "rollout_ppl": float((-sampled_mean).exp().mean()),
        "rollout_log_ppl": float((-sampled_mean).mean()),
        "log_ppl_diff": float(gap.mean()),
        "log_ppl_abs_diff": float(gap.abs().mean()),
        "log_ppl_diff_max": float(gap.max()),
        "log_ppl_diff_min": float(gap.min()),
        "ppl_ratio": float(gap.exp().mean()),
        "chi2_token": float((2.0 * ratio).exp()[tokens].mean() - 1.0),
        "chi2_seq": float((2.0 * whole).exp().mean() - 1.0),
    }


def weight_metrics(weights: Tensor, raw: Tensor, mask: Tensor, level: str, threshold: float) -> dict[str, float]:
    """Statistics of importance weights, before batch normalisation; empty without a token.

    As in verl, the extremes of ``sequence`` weights are of what was not cut, and their shares beyond the bounds count
    a response once; of ``token`` weights the extremes are of what was cut, and a token counts for itself.

    Args:
        weights: cut at ``threshold``.
        raw: not cut.
        level: ``token`` or ``sequence``.
    """
    keep = mask.bool()
    rows = keep.any(dim=-1)
    if not rows.any():
        return {}
    cut = weights.double()[keep]
    # every token of a response has its weight, and 0 stands outside the mask
    whole = raw.double().amax(dim=-1)[rows] if level == "sequence" else raw.double()[keep]
    extremes = whole if level == "sequence" else cut
    counts = keep[rows].sum(dim=-1)
    per_row = _masked(weights, keep)[rows].sum(dim=-1) / counts
    raw_per_row = _masked(raw, keep)[rows].sum(dim=-1) / counts
    return {
        "rollout_is_mean": float(cut.mean()),
        "rollout_is_max": float(extremes.max()),
        "rollout_is_min": float(extremes.min()),
        "rollout_is_std": float(cut.std(correction=0)),
        "rollout_is_eff_sample_size": float(cut.mean().square() / cut.square().mean().clamp(min=1e-16)),
        "rollout_is_ratio_fraction_high": float((whole > threshold).double().mean()),
        "rollout_is_ratio_fraction_low": float((whole < 1.0 / threshold).double().mean()),
        "rollout_is_seq_mean": float(per_row.mean()),
        "rollout_is_seq_std": float(per_row.std()) if len(per_row) > 1 else 0.0,
        "rollout_is_seq_max": float(per_row.max()),
        "rollout_is_seq_min": float(per_row.min()),
        "rollout_is_seq_max_deviation": float((per_row - 1.0).abs().max()),
        "rollout_is_seq_fraction_high": float((raw_per_row > threshold).double().mean()),
        "rollout_is_seq_fraction_low": float((raw_per_row < 1.0 / threshold).double().mean()),
    }


def rejection_metrics(rule: RejectionRule, values: Tensor, inside: Tensor, mask: Tensor) -> dict[str, float]:
    """Statistics of one rejection rule; empty without a token.

    A token counts for itself in ``_mean`` whatever the level, as in verl: a response's estimate once a token of it.

    Args:
        values: the rule's estimate at every token.
        inside: where it keeps to the bounds.
    """
    keep = mask.bool()
    if not keep.any():
        return {}
    prefix = f"rollout_rs_{rule.name}"
    # a response's estimate counts once, a token's for itself
    seen = values[keep] if rule.level == "token" else values[keep.any(dim=-1)][:, 0]
    seen = seen.double()
    gone = ~inside & keep
    metrics = {
        f"{prefix}_mean": float(values[keep].double().mean()),
        f"{prefix}_max": float(seen.max()),
        f"{prefix}_min": float(seen.min()),
        f"{prefix}_fraction_high": float((seen > rule.upper).double().mean()),
        f"{prefix}_masked_fraction": float(gone.sum() / keep.sum()),
        f"{prefix}_seq_masked_fraction": float(gone.any(dim=-1).sum() / keep.any(dim=-1).sum()),
    }
    if math.isfinite(rule.lower):
        metrics[f"{prefix}_fraction_low"] = float((seen < rule.lower).double().mean())
    return metrics


def _masked(values: Tensor, keep: Tensor) -> Tensor:
    """Values in float64, 0 where they do not count."""
    return torch.where(keep, values.double(), torch.zeros((), dtype=torch.float64, device=values.device))
