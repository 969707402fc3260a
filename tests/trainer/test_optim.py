"""Learning-rate schedules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lineage.trainer.optim import ScheduleError, build_optimizer, build_schedule, schedule


def test_constant_after_warm_up():
    """The rate rises linearly from 0 and then stays."""
    factor = schedule("constant", warmup=4, total=100)
    assert [factor(step) for step in (0, 2, 4, 99)] == [0.0, 0.5, 1.0, 1.0]


def test_cosine_ends_at_its_floor():
    """Half a cosine from 1 to min_lr_ratio, and no lower after the end."""
    factor = schedule("cosine", warmup=0, total=10, min_lr_ratio=0.1)
    assert factor(0) == 1.0
    assert factor(5) == pytest.approx(0.55)
    assert factor(10) == pytest.approx(0.1)
    assert factor(50) == pytest.approx(0.1)


def test_unknown_schedule_is_named():
    """A wrong name lists the two there are."""
    with pytest.raises(ScheduleError, match="constant or cosine"):
        schedule("linear", 0, 1)


def test_schedule_takes_the_run_length_when_it_has_none():
    """A warm-up ratio is a share of the run's steps."""
    config = SimpleNamespace(
        lr=0.1,
        betas=[0.9, 0.99],
        eps=1e-8,
        weight_decay=0.0,
        lr_warmup_steps=-1,
        lr_warmup_steps_ratio=0.5,
        lr_scheduler_type="constant",
        min_lr_ratio=0.0,
        num_cycles=0.5,
        total_training_steps=-1,
    )
    optimizer = build_optimizer(torch.nn.Linear(1, 1), config)
    scheduler = build_schedule(optimizer, config, total_training_steps=8)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)
