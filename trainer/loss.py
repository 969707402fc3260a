"""The PPO actor loss: per-token terms, then one aggregation over the whole mini-batch.

Every term is a matrix ``(rows, response_len)``; :func:`aggregate` turns it into a numerator over this micro-batch and a
denominator that belongs to the *global* mini-batch, so that the sum over micro-batches and ranks is the loss of one
process that holds all rows. Sources: PPO (arXiv:1707.06347), dual clip (arXiv:1912.09729), KL estimators
(http://joschu.net/blog/kl-approx.html), verl ``core_algos``. The terms of one micro-batch are put together in
``ppo_loss``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lineage.hooks import UserError


class LossError(UserError):
    """An unknown aggregation mode or KL estimator."""


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token policy loss and what verl reports beside it, each ``(rows, response_len)``.

    Attributes:
        loss: clipped surrogate, to be minimised; times the weights of the rollout correction, where there are any.
        clipped: 1 where the upper clip decided.
        clipped_lower: 1 where the dual clip decided (negative advantages only).
        log_ratio: ``log_prob - old_log_prob``; minus its masked mean is ``actor/ppo_kl``.
        clip: ``clip_ratio_low``, ``clip_ratio_high``, ``clip_ratio_c``, as they were used.
    """

    loss: Tensor
    clipped: Tensor
    clipped_lower: Tensor
    log_ratio: Tensor
    clip: tuple[float, float, float]


def compute_policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate with the dual clip (verl ``compute_policy_loss_vanilla``).

    Args:
        log_prob: ``(rows, response_len)`` of the policy being trained.
        old_log_prob: same shape, the proximal anchor.
        advantages: same shape.
        clip_ratio_low: the ratio is clipped to ``[1 - low, 1 + high]``.
        clip_ratio_c: bound on the loss of a negative advantage, greater than 1.
        rollout_is_weights: same shape, constants that multiply the loss; None weighs every token alike.
    """
    if clip_ratio_c <= 1.0:
        raise LossError(f"actor.clip_ratio_c={clip_ratio_c} must be greater than 1: it bounds a ratio from above")
    log_ratio = (log_prob - old_log_prob).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    surrogate = torch.maximum(plain, clipped)
    bound = -advantages * clip_ratio_c
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(bound, surrogate), surrogate)
    return PolicyLoss(
        loss=loss if rollout_is_weights is None else loss * rollout_is_weights,
        clipped=(clipped > plain).to(loss.dtype),
        clipped_lower=((surrogate > bound) & negative).to(loss.dtype),
        log_ratio=log_ratio,
        clip=(clip_ratio_low, clip_ratio_high, clip_ratio_c),
    )


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference), the shape of its inputs.

    A ``+`` after the name keeps the value and takes the gradient of k2: the expected gradient of k2 is that of the KL,
    which cannot be said of k1 (it is 0) or k3.

    Raises:
        LossError: ``kind`` is not in :data:`KL_ESTIMATORS`, with or without a ``+``.
    """
    name = kind.removesuffix("+")
    if name not in KL_ESTIMATORS:
        known = ", ".join(sorted(KL_ESTIMATORS))
        raise LossError(
            f"the KL estimator {kind!r} is unknown: choose one of {known}, or one of them with a + after it"
        )
    value = KL_ESTIMATORS[name](log_prob, ref_log_prob)
    if name == kind:
        return value
    slope = _k2(log_prob, ref_log_prob)
    return value.detach() + (slope - slope.detach())


def _k1(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    return log_prob - ref_log_prob


def _abs(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    return (log_prob - ref_log_prob).abs()


def _k2(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    return 0.5 * (log_prob - ref_log_prob).square()


def _k3(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    # both clamps are verl's: the exponential of a wild difference would swallow the loss
    difference = (ref_log_prob - log_prob).clamp(-20.0, 20.0)
    return (difference.exp() - difference - 1).clamp(-10.0, 10.0)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": _abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}


@dataclass(frozen=True)
class MiniBatch:
    """What the aggregation needs to know of the global mini-batch.

    Both count under ``loss_mask``, the mask as the rollout wrote it. verl takes its token count there too, so tokens
    that the rollout correction rejects leave the numerator and stay in the denominator.

    Attributes:
        rows: trajectories with a token to train, over all ranks. Padding rows have none; verl divides by M x G, so that
            there they make every other row's share smaller.
        tokens: tokens to train, over all ranks.
    """

    rows: int
    tokens: int

    @classmethod
    def of(cls, tokens: Iterable[int]) -> MiniBatch:
        """The mini-batch whose rows train so many tokens each."""
        counts = [count for count in tokens if count]
        return cls(len(counts), sum(counts))


@dataclass(frozen=True)
class Aggregated:
    """One term on one micro-batch: its share of the mini-batch loss is ``numerator / denominator``."""

    numerator: Tensor
    denominator: float

    @property
    def value(self) -> Tensor:
        """Scalar share of the mini-batch loss, differentiable."""
        return self.numerator / self.denominator


def aggregate(matrix: Tensor, mask: Tensor, mode: str, mini_batch: MiniBatch) -> Aggregated:
    """Reduce a per-token matrix under the mask (verl ``agg_loss``).

    Args:
        matrix: ``(rows, response_len)``.
        mask: same shape, 1 on the tokens that train.
        mode: ``actor.loss_agg_mode``: the mean over all tokens; or over the rows, of each row's sum or mean.
        mini_batch: the global mini-batch this micro-batch is a part of.

    Raises:
        LossError: unknown mode.
    """
    if mode not in AGGREGATIONS:
        raise LossError(f"actor.loss_agg_mode={mode!r} is unknown: choose one of {', '.join(AGGREGATIONS)}")
    # where, not product: NaN outside the mask times 0 is NaN
    kept = torch.where(mask.bool(), matrix, torch.zeros_like(matrix))
    if mode == "token-mean":
        return Aggregated(kept.sum(), float(max(mini_batch.tokens, 1)))
    rows = kept.sum(dim=-1)
    if mode == "seq-mean-token-mean":
        rows = rows / mask.sum(dim=-1).clamp(min=1)
    return Aggregated(rows.sum(), float(max(mini_batch.rows, 1)))


AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
