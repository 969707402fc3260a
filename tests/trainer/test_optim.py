"""Learning-rate schedules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lineage.trainer.optim import SCHEDULES, ScheduleError, build_optimizer, build_schedule, schedule


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


def optim(**changes):
    """``actor.optim`` with a warm-up of half the run."""
    known = {
        "lr": 0.1,
        "betas": [0.9, 0.99],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "lr_warmup_steps": -1,
        "lr_warmup_steps_ratio": 0.5,
        "lr_scheduler_type": "constant",
        "min_lr_ratio": 0.0,
        "num_cycles": 0.5,
        "total_training_steps": -1,
    }
    return SimpleNamespace(**{**known, **changes})


def test_schedule_takes_the_run_length_when_it_has_none():
    """A warm-up ratio is a share of the run's steps."""
    config = optim()
    optimizer = build_optimizer(torch.nn.Linear(1, 1), config)
    scheduler = build_schedule(optimizer, config, total_training_steps=8)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)


@given(
    batches=st.integers(1, 5),
    total=st.sampled_from([-1, 4, 10]),
    warmup=st.sampled_from([{"lr_warmup_steps": 0}, {"lr_warmup_steps": 3}, {"lr_warmup_steps_ratio": 0.5}]),
    kind=st.sampled_from(SCHEDULES),
)
def test_several_batches_a_step_stretch_the_whole_schedule(batches, total, warmup, kind):
    """With K batches a training step, the rate after K * s of them is that of s steps of one batch each."""
    config = optim(lr_scheduler_type=kind, total_training_steps=total, **warmup)
    optimizer = build_optimizer(torch.nn.Linear(1, 1), config)
    (one,) = build_schedule(optimizer, config, 10).lr_lambdas
    (several,) = build_schedule(optimizer, config, 10, batches).lr_lambdas
    assert [several(batches * step) for step in range(12)] == pytest.approx([one(step) for step in range(12)])
