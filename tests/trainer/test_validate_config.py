"""What a configuration is asked before a run, and that it names what the code has."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from lineage.trainer.config import ConfigError, adapt_to_mode, compose, validate_config
from lineage.trainer.config.ppo_trainer import KLControlConfig
from lineage.trainer.config.validate import CHOICES, LOGGERS
from lineage.trainer.kl_control import kl_controller
from lineage.trainer.loss import AGGREGATIONS, KL_ESTIMATORS
from lineage.trainer.optim import SCHEDULES
from lineage.trainer.reward.manager import MANAGERS
from lineage.trainer.stages.update import shuffle_seed
from lineage.trainer.tracking.trackers import SERVICES
from lineage.trainer.training import TrainingWorker
from lineage.trainer.update_plan import UpdatePlan

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"{ACTOR}.optim.weight_decay=-1", f"{ACTOR}.optim.weight_decay=-1.0 must not be negative"),
        (f"{ACTOR}.optim.eps=-1", f"{ACTOR}.optim.eps=-1.0 must not be negative"),
        (f"{ACTOR}.optim.eps=nan", f"{ACTOR}.optim.eps=nan must not be negative"),
        (f"{ACTOR}.optim.lr=nan", f"{ACTOR}.optim.lr=nan must be greater than 0"),
        ("algorithm.filter_groups.max_num_gen_batches=-1", "max_num_gen_batches=-1 must not be negative"),
        ("trainer.log_val_generations=-1", "trainer.log_val_generations=-1 must not be negative"),
        ("algorithm.kl_ctrl.kl_coef=-0.1", "algorithm.kl_ctrl.kl_coef=-0.1 must not be negative"),
        ("trainer.seed=18446744073709551616", "an integer of 64 bits"),
        ("data.seed=-18446744073709551616", "an integer of 64 bits"),
    ],
)
def test_a_number_nothing_can_be_made_of_is_one_line(override, expected):
    """It is refused before torch or numpy meet it."""
    with pytest.raises(ConfigError) as caught:
        validate_config(compose([override]))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", [0, -1, 4294967296, 2**63 - 1, -(2**63)])
def test_every_seed_that_is_allowed_shuffles_the_mini_batches(seed):
    """The order of rows has a generator whatever the seed, and another each epoch."""
    validate_config(compose([f"trainer.seed={seed}"]))
    plan = UpdatePlan(20, None, 2, 1.0, shuffle_seed(seed, global_steps=3, sub_step=1), 0)
    orders = [TrainingWorker._order(20, 20, plan, epoch, rank=0) for epoch in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20, 40))


@pytest.mark.parametrize("key", ["algorithm.filter_groups.enable", "trainer.v1.sampler.sync_refill_failed_groups"])
def test_a_fetch_that_is_replaced_is_said(key):
    """Groups are replaced one by one: a size that was set is not the one that runs, even one that does not divide."""
    (line,) = validate_config(compose([f"{key}=true", "data.gen_batch_size=3"]))
    assert line == f"data.gen_batch_size=3 is replaced by 1: {key}=true replaces groups one by one"
    assert (
        validate_config(compose([f"{key}=true"]))
        == validate_config(compose([f"{key}=true", "data.gen_batch_size=1"]))
        == []
    )


def test_the_dtype_of_a_reference_is_said_to_be_the_actors():
    """Its key is accepted, and has no meaning: the reference is a copy of the actor."""
    typed = ["actor_rollout_ref.ref.fsdp_config.model_dtype=bf16", f"{ACTOR}.fsdp_config.model_dtype=bf16"]
    (line,) = adapt_to_mode(compose(typed), typed)
    assert line.startswith("ignored: actor_rollout_ref.ref.fsdp_config.model_dtype=bf16 has no meaning")


def test_the_choices_are_those_the_code_has():
    """Each list is kept beside its code too, which the configuration must not import: neither may lose a name."""
    estimators = {name.removesuffix("+") for name in CHOICES[f"{ACTOR}.kl_loss_type"]}
    assert estimators == set(CHOICES["algorithm.kl_penalty"]) == set(KL_ESTIMATORS)
    assert set(CHOICES[f"{ACTOR}.loss_agg_mode"]) == set(AGGREGATIONS)
    assert set(CHOICES[f"{ACTOR}.optim.lr_scheduler_type"]) == set(SCHEDULES)
    assert set(CHOICES["reward.reward_manager"]) == set(MANAGERS)
    assert set(LOGGERS) == {"console", "jsonl", *SERVICES}
    for kind in CHOICES["algorithm.kl_ctrl.type"]:
        kl_controller(OmegaConf.structured(KLControlConfig(type=kind)))
