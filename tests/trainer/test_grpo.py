"""The trainer end to end on the tiny model."""

from __future__ import annotations

import asyncio
import functools
import json

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from lineage import hooks
from lineage.checks.online import StepChecker
from lineage.trainer.agent_loop import AgentLoopBase, AgentLoopOutput, SingleTurnAgentLoop, register
from lineage.trainer.checkpoint import saved_steps
from lineage.trainer.config import compose, validate_config
from lineage.trainer.grpo import PPOTrainerSync
from lineage.trainer.queue import LocalTransferQueue
from lineage.trainer.replay_buffer import ReplayBufferError

SMALL = (
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "data.max_response_length=8",
)


class History:
    """Keeps every step's metrics."""

    def __init__(self):
        self.steps = []

    def log(self, metrics, step):
        self.steps.append((step, dict(metrics)))


def train_in(folder, *overrides, steps=2, base=SMALL):
    """Train with overrides; returns the trainer, with its queue and history."""
    config = compose([*base, f"trainer.total_training_steps={steps}", *overrides])
    validate_config(config)
    queue, history = LocalTransferQueue(), History()
    trainer = PPOTrainerSync(config, folder=folder, tracking=history, queue=queue)

    async def go():
        await trainer.init()
        await trainer.fit()

    asyncio.run(go())
    trainer.store, trainer.history = queue, history.steps
    return trainer


@pytest.fixture
def train(tmp_path):
    """:func:`train_in` a folder of the test's own."""
    return functools.partial(train_in, tmp_path)


PADDED = "data.train_batch_size=3"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Two steps without a trace, of a batch that needs padding; not to be changed."""
    return train_in(tmp_path_factory.mktemp("plain"), PADDED)


def weights(trainer):
    """The actor's parameters as one vector."""
    return torch.cat([tensor.reshape(-1).float() for _, tensor in trainer.parts.worker.state_dict()])


def test_two_steps_finish_and_leave_nothing(plain):
    """Both steps are logged, the store is empty after the last clear, and the rollout has the last weights."""
    assert [step for step, _ in plain.history] == [1, 2]
    assert plain.store.resident() == (0, 0, 0)
    assert plain.parts.worker.version == plain.parts.rollout.version == 2
    sent, received = dict(plain.parts.worker.state_dict()), plain.parts.rollout.resident()
    assert all(torch.equal(tensor, received[name]) for name, tensor in sent.items())


def test_rollout_and_trainer_agree(train):
    """The sampler's probabilities are the trainer's within 1e-3, at a temperature, in every step."""
    trainer = train("actor_rollout_ref.rollout.temperature=0.8")
    for _, metrics in trainer.history:
        assert metrics["training/rollout_probs_diff_valid"] == 1.0
        assert metrics["training/rollout_probs_diff_max"] < 1e-3


def test_same_seed_same_weights(plain, train):
    """Two runs of one seed end in identical bits, whatever else has drawn random numbers; another seed does not."""
    torch.manual_seed(12345)
    torch.rand(7)
    assert torch.equal(weights(plain), weights(train(PADDED)))
    assert not torch.equal(weights(plain), weights(train(PADDED, "trainer.seed=43")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    [
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.rollout.agent.num_workers=3",
    ],
)
def test_how_the_work_is_cut_does_not_change_the_first_update(train, override):
    """Ranks, micro-batches and workers change the update by no more than rounding."""
    # one mini-batch: with several, ranks hold other rows and so put others into each mini-batch
    whole = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    # eps of the size of the gradients: AdamW's first step is else the sign of gradients that may round to 0
    smooth = "actor_rollout_ref.actor.optim.eps=0.01"
    first = weights(train(whole, smooth, steps=1))
    assert torch.allclose(first, weights(train(whole, smooth, override, steps=1)), atol=2e-6)


def test_a_batch_that_does_not_divide_is_padded(train):
    """Padding rows make it divide, change no data metric's count, and are cleared with the rest."""
    trainer = train("data.train_batch_size=3", "trainer.n_gpus_per_node=2")
    for _, metrics in trainer.history:
        assert metrics["response_length/mean"] > 2.0
        assert metrics["prompt_length/min"] > 10
        assert metrics["actor/skipped_steps"] == 0.0
    assert trainer.store.resident() == (0, 0, 0)


def test_padding_does_not_change_the_metrics(train):
    """The same prompts give the same data metrics whether the batch needed padding rows or not."""
    plain = train("data.train_batch_size=3", "actor_rollout_ref.actor.ppo_mini_batch_size=3", steps=1).history[0][1]
    padded = train("data.train_batch_size=3", steps=1).history[0][1]
    names = [name for name in plain if name.startswith(("critic/", "response_", "prompt_", "policy_", "num_turns"))]
    assert len(names) > 15
    for name in names:
        assert padded[name] == plain[name], name


def test_optimiser_steps_follow_the_formula(train):
    """E x B / M optimiser steps a training step."""
    trainer = train("actor_rollout_ref.actor.ppo_epochs=2", steps=2)
    state = next(iter(trainer.parts.worker.actor.optimizer.state.values()))
    assert state["step"] == 2 * 2 * 4 / 2


def test_without_kl_there_is_no_reference(train):
    """use_kl_loss=false keeps no frozen copy and runs no reference stage."""
    trainer = train("actor_rollout_ref.actor.use_kl_loss=false", steps=1)
    assert trainer.parts.worker.reference is None
    assert "timing_s/ref" not in trainer.history[0][1]


def test_without_sampler_log_probs_training_goes_on(train):
    """calculate_log_probs=false leaves the comparison out."""
    metrics = train("actor_rollout_ref.rollout.calculate_log_probs=false", steps=1).history[0][1]
    assert "training/rollout_probs_diff_max" not in metrics


def test_checkpoints_and_dumps_are_written_when_asked(train, tmp_path):
    """save_freq saves those steps and the last one; rollout_data_dir gets one file a step."""
    train("trainer.save_freq=2", f"trainer.rollout_data_dir={tmp_path / 'dump'}", steps=3)
    assert saved_steps(tmp_path / "checkpoints") == [2, 3]
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["1.jsonl", "2.jsonl", "3.jsonl"]


@register("test_always_fails")
class AlwaysFails(AgentLoopBase):
    """Raises in every session."""

    async def run(self, sampling_params, **row) -> AgentLoopOutput:
        raise RuntimeError("no tool server")


def test_a_batch_that_failed_wholly_ends_the_run_with_the_reason(train):
    """The error is one line with the first session's reason."""
    with pytest.raises(ReplayBufferError, match=r"all 4 prompt groups failed.*no tool server"):
        train("actor_rollout_ref.rollout.agent.default_agent_loop=test_always_fails")


@register("test_first_session_only")
class FirstSessionOnly(AgentLoopBase):
    """Answers in session 0 and raises in every other."""

    async def run(self, sampling_params, **row) -> AgentLoopOutput:
        if self.session.session_id:
            raise RuntimeError("no tool server")
        return await SingleTurnAgentLoop(self.context, self.session).run(sampling_params, **row)


def test_survivors_of_failed_groups_train_on_nothing(train):
    """Groups of one survivor are padded to a whole batch, have advantage 0, and leave nothing behind."""
    trainer = train(
        "actor_rollout_ref.rollout.agent.default_agent_loop=test_first_session_only", "data.train_batch_size=3"
    )
    for _, metrics in trainer.history:
        assert metrics["critic/advantages/max"] == metrics["critic/advantages/min"] == 0.0
        assert metrics["critic/score/max"] > metrics["critic/score/min"]
    assert trainer.store.resident() == (0, 0, 0)


def test_tracing_changes_no_bit(plain, train, tmp_path):
    """A traced run, and one checked at every step, end in the weights of an untraced one; no row was dropped."""
    checker = StepChecker("raise")
    for name, options in (("traced", {}), ("checked", {"on_step_sealed": checker})):
        with hooks.recording(tmp_path / name, config={}, run={}, **options) as recorder:
            traced = weights(train(PADDED))
        assert recorder.enabled
        assert torch.equal(weights(plain), traced)
        metadata = pq.read_metadata(tmp_path / name / "trace.parquet").metadata
        assert json.loads(metadata[b"lineage.state"])["dropped"]["rows"] == 0
    assert checker.judged > 1


def test_a_step_runs_its_stages_in_the_seeds_order(train, tmp_path):
    """The events of a step come stage after stage; the rollout sleeps once sampled, and wakes with the new weights."""
    with hooks.recording(tmp_path / "run", config={}, run={}):
        train("data.train_batch_size=3", "trainer.save_freq=1", steps=1)
    table = pq.read_table(tmp_path / "run" / "trace.parquet", columns=["global_steps", "seq", "stage", "op"])
    events = sorted(table.filter(pc.field("global_steps") == 1).to_pylist(), key=lambda row: row["seq"])
    named = [f"weight_sync {row['op']}" if row["stage"] == "weight_sync" else row["stage"] for row in events]
    assert list(dict.fromkeys(named)) == [
        "dataset",
        "prompt",
        "rollout",
        "reward",
        "sample",
        "weight_sync sleep",
        "balance",
        "old_log_prob",
        "ref_log_prob",
        "advantage",
        "update_actor",
        "checkpoint",
        "weight_sync sync",
        "weight_sync compare",
        "weight_sync cache_reset",
        "weight_sync wake",
        "metrics",
        "clear",
    ]


@pytest.mark.slow
def test_the_reward_moves(train):
    """Thirty steps on the built-in task raise the mean score by half at least."""
    trainer = train(steps=30, base=())
    scores = [metrics["critic/score/mean"] for _, metrics in trainer.history]
    assert sum(scores[-5:]) > 1.5 * sum(scores[:5])
