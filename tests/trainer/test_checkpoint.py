"""Checkpoints: whole or absent, everything a run needs is in them, and one that does not fit changes nothing."""

from __future__ import annotations

import errno
import json
import pickle
import re
import resource

import pytest
import torch
from omegaconf import OmegaConf

from lineage.trainer.checkpoint import (
    LATEST,
    CheckpointError,
    find_checkpoint,
    read_checkpoint,
    restore,
    save_checkpoint,
    saved_steps,
)
from lineage.trainer.config.actor_rollout_ref import ActorConfig
from lineage.trainer.engine.model_state import load_state, save_state
from lineage.trainer.engine.topology import embedded_topology
from lineage.trainer.training import TrainingWorker


class Counter:
    """Something with a state."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Worker(TrainingWorker):
    """Saves and loads what it trains."""

    def save_checkpoint(self, folder):
        save_state(folder, self)

    def load_checkpoint(self, folder, global_steps):
        return load_state(folder, self)


def make_actor(*, width=3, steps=4, lr=None, kind="cosine"):
    """A small module under training, not yet stepped."""
    torch.manual_seed(1)
    module = torch.nn.Linear(width, 2)
    config = OmegaConf.structured(ActorConfig())
    config.optim.lr_scheduler_type = kind
    if lr is not None:
        config.optim.lr = lr
    return Worker(module, config, embedded_topology(1, 1), total_training_steps=steps, pad_token_id=0)


def take_step(training):
    """One optimiser step and one of the schedule."""
    training.module(torch.ones(training.module.in_features)).square().sum().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.scheduler.step()


@pytest.fixture
def actor():
    """A small module with one optimiser step behind it."""
    training = make_actor()
    take_step(training)
    return training


def test_a_restored_run_takes_the_same_next_step(actor, tmp_path):
    """Weights, moments, schedule, place in the data and other states are those of the run that saved."""
    folder = save_checkpoint(tmp_path, 7, actor, Counter(2), stateful={"kl_ctrl": Counter(5)})
    assert folder == tmp_path / "global_step_7"
    assert (tmp_path / LATEST).read_text() == "7"
    other, stream, extra = make_actor(), Counter(), Counter()
    checkpoint = read_checkpoint(folder)
    restore(checkpoint, other, stream, stateful={"kl_ctrl": extra})
    assert (checkpoint.global_steps, stream.value, extra.value) == (7, 2, 5)
    assert other.optimizer.param_groups[0]["lr"] == actor.optimizer.param_groups[0]["lr"]
    for training in (actor, other):
        take_step(training)
    assert torch.equal(actor.module.weight, other.module.weight)
    assert other.optimizer.param_groups[0]["lr"] == actor.optimizer.param_groups[0]["lr"]


def test_what_the_configuration_sets_is_this_runs_own(actor, tmp_path):
    """A resumed run has its own peak rate, at the place of the schedule the checkpoint was at."""
    folder = save_checkpoint(tmp_path, 1, actor, Counter())
    other = make_actor(lr=0.5, steps=8)
    restore(read_checkpoint(folder), other, Counter())
    expected = make_actor(lr=0.5, steps=8)
    take_step(expected)
    assert other.optimizer.param_groups[0]["lr"] == expected.optimizer.param_groups[0]["lr"]


def test_only_the_newest_are_kept(actor, tmp_path):
    """max_actor_ckpt_to_keep forgets the oldest by step, not by name, and none of a later step."""
    save_checkpoint(tmp_path, 99, actor, Counter())
    for step in (9, 10, 11):
        save_checkpoint(tmp_path, step, actor, Counter(), keep=2)
    assert saved_steps(tmp_path) == [10, 11, 99]


def test_saving_again_replaces_the_step(actor, tmp_path):
    """A step saved twice is the second one, and no draft is left."""
    save_checkpoint(tmp_path, 1, actor, Counter(0))
    save_checkpoint(tmp_path, 1, actor, Counter(1))
    assert read_checkpoint(tmp_path / "global_step_1").data == {"value": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", LATEST]


def test_a_folder_that_cannot_be_written_is_one_line(actor, tmp_path):
    """A file in the way is named with the key to set."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint of step 1.*trainer\.default_local_dir"):
        save_checkpoint(blocked, 1, actor, Counter())


@pytest.mark.parametrize("limit", [0, 1, 1200])
def test_a_disk_that_takes_no_more_is_one_line_and_leaves_nothing(actor, tmp_path, limit):
    """torch has an error of its own for it; the checkpoint before stays the newest, and no draft lies about."""
    save_checkpoint(tmp_path, 1, actor, Counter())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match=r"checkpoint of step 2.*free some space there") as caught:
            save_checkpoint(tmp_path, 2, actor, Counter())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", LATEST]


def test_a_tracker_that_cannot_be_written_leaves_no_draft_of_it(actor, tmp_path, monkeypatch):
    """The step is whole, the tracker file is the one of before."""
    save_checkpoint(tmp_path, 1, actor, Counter())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(tmp_path, 2, actor, Counter())
    assert (tmp_path / LATEST).read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", "global_step_2", LATEST]


def test_auto_takes_the_newest_or_starts_anew(actor, tmp_path):
    """resume_mode=auto follows the tracker file; where nothing was saved there is nothing to go on from."""
    assert find_checkpoint("auto", tmp_path / "nowhere", None) is None
    for step in (4, 12):
        save_checkpoint(tmp_path, step, actor, Counter())
    assert find_checkpoint("auto", tmp_path, None) == tmp_path / "global_step_12"
    assert find_checkpoint("disable", tmp_path, str(tmp_path / "global_step_4")) is None
    path = tmp_path / "global_step_4"
    assert find_checkpoint("resume_path", tmp_path / "elsewhere", f"{path}/") == path


@pytest.mark.parametrize(
    ("mode", "path", "said"),
    [
        ("resume_path", None, "needs trainer.resume_from_path"),
        ("resume_path", "{}/checkpoints", "does not end in global_step_<n>"),
        ("resume_path", "{}/global_step_5", "no such folder; there is global_step_4"),
        ("resume_path", "{}/global_step_x", "does not end in global_step_<n>"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_one_line(actor, tmp_path, mode, path, said):
    """What was asked for, and what there is."""
    save_checkpoint(tmp_path, 4, actor, Counter())
    with pytest.raises(CheckpointError, match=said) as error:
        find_checkpoint(mode, tmp_path, path and path.format(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"), [("five", "does not hold the number"), ("9", "says 9, and there is no"), (None, "but no latest")]
)
def test_a_tracker_that_lies_does_not_start_a_run_anew(actor, tmp_path, text, said):
    """Starting from step 1 would overwrite what is there."""
    save_checkpoint(tmp_path, 4, actor, Counter())
    (tmp_path / LATEST).unlink() if text is None else (tmp_path / LATEST).write_text(text)
    with pytest.raises(CheckpointError, match=said) as error:
        find_checkpoint("auto", tmp_path, None)
    assert "global_step_4" in str(error.value)


@pytest.mark.parametrize("file", ["actor/.metadata", "actor/__0_0.distcp", "extra_state.pt", "data.pt", "run.json"])
@pytest.mark.parametrize("damage", ["missing", "short", "other"])
def test_a_damaged_checkpoint_is_one_line_that_names_the_file(actor, tmp_path, file, damage):
    """Missing, cut short, or something else under its name."""
    folder = save_checkpoint(tmp_path, 4, actor, Counter())
    path = folder / file
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:20] if damage == "short" else b"not a checkpoint")
    other, stream = make_actor(), Counter(8)
    before = other.module.weight.detach().clone()
    with pytest.raises(CheckpointError, match=re.escape(file.rpartition("/")[2])) as error:
        restore(read_checkpoint(folder), other, stream)
    assert "\n" not in str(error.value)
    assert torch.equal(other.module.weight, before)
    assert (stream.value, len(other.optimizer.state)) == (8, 0)


def test_reading_a_checkpoint_runs_no_code_of_it(actor, tmp_path):
    """A file that would call a function when it is unpickled is refused as damaged."""

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    folder = save_checkpoint(tmp_path, 4, actor, Counter())
    metadata, data = folder / "actor" / ".metadata", (folder / "data.pt").read_bytes()
    torch.save({"evil": Evil()}, folder / "data.pt")
    with pytest.raises(CheckpointError, match=r"data\.pt is damaged, or not"):
        restore(read_checkpoint(folder), make_actor(), Counter())
    (folder / "data.pt").write_bytes(data)
    restore(read_checkpoint(folder), make_actor(), Counter())
    metadata.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged, or not"):
        restore(read_checkpoint(folder), make_actor(), Counter())
    assert not (tmp_path / "made").exists()


def test_a_renamed_folder_is_told(actor, tmp_path):
    """The step in the name is where the run would go on: it must be the step it was saved after."""
    folder = save_checkpoint(tmp_path, 4, actor, Counter())
    with pytest.raises(CheckpointError, match="saved after step 4"):
        read_checkpoint(folder.rename(tmp_path / "global_step_8"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 5}, r"weight is float32 \[2, 3\], in this run's model float32 \[2, 5\]"),
        ({"settings": {"trainer.seed": 2}}, r"trainer\.seed=1, this run has 2"),
        ({"stateful": {"kl_ctrl": Counter()}}, "keeps the state of nothing else, this run has kl_ctrl"),
    ],
)
def test_a_checkpoint_of_another_run_changes_nothing(actor, tmp_path, change, said):
    """Another model, another seed or other parts: one line that says which, before anything is touched."""
    folder = save_checkpoint(tmp_path, 4, actor, Counter(3), settings={"trainer.seed": 1})
    other, stream = make_actor(width=change.pop("width", 3)), Counter(8)
    before = other.module.weight.detach().clone()
    with pytest.raises(CheckpointError, match=said) as error:
        restore(read_checkpoint(folder), other, stream, **{"settings": {"trainer.seed": 1}, **change})
    assert "\n" not in str(error.value)
    assert torch.equal(other.module.weight, before)
    assert stream.value == 8


def test_the_settings_are_readable_without_torch(actor, tmp_path):
    """run.json says after which step it was saved, and by what run."""
    folder = save_checkpoint(tmp_path, 4, actor, Counter(), settings={"data.train_files": ["a.parquet"]})
    told = json.loads((folder / "run.json").read_text())
    assert told == {"global_steps": 4, "settings": {"data.train_files": ["a.parquet"]}}
