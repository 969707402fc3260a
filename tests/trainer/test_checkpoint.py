"""Checkpoints: whole or absent, and everything a run needs is in them."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from lineage.trainer.checkpoint import LATEST, CheckpointError, save_checkpoint, saved_steps
from lineage.trainer.config.actor_rollout_ref import ActorConfig
from lineage.trainer.engine.topology import embedded_topology
from lineage.trainer.training import TrainingWorker


@pytest.fixture
def actor():
    """A small module with one optimiser step behind it."""
    module = torch.nn.Linear(3, 2)
    config = OmegaConf.structured(ActorConfig())
    training = TrainingWorker(module, config, embedded_topology(1, 1), total_training_steps=4, pad_token_id=0)
    module(torch.ones(3)).sum().backward()
    training.optimizer.step()
    training.scheduler.step()
    return training


def test_a_checkpoint_holds_model_optimiser_schedule_random_state_and_place(actor, tmp_path):
    """Each part reads back equal to what the run had."""
    torch.manual_seed(5)
    target = save_checkpoint(tmp_path, 7, actor, {"epoch": 2})
    expected = torch.rand(3)
    assert target == tmp_path / "global_step_7"
    model = torch.load(target / "actor" / "model.pt")
    assert all(torch.equal(model[name], tensor) for name, tensor in actor.module.state_dict().items())
    optim = torch.load(target / "actor" / "optim.pt")
    assert torch.equal(optim["state"][0]["exp_avg"], actor.optimizer.state_dict()["state"][0]["exp_avg"])
    extra = torch.load(target / "actor" / "extra_state.pt", weights_only=False)
    assert extra["lr_scheduler"]["last_epoch"] == 1
    torch.set_rng_state(extra["rng"]["torch"])
    assert torch.equal(torch.rand(3), expected)
    assert torch.load(target / "data.pt") == {"epoch": 2}
    assert (tmp_path / LATEST).read_text() == "7"


def test_only_the_newest_are_kept(actor, tmp_path):
    """max_actor_ckpt_to_keep forgets the oldest by step, not by name."""
    for step in (9, 10, 11):
        save_checkpoint(tmp_path, step, actor, {}, keep=2)
    assert saved_steps(tmp_path) == [10, 11]


def test_saving_again_replaces_the_step(actor, tmp_path):
    """A step saved twice is the second one, and no draft is left."""
    save_checkpoint(tmp_path, 1, actor, {"epoch": 0})
    save_checkpoint(tmp_path, 1, actor, {"epoch": 1})
    assert torch.load(tmp_path / "global_step_1" / "data.pt") == {"epoch": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", LATEST]


def test_a_folder_that_cannot_be_written_is_one_line(actor, tmp_path):
    """A file in the way is named with the key to set."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint of step 1.*trainer\.default_local_dir"):
        save_checkpoint(blocked, 1, actor, {})
