"""The KL in the reward: what is taken off, and how the coefficient moves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lineage.trainer.config.ppo_trainer import KLControlConfig
from lineage.trainer.kl_control import (
    AdaptiveKLController,
    KLControlError,
    KLController,
    apply_kl_penalty,
    kl_controller,
)


def penalised(controller, mask, kind="kl"):
    """Scores 1 on the last token of two rows, whose log-probs are 0.5 and 0.25 above the reference's."""
    scores = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    old = torch.tensor([[-1.0, -1.0], [-2.0, float("nan")]])
    ref = torch.tensor([[-1.5, -1.5], [-2.25, 0.0]])
    return apply_kl_penalty(scores, old, ref, torch.tensor(mask), controller=controller, kind=kind)


def test_the_penalty_comes_off_every_policy_token():
    """Each token loses coefficient times its KL; what lies outside the mask, even NaN, loses nothing."""
    result = penalised(KLController(0.1), [[1, 1], [1, 0]])
    assert result.token_level_rewards.tolist() == [
        pytest.approx([-0.05, 0.95]),
        pytest.approx([0.975, 0.0]),
    ]
    assert result.metrics == {
        "actor/reward_kl_penalty": pytest.approx((0.5 + 0.25) / 2),
        "actor/reward_kl_penalty_coeff": 0.1,
    }


def test_rows_without_a_token_are_not_counted():
    """A padding row is in no mean and is no trajectory to the controller."""
    controller = AdaptiveKLController(0.1, target_kl=0.5 / 1.1, horizon=10)
    result = penalised(controller, [[1, 1], [0, 0]])
    assert result.metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert controller.value == pytest.approx(0.1 * (1 + 0.1 * 1 / 10))


def test_a_batch_of_padding_changes_nothing():
    """No token at all: the rewards are the scores and the coefficient stays."""
    controller = AdaptiveKLController(0.1, target_kl=1.0, horizon=10)
    result = penalised(controller, [[0, 0], [0, 0]])
    assert result.token_level_rewards.tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert controller.value == 0.1


@given(st.floats(0, 100), st.integers(1, 500), st.floats(1e-3, 10))
def test_the_adaptive_coefficient_follows_the_target(current, steps, target):
    """It rises above the target and falls below it, by a fifth of steps / horizon at most."""
    controller = AdaptiveKLController(1.0, target_kl=target, horizon=1000)
    controller.update(current, steps)
    change = controller.value - 1.0
    assert abs(change) <= 0.2 * steps / 1000 + 1e-12
    assert change == 0 or math.copysign(1, change) == math.copysign(1, current - target)


def test_the_fixed_coefficient_stays():
    """Whatever the KL."""
    controller = KLController(0.3)
    controller.update(100.0, 100)
    assert controller.value == 0.3


def test_an_adaptive_controller_goes_on_where_it_was_saved():
    """The state of one, loaded into a new one of the same configuration, gives the same next coefficient."""
    config = OmegaConf.structured(KLControlConfig(type="adaptive", kl_coef=0.5, horizon=100, target_kl=0.1))
    first = kl_controller(config)
    first.update(0.3, 8)
    second = kl_controller(config)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(0.01, 8)
    assert second.value == first.value


def test_an_unknown_controller_is_one_line():
    """The line names the two there are."""
    with pytest.raises(KLControlError, match="choose fixed or adaptive"):
        kl_controller(OmegaConf.structured(KLControlConfig(type="pid")))
