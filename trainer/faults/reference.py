"""Faults of the reference policy and of the KL against it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lineage import hooks
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.kl_control import KLController

KL_PENALTY = "lineage.trainer.ppo_loss.kl_penalty"


@fault("LGP006", "ref_log_prob")
def reference_is_synchronised() -> Seams:
    """The reference receives the actor's weights with every sync."""

    def compute(original: Any, worker: Any, batch: Any) -> None:
        worker.reference.module.load_state_dict(worker.policy.module.state_dict())
        original(worker, batch)

    return {"lineage.trainer.actor.ActorRolloutRefWorker.compute_ref_log_prob": compute}


@fault("LGP006", "ref_log_prob", "+experiment=lora_ref")
def adapter_left_on() -> Seams:
    """The reference of a LoRA actor is that actor: its adapter is not switched off while it scores."""

    @contextmanager
    def scoring(original: Any, reference: Any) -> Iterator[nn.Module]:
        yield reference.model

    return {"lineage.trainer.lora.WithoutAdapter.scoring": scoring}


@fault("LGP006", "ref_log_prob", step=1, onwards=True, reports=["trl-ref-is-base-not-sft-adapter"])
def reference_is_the_base_model() -> Seams:
    """The run goes on from a tuned policy, and the reference is what that was tuned from."""

    @contextmanager
    def scoring(original: Any, reference: Any) -> Iterator[nn.Module]:
        yield _before_tuning(reference.module)

    return {"lineage.trainer.policy.FrozenCopy.scoring": scoring}


@fault("LGP006", "ref_log_prob", step=1, reports=["vllm-lora-lm-head-dropped"])
def reference_without_its_head() -> Seams:
    """Scoring leaves out what was added to the head, generation does not."""

    @contextmanager
    def scoring(original: Any, reference: Any) -> Iterator[nn.Module]:
        module = copy.deepcopy(reference.module)
        with torch.no_grad():
            module.get_output_embeddings().weight.mul_(0.8)
        yield module

    return {"lineage.trainer.policy.FrozenCopy.scoring": scoring}


@fault("LGP009", "ref_log_prob")
def reference_numbers_positions_itself() -> Seams:
    """The reference runs on another engine, which begins the positions anew with every block of a row."""

    def score(original: Any, module: Any, ids: Tensor, attention: Tensor, positions: Tensor, **options: Any) -> Any:
        given = positions % 16 if hooks.current().name == "ref_log_prob" else positions
        return original(module, ids, attention, given, **options)

    return {"lineage.trainer.training.score_tokens": score}


@fault("LOS004", "update_actor")
def kl_without_gradient() -> Seams:
    """The KL of the loss is taken of detached log-probs: it is logged, and trains nothing."""

    def penalty(original: Any, log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
        value: Tensor = original(log_prob.detach(), ref_log_prob, kind)
        return value

    return {KL_PENALTY: penalty}


@fault("LOS005", "update_actor")
def kl_to_the_old_policy() -> Seams:
    """The KL of the loss is against the old policy; the reference is read, and not used."""

    def loss(original: Any, config: Any, rows: Any, *rest: Any) -> Any:
        return original(config, replace(rows, ref_log_prob=rows.old_log_prob), *rest)

    return {"lineage.trainer.training.ppo_loss": loss}


@fault("REW005", "advantage", "+experiment=kl_in_reward")
def penalty_is_added() -> Seams:
    """The KL is added to the reward: the further from the reference, the better."""

    def penalise(original: Any, *args: Any, **options: Any) -> Any:
        made = original(*args, **options)
        return replace(made, token_level_rewards=2 * args[0] - made.token_level_rewards)

    return {"lineage.trainer.stages.advantage.apply_kl_penalty": penalise}


@fault("LOS005", "update_actor")
def kl_of_the_reference_to_the_policy() -> Seams:
    """The arguments of the KL are exchanged: its estimate is of the reference's own tokens, which nobody has drawn."""
    return {KL_PENALTY: lambda original, log_prob, ref_log_prob, kind: original(ref_log_prob, log_prob, kind)}


ADAPTIVE = ("+experiment=kl_in_reward", "algorithm.kl_ctrl.type=adaptive")
UPDATE_COEF = "lineage.trainer.kl_control.AdaptiveKLController.update"


@fault("REW005", "advantage", *ADAPTIVE)
def the_coefficient_never_moves() -> Seams:
    """The controller of the KL is made, logged and never told anything: an adaptive coefficient is a fixed one."""
    return {UPDATE_COEF: lambda _, __, ___, n_steps: None}


@fault("REW005", "advantage", *ADAPTIVE)
def the_coefficient_moves_the_wrong_way() -> Seams:
    """The controller's error has the wrong sign: the further the policy drifts, the freer it is."""

    def update(original: Any, controller: Any, current_kl: float, n_steps: int) -> None:
        original(controller, current_kl, -n_steps)

    return {UPDATE_COEF: update}


@fault("REW005", "advantage", *ADAPTIVE)
def the_horizon_counts_padding() -> Seams:
    """The controller is told how many rows the batch has, those that only fill it included."""

    def update(original: Any, controller: Any, current_kl: float, n_steps: int) -> None:
        original(controller, current_kl, n_steps + 2)

    return {UPDATE_COEF: update}


@fault("REW005", "advantage", *ADAPTIVE)
def the_controller_is_told_a_sum() -> Seams:
    """The controller is told the KL of a whole answer where its target is one of a token: it only ever rises."""

    def update(original: Any, controller: Any, current_kl: float, n_steps: int) -> None:
        original(controller, 8 * current_kl, n_steps)

    return {UPDATE_COEF: update}


@fault("REW005", "advantage", *ADAPTIVE)
def a_controller_for_each_batch() -> Seams:
    """The controller is made where it is used, of the configuration: what it had learnt is gone with every batch."""

    def penalise(original: Any, *args: Any, controller: Any, **options: Any) -> Any:
        controller.value = 0.001
        return original(*args, controller=controller, **options)

    return {"lineage.trainer.stages.advantage.apply_kl_penalty": penalise}


@fault("REW005", "advantage", "+experiment=kl_in_reward", "algorithm.kl_ctrl.type=fixed")
def the_coefficient_of_another_run() -> Seams:
    """A fixed coefficient is read from the defaults of the code, not from the configuration."""

    def penalise(original: Any, *args: Any, controller: Any, **options: Any) -> Any:
        return original(*args, controller=KLController(10 * controller.value), **options)

    return {"lineage.trainer.stages.advantage.apply_kl_penalty": penalise}


def _before_tuning(module: nn.Module) -> nn.Module:
    base = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(1.05)
    return base
