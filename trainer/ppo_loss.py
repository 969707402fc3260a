"""The actor's loss of one micro-batch: policy gradient, entropy bonus and KL to the reference, and what is reported.

Which mask counts, as in verl 0.9.1's ``ppo_loss``: numerators are taken under ``response_mask``, which the rollout
correction may have rewritten in the queue, and denominators under ``loss_mask``, which it leaves as the rollout wrote
it. Rejecting tokens therefore makes the loss smaller instead of giving the rest more weight. In bypass mode nothing is
rewritten: the rejection is made here, from the policy as it is now, and is for the policy gradient alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lineage.hooks import LossTerm
from lineage.trainer.correction.rejection_rules import rejection_rules
from lineage.trainer.correction.rollout_correction import compute_rollout_correction, reject
from lineage.trainer.log_prob import pad_rows
from lineage.trainer.loss import Aggregated, MiniBatch, aggregate, compute_policy_loss, kl_penalty


@dataclass(frozen=True)
class PolicyRows:
    """What the loss reads of one micro-batch, each ``(rows, response_len)``.

    Attributes:
        log_prob: of the policy as it is now, differentiable.
        old_log_prob: the proximal anchor; in bypass mode the sampler's.
        mask: 1 on the tokens that count.
        entropy: of the policy as it is now; None without a bonus.
        ref_log_prob: None without a KL term.
        rollout_is_weights: None without importance weights.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    entropy: Tensor | None = None
    ref_log_prob: Tensor | None = None
    rollout_is_weights: Tensor | None = None

    def detached(self) -> PolicyRows:
        """The same, without the graph of the forward pass."""
        return replace(self, log_prob=self.log_prob.detach(), entropy=None)

    def on_host(self) -> PolicyRows:
        """The same, where other processes can read it too."""
        return replace(self, **{name: value.cpu() for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True)
class Term:
    """One term: ``scale`` times its share is part of the loss; ``tokens`` (a scalar) are under its mask."""

    scale: float
    share: Aggregated
    tokens: Tensor


#: what says which KL was taken: sums over the tokens of ``r = ref_log_prob - log_prob``, of its square and of what k3
#: makes of it, and the greatest; only while tracing
KL_SUMS = ("kl_gap", "kl_gap_squared", "kl_excess", "kl_gap_most")

# terms and watched sums of a micro-batch on the host
MicroRead = tuple[list[LossTerm], dict[str, float]]


@dataclass(frozen=True)
class MicroLoss:
    """The loss of a micro-batch.

    Attributes:
        terms: by name; ``pg_loss`` is always there.
        watched: sums over the tokens of ``pg_loss`` of what is only reported, and ``KL_SUMS`` over those of
            ``kl_loss``.
        mode: ``actor.loss_agg_mode``.
        rows: rows of the micro-batch.
        policy_mask: ``(rows, response_len)``, 1 on the tokens of ``pg_loss``.
        per_token: of each term ``(rows, response_len)``, before its mask and its scale; without the graph, but it says
            whether it had one. Empty unless it was asked for.
        clip: bounds of the ratio, as they were used.
    """

    terms: dict[str, Term]
    watched: dict[str, Tensor]
    mode: str
    rows: int
    policy_mask: Tensor
    per_token: dict[str, Tensor]
    clip: tuple[float, float, float]

    def attrs(self, term: str, watched: dict[str, float]) -> dict[str, str]:
        """What the trace says of a term beside its numbers, from what :meth:`read` gave."""
        if term == "pg_loss":
            return dict(zip(("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), map(repr, self.clip), strict=True))
        said = KL_SUMS if term == "kl_loss" else ()
        return {name: repr(watched[name]) for name in said if name in watched}

    @property
    def value(self) -> Tensor:
        """Share of the mini-batch loss, differentiable."""
        return torch.stack([term.scale * term.share.value for term in self.terms.values()]).sum()

    def scalars(self) -> list[Tensor]:
        """Everything :meth:`read` needs of the device, one number each."""
        terms = self.terms.values()
        numerators = [term.share.numerator.detach() for term in terms]
        return [*numerators, *(term.tokens for term in terms), *self.watched.values()]

    def read(self, values: Iterator[float]) -> MicroRead:
        """Terms and watched sums, from the values of :meth:`scalars` on the host."""
        numerators, tokens = ([next(values) for _ in self.terms] for _ in range(2))
        read = [
            LossTerm(name, self.mode, numerator, term.share.denominator, term.scale, self.rows, int(count))
            for (name, term), numerator, count in zip(self.terms.items(), numerators, tokens, strict=True)
        ]
        return read, {name: next(values) for name in self.watched}


def ppo_loss(
    config: Any, rows: PolicyRows, mini: MiniBatch, correction: Any = None, per_token: bool = False
) -> MicroLoss:
    """The loss of one micro-batch (verl ``ppo_loss``).

    Args:
        config: ``actor_rollout_ref.actor``.
        mini: the global mini-batch it is a part of.
        correction: ``algorithm.rollout_correction`` in bypass mode, else None.
        per_token: keep what each token had.
    """
    policy = compute_policy_loss(
        rows.log_prob,
        rows.old_log_prob,
        rows.advantages,
        clip_ratio_low=config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c,
        rollout_is_weights=rows.rollout_is_weights,
    )
    policy_mask = rows.mask if correction is None else _kept(rows, correction)

    def term(scale: float, matrix: Tensor, mask: Tensor) -> Term:
        return Term(scale, aggregate(matrix, mask, config.loss_agg_mode, mini), mask.sum().to(matrix.dtype))

    terms, matrices = {"pg_loss": term(1.0, policy.loss, policy_mask)}, {"pg_loss": policy.loss}
    if rows.entropy is not None:
        terms["entropy_loss"] = term(-config.entropy_coeff, rows.entropy, rows.mask)
        matrices["entropy_loss"] = rows.entropy
    if rows.ref_log_prob is not None:
        kl = kl_penalty(rows.log_prob, rows.ref_log_prob, config.kl_loss_type)
        terms["kl_loss"] = term(config.kl_loss_coef, kl, rows.mask)
        matrices["kl_loss"] = kl
    watched = {
        "pg_clipfrac": policy.clipped,
        "pg_clipfrac_lower": policy.clipped_lower,
        "ppo_kl": -policy.log_ratio.detach(),
    }
    keep = policy_mask.bool()
    sums = {name: torch.where(keep, matrix, torch.zeros_like(matrix)).sum() for name, matrix in watched.items()}
    if per_token and rows.ref_log_prob is not None:
        sums |= _kl_sums(rows, rows.ref_log_prob)
    kept = matrices.items() if per_token else ()
    tokens = {name: matrix.detach().requires_grad_(matrix.requires_grad) for name, matrix in kept}
    return MicroLoss(terms, sums, config.loss_agg_mode, len(rows.mask), policy_mask, tokens, policy.clip)


@torch.no_grad()
def _kl_sums(rows: PolicyRows, ref_log_prob: Tensor) -> dict[str, Tensor]:
    """:data:`KL_SUMS`, from what the loss reads and not from the KL it takes."""
    gap = ref_log_prob - rows.log_prob
    gap = torch.where(rows.mask.bool(), gap, torch.zeros_like(gap)).clamp(-20.0, 20.0)
    sums = gap.sum(), gap.square().sum(), (torch.expm1(gap) - gap).sum(), gap.abs().amax()
    return dict(zip(KL_SUMS, sums, strict=True))


def _kept(rows: PolicyRows, correction: Any) -> Tensor:
    """The mask less what the current policy rejects; importance weights are none, the ratio of the loss is theirs."""
    rules = rejection_rules(correction.rollout_rs, correction.rollout_rs_threshold)
    if not rules:
        return rows.mask
    with torch.no_grad():
        ratio = torch.where(rows.mask.bool(), rows.log_prob - rows.old_log_prob, torch.zeros_like(rows.log_prob))
        return reject(ratio, rows.mask, rules)[0]


def loss_metrics(read: Sequence[MicroRead]) -> dict[str, float]:
    """``actor/*`` of one mini-batch from what its micro-batches :meth:`MicroLoss.read`."""
    totals: dict[str, float] = {}
    watched: dict[str, float] = {}
    tokens = 0
    for terms, sums in read:
        for term in terms:
            totals[term.term] = totals.get(term.term, 0.0) + term.numerator / term.denominator
            tokens += term.tokens if term.term == "pg_loss" else 0
        for name, value in sums.items():
            if name not in KL_SUMS:
                watched[name] = watched.get(name, 0.0) + value
    means = {name: value / max(tokens, 1) for name, value in watched.items()}
    return {f"actor/{name}": value for name, value in (totals | means).items()}


def bypass_metrics(parts: Sequence[PolicyRows], correction: Any) -> dict[str, float]:
    """``rollout_corr/*`` of one mini-batch in bypass mode: the policy of its forward passes against the sampler."""

    def whole(name: str) -> Tensor:
        return pad_rows([row for part in parts for row in getattr(part, name)])

    return compute_rollout_correction(whole("log_prob"), whole("old_log_prob"), whole("mask"), correction).metrics
