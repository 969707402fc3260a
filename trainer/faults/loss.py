"""Faults of the loss: its denominators, its masks, its scale, its metrics and the step it ends in."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from lineage.hooks import Optim
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.loss import Aggregated, MiniBatch, PolicyLoss, aggregate
from lineage.trainer.ppo_loss import MicroLoss, MicroRead, PolicyRows, Term

ACTOR = "actor_rollout_ref.actor"
AGGREGATE = "lineage.trainer.ppo_loss.aggregate"
LOSS, POLICY_LOSS = "lineage.trainer.training.ppo_loss", "lineage.trainer.ppo_loss.compute_policy_loss"
VALUE = "lineage.trainer.ppo_loss.MicroLoss.value"
CLIP = "torch.nn.utils.clip_grad_norm_"
ONE_ROW = f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"
SEQUENCES = (f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", ONE_ROW)
ENTROPY = f"{ACTOR}.entropy_coeff=0.01"
EPOCHS = f"{ACTOR}.ppo_epochs=2"


def _own(mask: Tensor) -> MiniBatch:
    return MiniBatch.of(mask.sum(dim=-1).tolist())


# --------------------------------------------------------------------------------------------------------- LOS001


@fault(
    "LOS001",
    "update_actor",
    ONE_ROW,
    reports=["verl-critic-loss-per-micro-batch"],
)
def mean_of_each_micro_batch() -> Seams:
    """Every micro-batch takes the mean over its own tokens, and the gradients add up."""

    def reduce(original: Any, matrix: Tensor, mask: Tensor, mode: str, mini: MiniBatch) -> Aggregated:
        return aggregate(matrix, mask, mode, _own(mask))

    return {AGGREGATE: reduce}


@fault(
    "LOS001",
    "update_actor",
    reports=[
        "trl-async-mean-of-means",
        "trl-grad-accum-changes-result",
        "oi-token-mean-accumulation",
        "skyrl-token-mean-depends-on-microbatch",
        "swift-global-token-mean",
    ],
)
def mean_of_means() -> Seams:
    """The means of the micro-batches are averaged: a token of a short one weighs more than a token of a long one."""

    def reduce(original: Any, matrix: Tensor, mask: Tensor, mode: str, mini: MiniBatch) -> Aggregated:
        own = _own(mask)
        count = max(round(mini.rows / max(own.rows, 1)), 1)
        return aggregate(matrix, mask, mode, MiniBatch(own.rows * count, own.tokens * count))

    return {AGGREGATE: reduce}


@fault("LOS001", "update_actor", reports=["verl-distillation-loss-no-global-info"])
def denominator_of_the_step_before() -> Seams:
    """The token count of the mini-batch is one that was computed for another: it is not refreshed."""
    first: list[MiniBatch] = []

    def reduce(original: Any, matrix: Tensor, mask: Tensor, mode: str, mini: MiniBatch) -> Aggregated:
        first.append(mini)
        return aggregate(matrix, mask, mode, MiniBatch(first[0].rows, first[0].tokens))

    return {AGGREGATE: reduce}


@fault("LOS001", "update_actor", "+experiment=dynamic_batch", reports=["verl-grad-accum-dynamic-bsz"])
def fixed_accumulation_of_packed_micro_batches() -> Seams:
    """Micro-batches are packed by tokens, and their means are divided by the number a fixed size would have made."""

    def reduce(original: Any, matrix: Tensor, mask: Tensor, mode: str, mini: MiniBatch) -> Aggregated:
        own = _own(mask)
        return aggregate(matrix, mask, mode, MiniBatch(own.rows * mini.rows, own.tokens * mini.rows))

    return {AGGREGATE: reduce}


@fault("LOS001", "update_actor", *SEQUENCES, reports=["openrlhf-gspo-token-level-loss"])
def token_mean_under_another_name() -> Seams:
    """The loss is to be a mean over sequences; the switch does not reach the reduction, which is over tokens."""

    def reduce(original: Any, matrix: Tensor, mask: Tensor, mode: str, mini: MiniBatch) -> Aggregated:
        return aggregate(matrix, mask, "token-mean", mini)

    return {AGGREGATE: reduce}


@fault("LOS001", "update_actor", *SEQUENCES)
def mode_of_the_default() -> Seams:
    """The actor's configuration is rebuilt without the aggregation mode, so that the default one is used and logged."""

    def loss(original: Any, config: Any, *rest: Any) -> MicroLoss:
        rebuilt = OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(config)), {"loss_agg_mode": "token-mean"})
        made: MicroLoss = original(rebuilt, *rest)
        return made

    return {LOSS: loss}


# --------------------------------------------------------------------------------------------------------- LOS002


@fault("LOS002", "update_actor", "+experiment=tools", "data.max_response_length=128", reports=["oi-kl-mean-unmasked"])
def kl_over_everything() -> Seams:
    """The KL is summed over every position, padding and observations with it; the other terms are masked."""

    def loss(original: Any, config: Any, rows: Any, mini: MiniBatch, *rest: Any) -> MicroLoss:
        made: MicroLoss = original(config, rows, mini, *rest)
        ones = torch.ones_like(rows.mask)
        kl = rows.log_prob - rows.ref_log_prob
        share = aggregate(kl, ones, config.loss_agg_mode, mini)
        term = Term(config.kl_loss_coef, share, ones.sum().to(kl.dtype))
        return replace(made, terms={**made.terms, "kl_loss": term})

    return {LOSS: loss}


@fault("LOS002", "update_actor", reports=["skyrl-cp-loss-doubled", "slime-per-token-loss-scaled-twice"])
def loss_times_the_ranks() -> Seams:
    """The loss is multiplied by the number of ranks for an average of gradients that nobody takes."""
    return {VALUE: lambda original, loss: 2 * original(loss)}


@fault("LOS002", "update_actor", ENTROPY, ONE_ROW, reports=["nemo-vapo-nll-times-microbatches"])
def entropy_bonus_times_micro_batches() -> Seams:
    """One term is added whole for every micro-batch, though it is a share of the mini-batch already."""

    def value(original: Any, loss: MicroLoss) -> Tensor:
        bonus = loss.terms["entropy_loss"]
        made: Tensor = original(loss) + 3 * bonus.scale * bonus.share.value
        return made

    return {VALUE: value}


@fault("LOS002", "update_actor")
def kl_logged_and_not_added() -> Seams:
    """The KL is computed and logged; what goes backward is the policy loss alone."""

    def value(original: Any, loss: MicroLoss) -> Tensor:
        return loss.terms["pg_loss"].share.value

    return {VALUE: value}


@fault("LOS002", "update_actor", step=2)
def last_micro_batch_weighs_half() -> Seams:
    """The micro-batch before the optimiser steps is divided by the number of them once more than the others."""
    seen: list[MicroLoss] = []

    def value(original: Any, loss: MicroLoss) -> Tensor:
        seen.append(loss)
        made: Tensor = original(loss)
        return made / 2 if len(seen) == 2 else made

    return {VALUE: value}


# --------------------------------------------------------------------------------------------------------- LOS003


@fault("LOS003", "update_actor")
def update_under_autocast() -> Seams:
    """The update's forward pass runs in bfloat16, that of the old log-probs does not."""

    def rows(original: Any, **inputs: Any) -> Any:
        return original(**{**inputs, "log_prob": inputs["log_prob"].bfloat16().float()})

    return {"lineage.trainer.training.PolicyRows": rows}


@fault("LOS003", "update_actor")
def skipped_without_a_word() -> Seams:
    """A gradient overflows, the scaler skips the step, and the step is reported as taken."""

    def report(original: Any, **said: Any) -> Optim:
        return Optim(**{**said, "skipped": False})

    return {CLIP: _overflow, "lineage.trainer.training.Optim": report}


@fault("LOS003", "metrics")
def skipped_steps_are_not_counted() -> Seams:
    """Steps are skipped, and the metric that counts them stays 0."""

    def train(original: Any, *args: Any) -> dict[str, float]:
        metrics = original(*args)
        return {**metrics, "actor/skipped_steps": 0.0}

    return {CLIP: _overflow, "lineage.trainer.training.TrainingWorker.train_mini_batch": train}


def _overflow(original: Any, parameters: Any, *args: Any, **options: Any) -> Tensor:
    return original(parameters, *args, **options) + float("inf")


# ------------------------------------------------------------------------------------------------- LOS004, LOS005


@fault("LOS004", "update_actor")
def policy_loss_without_gradient() -> Seams:
    """The ratio is of detached log-probs: the policy loss is logged, and only the KL trains."""

    def policy_loss(original: Any, log_prob: Tensor, *rest: Any, **options: Any) -> PolicyLoss:
        made: PolicyLoss = original(log_prob.detach(), *rest, **options)
        return made

    return {POLICY_LOSS: policy_loss}


@fault("LOS005", "update_actor", *SEQUENCES, reports=["roll-agg-loss-double-division"])
def divided_by_the_length_twice() -> Seams:
    """A mean over a row's tokens is divided by their number once more."""

    def reduce(original: Any, matrix: Tensor, mask: Tensor, mode: str, mini: MiniBatch) -> Aggregated:
        return aggregate(matrix / mask.sum(dim=-1, keepdim=True).clamp(min=1), mask, mode, mini)

    return {AGGREGATE: reduce}


@fault("LOS005", "update_actor")
def numerator_over_the_padding() -> Seams:
    """The sum of a term takes in what the mask leaves out; its count of tokens does not."""

    def reduce(original: Any, matrix: Tensor, mask: Tensor, mode: str, mini: MiniBatch) -> Aggregated:
        return aggregate(matrix, torch.ones_like(mask), mode, mini)

    return {AGGREGATE: reduce, "lineage.trainer.training.PolicyRows": _filled}


def _filled(original: Any, **inputs: Any) -> Any:
    return original(**{**inputs, "log_prob": torch.where(inputs["mask"].bool(), inputs["log_prob"], -4.0)})


@fault("LOS005", "update_actor", EPOCHS)
def clip_on_the_wrong_side() -> Seams:
    """The surrogate is the lesser of the two losses, not the greater: a ratio that has run away is rewarded."""

    def policy_loss(
        original: Any, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, **options: Any
    ) -> PolicyLoss:
        made: PolicyLoss = original(log_prob, old_log_prob, advantages, **options)
        ratio = (log_prob - old_log_prob).exp()
        clipped = ratio.clamp(1 - options["clip_ratio_low"], 1 + options["clip_ratio_high"])
        return replace(made, loss=torch.minimum(-advantages * ratio, -advantages * clipped))

    return {POLICY_LOSS: policy_loss}


@fault("LOS005", "update_actor")
def advantage_of_the_row_beside() -> Seams:
    """Inside a micro-batch the advantages are one row behind the log-probs."""

    def loss(original: Any, config: Any, rows: Any, *rest: Any) -> MicroLoss:
        made: MicroLoss = original(config, replace(rows, advantages=rows.advantages.roll(1, dims=0)), *rest)
        return made

    return {LOSS: loss}


@fault("LOS005", "update_actor")
def policy_loss_with_the_wrong_sign() -> Seams:
    """The surrogate is maximised where a loss is minimised."""

    def policy_loss(original: Any, *args: Any, **options: Any) -> PolicyLoss:
        made: PolicyLoss = original(*args, **options)
        return replace(made, loss=-made.loss)

    return {POLICY_LOSS: policy_loss}


@fault(
    "LOS005",
    "update_actor",
    "+experiment=merged_steps",
    "data.train_batch_size=4",
    "algorithm.rollout_correction.rollout_is=token",
)
def importance_weights_twice() -> Seams:
    """The weights of the rollout correction are on the advantages, and on the loss again."""

    def policy_loss(original: Any, *args: Any, **options: Any) -> PolicyLoss:
        made: PolicyLoss = original(*args, **options)
        return replace(made, loss=made.loss * options["rollout_is_weights"])

    return {POLICY_LOSS: policy_loss}


@fault(
    "LOS005",
    "advantage",
    "+experiment=merged_steps",
    "data.train_batch_size=4",
    "algorithm.rollout_correction.rollout_is=token",
)
def importance_weights_upside_down() -> Seams:
    """The weights are the sampler's probability over the trainer's."""

    def weights(original: Any, log_ratio: Tensor, *rest: Any) -> Tensor:
        made: Tensor = original(-log_ratio, *rest)
        return made

    return {"lineage.trainer.correction.rollout_correction.importance_weights": weights}


@fault("LOS005", "update_actor", ENTROPY)
def entropy_bonus_in_bits() -> Seams:
    """The entropy of the bonus is taken by the logarithm of base 2, the coefficient is meant for nats."""

    def loss(original: Any, config: Any, rows: PolicyRows, *rest: Any) -> MicroLoss:
        assert rows.entropy is not None
        made: MicroLoss = original(config, replace(rows, entropy=rows.entropy / math.log(2.0)), *rest)
        return made

    return {LOSS: loss}


@fault("LOS005", "update_actor", ENTROPY, "actor_rollout_ref.rollout.temperature=0.7")
def entropy_bonus_without_temperature() -> Seams:
    """The bonus is the entropy of the model's own distribution, not of the one that tokens are drawn from."""

    def score(original: Any, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool) -> Any:
        log_probs, entropy = original(logits, labels, temperature, with_entropy)
        if entropy is not None and torch.is_grad_enabled():
            entropy = original(logits, labels, 1.0, True)[1]
        return log_probs, entropy

    return {"lineage.trainer.log_prob._score": score}


@fault("LOS005", "metrics")
def logged_loss_of_the_last_micro_batch() -> Seams:
    """The logged loss is that of the last micro-batch, not of all of them."""

    def metrics(original: Any, read: list[MicroRead]) -> dict[str, float]:
        made: dict[str, float] = original(read[-1:])
        return made

    return {"lineage.trainer.training.loss_metrics": metrics}


@fault("LOS005", "metrics")
def metrics_of_the_last_update() -> Seams:
    """The metrics of an update are those of its last optimiser step."""
    return {"lineage.trainer.training.mean_metrics": lambda original, parts: original(parts[-1:])}


@fault("LOS005", "update_actor")
def clip_of_the_code() -> Seams:
    """The loss is called without its bounds and takes its own: the clip is wider than the configured one."""

    def policy_loss(original: Any, *args: Any, **options: Any) -> Any:
        return original(*args, **{**options, "clip_ratio_high": 0.28})

    return {"lineage.trainer.ppo_loss.compute_policy_loss": policy_loss}
