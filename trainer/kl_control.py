"""The KL to the reference in the reward: its coefficient, fixed or adaptive, and the penalty it is taken off by.

Sources: adaptive controller arXiv:1909.08593, verl ``AdaptiveKLController`` and ``apply_kl_penalty``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lineage.hooks import UserError
from lineage.trainer.loss import kl_penalty


class KLControlError(UserError):
    """An unknown kind of controller."""


class KLController:
    """A coefficient that stays (``algorithm.kl_ctrl.type=fixed``).

    It has no state: a run that goes on from a checkpoint has the one of its own configuration.
    """

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to follow."""


class AdaptiveKLController(KLController):
    """A coefficient that rises while the KL is above its target and falls below it, by at most a fifth a horizon.

    Args:
        target_kl: KL it aims at.
        horizon: trajectories in which the coefficient changes by the whole error.
    """

    def __init__(self, kl_coef: float, target_kl: float, horizon: int) -> None:
        super().__init__(kl_coef)
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move by the KL just seen, over so many trajectories."""
        error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from :meth:`state_dict`."""
        self.value = float(state["value"])


def kl_controller(config: Any) -> KLController:
    """The controller of ``algorithm.kl_ctrl``.

    Raises:
        KLControlError: an unknown type.
    """
    if config.type == "fixed":
        return KLController(config.kl_coef)
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    raise KLControlError(f"algorithm.kl_ctrl.type={config.type!r} is unknown: choose fixed or adaptive")


@dataclass(frozen=True)
class Penalised:
    """Rewards after the penalty.

    Attributes:
        token_level_rewards: ``(rows, response_len)``: scores less the coefficient times the KL, on policy tokens.
        metrics: ``actor/reward_kl_penalty``, the mean KL a token, and ``actor/reward_kl_penalty_coeff``, as used.
        trajectories: those the mean is over, which the controller is told.
        next_coef: the coefficient as the controller left it.
    """

    token_level_rewards: Tensor
    metrics: dict[str, float]
    trajectories: int
    next_coef: float

    def attrs(self) -> dict[str, str]:
        """What it takes to replay the controller, as attributes of the rewards' row."""
        current, coefficient = self.metrics.values()
        said = {"kl": current, "kl_coef": coefficient, "kl_rows": self.trajectories, "kl_coef_next": self.next_coef}
        return {name: repr(value) for name, value in said.items()}


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_prob: Tensor,
    ref_log_prob: Tensor,
    mask: Tensor,
    *,
    controller: KLController,
    kind: str,
) -> Penalised:
    """Take the KL off the scores, then move the coefficient.

    The KL is the mean over rows of each row's mean a token. Rows without a token (padding) are not counted, neither in
    that mean nor in the trajectories the controller is told (verl counts them as KL 0).

    Args:
        token_level_scores, old_log_prob, ref_log_prob, mask: ``(rows, response_len)``.
        kind: ``algorithm.kl_penalty``.
    """
    keep = mask.bool()
    kl = kl_penalty(old_log_prob, ref_log_prob, kind)
    kl = torch.where(keep, kl, torch.zeros_like(kl))
    rows = keep.any(dim=-1)
    count = int(rows.sum())
    per_row = kl.double().sum(dim=-1)[rows] / keep.sum(dim=-1)[rows]
    current = float(per_row.mean()) if count else 0.0
    coefficient = controller.value
    rewards = token_level_scores - coefficient * kl
    controller.update(current, n_steps=count)
    metrics = {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": coefficient}
    return Penalised(rewards, metrics, count, controller.value)
