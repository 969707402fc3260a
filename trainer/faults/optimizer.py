"""Faults of the optimiser step: its learning rate, its state, the gradient it is given, and the tensors it moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.ppo_loss import MicroLoss, Term
from lineage.trainer.training import TrainingWorker

ACTOR = "actor_rollout_ref.actor"
WORKER = "lineage.trainer.training.TrainingWorker"
BACKWARD, STEP, BATCH, UPDATE = (
    f"{WORKER}._backward",
    f"{WORKER}._optimizer_step",
    f"{WORKER}.train_batch",
    f"{WORKER}.train_mini_batch",
)
LOSS = "lineage.trainer.training.ppo_loss"
CLIP = "torch.nn.utils.clip_grad_norm_"
ONE_ROW = f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"
ENTROPY = f"{ACTOR}.entropy_coeff=0.01"
KL = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.01")
COSINE = (f"{ACTOR}.optim.lr_scheduler_type=cosine", "trainer.total_training_steps=4")
WARM_UP = (f"{ACTOR}.optim.lr_warmup_steps=3", "trainer.total_training_steps=4")


# ------------------------------------------------------------------------------------------------ LOS004, the ledger


def _rescaled(name: str, factor: float) -> Callable[..., MicroLoss]:
    def loss(original: Any, *args: Any) -> MicroLoss:
        made: MicroLoss = original(*args)
        term = made.terms[name]
        return replace(made, terms={**made.terms, name: Term(term.scale * factor, term.share, term.tokens)})

    return loss


@fault("LOS004", "update_actor", ENTROPY)
def entropy_bonus_is_a_penalty() -> Seams:
    """The entropy is added to the loss where it is to be taken off: the policy collapses the faster for its bonus."""
    return {LOSS: _rescaled("entropy_loss", -1.0)}


@fault("LOS004", "update_actor", *KL)
def kl_pushes_away_from_the_reference() -> Seams:
    """The KL is taken off the loss, as from a reward: the policy is paid for leaving the reference."""
    return {LOSS: _rescaled("kl_loss", -1.0)}


@fault("LOS004", "update_actor", *KL, onwards=True)
def kl_coefficient_of_another_run() -> Seams:
    """The coefficient is a default of the code, ten times the configured one."""
    return {LOSS: _rescaled("kl_loss", 10.0)}


@fault("LOS004", "update_actor", ENTROPY)
def entropy_bonus_never_arrives() -> Seams:
    """The loss is made with a configuration that was copied before the overrides: it has no entropy term."""

    def loss(original: Any, config: Any, *rest: Any) -> MicroLoss:
        made: MicroLoss = original(config, *rest)
        return replace(made, terms={name: term for name, term in made.terms.items() if name != "entropy_loss"})

    return {LOSS: loss}


@fault("LOS004", "update_actor", f"{ACTOR}.use_kl_loss=false")
def kl_nobody_asked_for() -> Seams:
    """The loss has a KL term to the old policy, though the configuration has switched the KL off."""

    def loss(original: Any, config: Any, rows: Any, *rest: Any) -> MicroLoss:
        asked = OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(config)), {"use_kl_loss": True})
        made: MicroLoss = original(asked, replace(rows, ref_log_prob=rows.old_log_prob), *rest)
        return made

    return {LOSS: loss}


@fault("LOS004", "update_actor")
def policy_loss_at_half_its_weight() -> Seams:
    """The policy loss is weighed against the other terms by a coefficient that no setting names."""
    return {LOSS: _rescaled("pg_loss", 0.5)}


# ------------------------------------------------------------------------------------------- LOS002, the gradient


@fault("LOS002", "update_actor")
def gradients_are_never_zeroed() -> Seams:
    """No gradient is zeroed after a step: every update trains on all the mini-batches before it as well."""
    return {"torch.optim.Optimizer.zero_grad": lambda original, optimizer, *args, **options: None}


@fault("LOS002", "update_actor", ONE_ROW)
def last_micro_batch_is_the_gradient() -> Seams:
    """Gradients are zeroed before every backward pass: what the step is given is that of the last micro-batch."""

    def backward(original: Any, worker: TrainingWorker, *args: Any) -> Any:
        worker.optimizer.zero_grad(set_to_none=True)
        return original(worker, *args)

    return {BACKWARD: backward}


@fault("LOS002", "update_actor", ONE_ROW)
def gradient_is_averaged_as_it_grows() -> Seams:
    """After each backward pass the gradient is halved for a running mean: the first micro-batches fade."""

    def backward(original: Any, worker: TrainingWorker, *args: Any) -> Any:
        _scale(worker.module.parameters(), 0.5)
        return original(worker, *args)

    return {BACKWARD: backward}


# ------------------------------------------------------------------------------------------------ LOS003, the step


@fault("LOS003", "update_actor", onwards=True)
def learning_rate_times_ten() -> Seams:
    """The learning rate is scaled with the number of ranks, by a rule that was meant for another batch size."""

    def train(original: Any, worker: TrainingWorker, *args: Any) -> Any:
        for group in worker.optimizer.param_groups:
            group["lr"] *= 10
        try:
            return original(worker, *args)
        finally:
            for group in worker.optimizer.param_groups:
                group["lr"] /= 10

    return {BATCH: train}


@fault("LOS003", "update_actor", *COSINE, onwards=True)
def schedule_moves_with_every_mini_batch() -> Seams:
    """The schedule moves once a mini-batch, its length is counted in steps: the learning rate is 0 half-way."""

    def train(original: Any, worker: TrainingWorker, *args: Any) -> Any:
        result = original(worker, *args)
        worker.scheduler.step()
        return result

    return {BATCH: train}


@fault("LOS003", "update_actor", *WARM_UP, step=3)
def warm_up_begins_again() -> Seams:
    """The schedule is built anew in the middle of the run, and nobody tells it where the run is: it warms up again."""

    def train(original: Any, worker: TrainingWorker, *args: Any) -> Any:
        worker.scheduler.last_epoch = -1
        worker.scheduler._step_count = 0
        worker.scheduler.step()
        return original(worker, *args)

    return {UPDATE: train}


def _without_state(original: Any, worker: TrainingWorker, *args: Any) -> Any:
    worker.optimizer.state.clear()
    return original(worker, *args)


@fault("LOS003", "update_actor")
def optimizer_state_is_lost() -> Seams:
    """The optimiser is offloaded between two mini-batches and comes back without its moments."""

    return {BATCH: _without_state}


@fault("LOS003", "update_actor")
def optimizer_begins_again_at_a_step() -> Seams:
    """The optimiser is made anew for a step, as by a resume that restores the weights alone."""

    return {UPDATE: _without_state}


@fault("LOS003", "update_actor")
def optimizer_steps_twice() -> Seams:
    """The wrapper of the optimiser steps, and the trainer steps it again, by the same gradient."""

    def finish(original: Any, worker: TrainingWorker, done: Sequence[Any], *args: Any) -> Any:
        step = worker.optimizer.step

        def twice(*given: Any, **options: Any) -> Any:
            step(*given, **options)
            return step(*given, **options)

        worker.optimizer.step = twice  # type: ignore[method-assign]
        try:
            return original(worker, done, *args)
        finally:
            del worker.optimizer.step

    return {STEP: finish}


@fault("LOS003", "update_actor", f"{ACTOR}.grad_clip=0.01")
def clip_reaches_nothing() -> Seams:
    """The norm is taken over parameters whose gradients are elsewhere: it is logged, and nothing is clipped."""

    def clip(original: Any, parameters: Any, max_norm: float, *args: Any, **options: Any) -> Tensor:
        return original(parameters, float("inf"), *args, **options)

    return {CLIP: clip}


@fault("LOS003", "update_actor")
def gradient_is_climbed() -> Seams:
    """The gradient changes its sign on the way to the step: what is logged as a loss is driven up."""

    def clip(original: Any, parameters: Any, *args: Any, **options: Any) -> Tensor:
        held = list(parameters)
        norm: Tensor = original(held, *args, **options)
        _scale(held, -1.0)
        return norm

    return {CLIP: clip}


@fault("LOS003", "update_actor", ONE_ROW)
def gradient_divided_by_micro_batches() -> Seams:
    """Before the step the gradient is divided by the number of micro-batches, though each was a share already."""

    def clip(original: Any, parameters: Any, *args: Any, **options: Any) -> Tensor:
        held = list(parameters)
        norm: Tensor = original(held, *args, **options)
        _scale(held, 0.25)
        return norm

    return {CLIP: clip}


@fault("LOS003", "update_actor", onwards=True)
def decay_of_the_default() -> Seams:
    """The optimiser is rebuilt from its class alone: it decays by the default of the library."""

    def train(original: Any, worker: TrainingWorker, *args: Any) -> Any:
        group = worker.optimizer.param_groups[0]
        kept, group["weight_decay"] = group["weight_decay"], 0.1
        try:
            return original(worker, *args)
        finally:
            group["weight_decay"] = kept

    return {BATCH: train}


def _two_groups(**settings: Callable[[float], float]) -> Callable[..., Any]:
    """The optimiser has a second group for one batch: all parameters but the first, with settings of its own."""

    def train(original: Any, worker: TrainingWorker, *args: Any) -> Any:
        (group,) = worker.optimizer.param_groups
        held = group["params"]
        own = {name: made(group[name]) for name, made in settings.items()}
        second = {**group, **own, "params": held[1:]}
        group["params"] = held[:1]
        worker.optimizer.param_groups.append(second)
        try:
            return original(worker, *args)
        finally:
            worker.optimizer.param_groups.remove(second)
            group["params"] = held

    return train


@fault("LOS003", "update_actor", onwards=True)
def second_group_has_its_own_rate() -> Seams:
    """Parameters are sorted into two groups, and the rate that is logged is the first one's: the second learns by ten
    times as much."""
    return {BATCH: _two_groups(lr=lambda rate: rate * 10)}


@fault("LOS003", "update_actor", onwards=True)
def second_group_does_not_decay() -> Seams:
    """All but the first parameter are taken for norms and biases, by a name that has changed: they do not decay."""
    return {BATCH: _two_groups(weight_decay=lambda decay: 0.0)}


# ------------------------------------------------------------------------------------------------ VER006, the tensors


def _trained(module: nn.Module, name: str) -> nn.Parameter:
    return dict(module.named_parameters())[name]


@fault("VER006", "weight_sync")
def one_layer_is_written_back() -> Seams:
    """A copy of one tensor that was made before the step is written back after it: it never moves."""

    def finish(original: Any, worker: TrainingWorker, *args: Any) -> Any:
        parameter = _trained(worker.module, "model.layers.0.mlp.up_proj.weight")
        kept = parameter.detach().clone()
        result = original(worker, *args)
        with torch.no_grad():
            parameter.copy_(kept)
        return result

    return {STEP: finish}


@fault("VER006", "weight_sync", onwards=True)
def embedding_is_in_no_group() -> Seams:
    """Parameters are sorted into groups by name, and none takes the embedding: it never moves."""

    def finish(original: Any, worker: TrainingWorker, *args: Any) -> Any:
        embedding = _trained(worker.module, "model.embed_tokens.weight")
        for group in worker.optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter is not embedding]
        return original(worker, *args)

    return {STEP: finish}


@fault("VER006", "weight_sync")
def one_norm_is_written_back() -> Seams:
    """The vector of one norm is kept in another dtype beside the model, and copied over what the step has made."""

    def finish(original: Any, worker: TrainingWorker, *args: Any) -> Any:
        parameter = _trained(worker.module, "model.norm.weight")
        kept = parameter.detach().clone()
        result = original(worker, *args)
        with torch.no_grad():
            parameter.copy_(kept)
        return result

    return {STEP: finish}


@fault("VER006", "init", step=0)
def embeddings_are_frozen_from_the_start() -> Seams:
    """The embeddings were frozen for an experiment, in the code that loads the model, and stay frozen in every run."""

    def load(original: Any, *args: Any) -> nn.Module:
        module: Any = original(*args)
        module.get_input_embeddings().requires_grad_(False)
        return module

    return {"lineage.trainer.setup.load_module": load}


def _scale(parameters: Iterable[Tensor], factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
