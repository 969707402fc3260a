"""AdamW and its learning-rate schedule (verl ``optim`` config, ``get_*_schedule_with_warmup``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lineage.hooks import UserError

SCHEDULES = ("constant", "cosine")


class ScheduleError(UserError):
    """A learning-rate schedule that is not known or not possible."""


def build_optimizer(module: nn.Module, config: Any) -> AdamW:
    """AdamW over the parameters that train."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return AdamW(
        parameters,
        lr=config.lr,
        betas=(float(config.betas[0]), float(config.betas[1])),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def build_schedule(optimizer: AdamW, config: Any, total_training_steps: int, batches_per_step: int = 1) -> LambdaLR:
    """Linear warm-up, then ``constant`` or ``cosine``; it moves once a batch, as verl's does.

    Args:
        config: ``actor.optim``; its ``total_training_steps`` of -1 takes the run's.
        total_training_steps: training steps of the run.
        batches_per_step: batches of a training step; every count of training steps becomes one of batches.
    """
    steps = config.total_training_steps if config.total_training_steps > 0 else total_training_steps
    total = steps * batches_per_step
    by_ratio = config.lr_warmup_steps < 0
    warmup = int(config.lr_warmup_steps_ratio * total) if by_ratio else config.lr_warmup_steps * batches_per_step
    factor = schedule(config.lr_scheduler_type, warmup, total, config.min_lr_ratio, config.num_cycles)
    return LambdaLR(optimizer, factor)


def schedule(
    kind: str, warmup: int, total: int, min_lr_ratio: float = 0.0, num_cycles: float = 0.5
) -> Callable[[int], float]:
    """Factor of the peak learning rate by training step, counted from 0.

    Raises:
        ScheduleError: unknown kind.
    """
    if kind not in SCHEDULES:
        raise ScheduleError(f"actor.optim.lr_scheduler_type={kind!r} is unknown: choose {' or '.join(SCHEDULES)}")

    def factor(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        if kind == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        cosine = 0.5 * (1.0 + math.cos(2.0 * math.pi * num_cycles * progress))
        return min_lr_ratio + (1.0 - min_lr_ratio) * max(0.0, cosine)

    return factor
