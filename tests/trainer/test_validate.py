"""Validation: the training's own path in a partition of its own, and no trace of it in what is trained."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import duckdb
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lineage import hooks
from lineage.checks import check
from lineage.trainer.agent_loop import AgentLoopBase, SingleTurnAgentLoop, register
from lineage.trainer.config import ConfigError, compose, resolved, validate_config
from lineage.trainer.grpo import PPOTrainerSync
from lineage.trainer.queue import LocalTransferQueue
from lineage.trainer.validation import Answer, best_of, validation_metrics

# 3 groups of 2 sessions, mini-batches of 2 groups: each step is padded, so that PAD002 judges its metrics
TINY = (
    "data.train_batch_size=3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "data.max_response_length=6",
    "trainer.total_training_steps=2",
)
VALIDATED = (
    "data.val_files=builtin:digits",
    "data.val_max_samples=4",
    "data.val_batch_size=3",
    "actor_rollout_ref.rollout.val_kwargs.n=3",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "trainer.val_before_train=true",
    "trainer.test_freq=1",
)


class History:
    """Keeps what is logged."""

    def __init__(self):
        self.steps, self.shown = [], []

    def log(self, metrics, step):
        self.steps.append((step, dict(metrics)))

    def log_generations(self, samples, step):
        self.shown.append((step, samples))


def run(folder, *overrides):
    """Train with a trace in ``folder``; returns the trainer, its history, and what is left in its queue."""
    config = compose([*TINY, *overrides])
    validate_config(config)
    queue, history = LocalTransferQueue(), History()
    trainer = PPOTrainerSync(config, folder=folder, tracking=history, queue=queue)

    async def go():
        await trainer.init()
        await trainer.fit()

    with hooks.recording(folder, config=resolved(config), run={}):
        asyncio.run(go())
    assert queue.resident() == (0, 0, 0)
    return trainer, history


def weights(trainer):
    """The actor's parameters as one vector."""
    return torch.cat([tensor.reshape(-1) for _, tensor in trainer.parts.worker.state_dict()])


def rows(folder, where):
    """Rows of a trace as dicts, in the order of their events."""
    return pq.read_table(folder / "trace.parquet").filter(where).sort_by("seq").to_pylist()


# scores of this one are drawn: a validation that left the generators elsewhere would train something else
NOISY = f"reward.custom_reward_function.path={Path(__file__).with_name('noisy_scorer.py')}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run without validation."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, *run(folder, NOISY)


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """The same run, validated before the first step and after each, with a dump."""
    folder = tmp_path_factory.mktemp("validated")
    dump = f"trainer.validation_data_dir={folder / 'dump'}"
    return folder, *run(folder, NOISY, *VALIDATED, dump, "trainer.log_val_generations=2")


def test_validation_changes_nothing_that_is_trained(plain, validated):
    """Weights, prompts and every row of the training: with and without validation they are the same, bit for bit."""
    assert torch.equal(weights(plain[1]), weights(validated[1]))
    sides = [
        f"""select * exclude (run_id, time_ns, seq, process, parent, slot) from
        read_parquet('{folder / "trace.parquet"}')
        where partition is distinct from 'val' and stage <> 'dump' and field <> 'metrics' and global_steps > 0"""
        for folder in (plain[0], validated[0])
    ]
    con = duckdb.connect()
    assert con.execute(f"select count(*) from ({sides[0]})").fetchall()[0][0] > 100
    assert con.execute(f"({sides[0]}) except all ({sides[1]})").fetchall() == []
    assert con.execute(f"({sides[1]}) except all ({sides[0]})").fetchall() == []


def test_a_validated_trace_is_clean(validated):
    """Its rows share the steps of the training and disturb no check: 3 sessions a prompt, no reorder, no padding."""
    seen = ("KEY001", "KEY002", "KEY005", "QUE001", "QUE002", "QUE003", "REW001", "REW003", "VER001", "MET001")
    seen += ("MET003", "VAL003")
    report = check(validated[0] / "trace.parquet", select=seen)
    assert {verdict.code: str(verdict.kind) for verdict in report.verdicts} == dict.fromkeys(seen, "pass")


def test_its_rows_stand_under_their_own_stages_in_partition_val(validated):
    """Prompts, sessions, scores, sample and clear of a validation are recorded as the training's are."""
    recorded = rows(validated[0], (pc.field("partition") == "val") & (pc.field("global_steps") == 1))
    stages = list(dict.fromkeys(row["stage"] for row in recorded))
    assert stages == ["dataset", "prompt", "rollout", "reward", "sample", "validate", "clear"]
    assert sum(row["n"] for row in recorded if (row["stage"], row["field"]) == ("sample", "key")) == 12
    cleared = {key for row in recorded if row["op"] == "clear" and row["entity"] == "trajectory" for key in row["key"]}
    assert len(cleared) == 12


def test_it_comes_after_the_weights_and_before_the_metrics(validated):
    """verl's order: the rollout has woken with the step's weights, which answer; then the metrics of the step."""
    step = rows(validated[0], pc.field("global_steps") == 1)
    asked = [row for row in step if row["op"] == "generate" and row["partition"] == "val"]
    assert {row["weights"]["version"] for row in asked} == {1}
    assert {row["sampling"]["do_sample"] for row in asked} == {True}
    woken = max(row["seq"] for row in step if row["op"] == "wake")
    counted = min(row["seq"] for row in step if row["stage"] == "metrics")
    assert all(woken < row["seq"] < counted for row in step if row["partition"] == "val")
    first = rows(validated[0], (pc.field("global_steps") == 0) & (pc.field("op") == "generate"))
    assert {row["weights"]["version"] for row in first} == {0}


def test_metrics_are_logged_by_verls_names(validated):
    """Step 0 has those of the validation alone; later steps have them beside their own."""
    _, _, history = validated
    (zero, first), (one, second), _ = history.steps
    assert (zero, one) == (0, 1)
    core = {"val-core/builtin/digits/acc/mean@3", "val-core/builtin/digits/acc/best@3/mean"}
    assert core == {name for name in first if name.startswith("val-core/")}
    assert "val-aux/builtin/digits/reward/mean@3" in first
    assert "val-aux/num_turns/mean" in first
    assert not any(name.startswith(("actor/", "critic/")) for name in first)
    assert core <= second.keys()
    assert "actor/pg_loss" in second
    assert "timing_s/testing" in second


def test_the_dump_has_a_line_an_answer(validated):
    """verl's names, the key, and what the scorer said; some answers are shown too."""
    folder, _, history = validated
    assert sorted(path.name for path in (folder / "dump").iterdir()) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    lines = [json.loads(line) for line in (folder / "dump" / "1.jsonl").read_text().splitlines()]
    assert len(lines) == 12
    assert {"input", "output", "gts", "score", "step", "key", "uid", "prompt_len", "response_len", "acc"} <= set(
        lines[0]
    )
    assert all(line["key"].startswith(line["uid"]) and line["gts"].isdigit() and line["step"] == 1 for line in lines)
    mean = sum(line["score"] for line in lines) / 12
    assert history.steps[1][1]["val-aux/builtin/digits/reward/mean@3"] == pytest.approx(mean)
    assert [(step, len(samples)) for step, samples in history.shown] == [(0, 2), (1, 2), (2, 2)]


def test_val_only_stops_before_the_first_step(tmp_path):
    """Nothing is trained; greedy answers of one session a prompt have mean@1."""
    trainer, history = run(
        tmp_path,
        *("data.val_files=builtin:add", "data.val_max_samples=2"),
        *("trainer.val_before_train=true", "trainer.val_only=true"),
    )
    assert [step for step, _ in history.steps] == [0]
    assert "val-core/builtin/add/acc/mean@1" in history.steps[0][1]
    assert trainer.parts.worker.version == 0
    assert pc.unique(pq.read_table(tmp_path / "trace.parquet")["global_steps"]).to_pylist() == [0]


@register("test_fails_in_validation")
class FailsInValidation(AgentLoopBase):
    """Raises in every session of step 0, which only a validation has."""

    async def run(self, sampling_params, **row):
        if self.session.global_steps == 0:
            raise RuntimeError("no tool server")
        return await SingleTurnAgentLoop(self.context, self.session).run(sampling_params, **row)


@pytest.mark.slow
def test_a_validation_that_fails_wholly_does_not_stop_the_training(tmp_path):
    """It has no answers and so no metrics; the steps go on, and nothing is left in the queue."""
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=test_fails_in_validation"
    _, history = run(tmp_path, *VALIDATED[:-1], loop)
    assert history.steps[0] == (0, {})
    assert [step for step, _ in history.steps] == [0, 1, 2]
    assert all(str(verdict.kind) != "fail" for verdict in check(tmp_path / "trace.parquet").verdicts)


@pytest.mark.slow
def test_a_colocated_reward_validates_too(tmp_path):
    """The rollout sleeps while the sampled answers are scored, and wakes with the weights it had."""
    _, history = run(
        tmp_path, *VALIDATED, "reward.reward_model.enable=true", f"trainer.validation_data_dir={tmp_path}/val"
    )
    assert "val-core/builtin/digits/acc/mean@3" in history.steps[0][1]
    assert "val-aux/builtin/digits/reward/mean@3" in history.steps[0][1]
    lines = [json.loads(line) for line in (tmp_path / "val" / "0.jsonl").read_text().splitlines()]
    assert [line["acc"] for line in lines] == pytest.approx([line["score"] for line in lines])
    ops = [row["op"] for row in rows(tmp_path, (pc.field("partition") == "val") & (pc.field("stage") == "weight_sync"))]
    assert {"sleep", "sync", "wake"} <= set(ops)
    assert all(str(verdict.kind) != "fail" for verdict in check(tmp_path / "trace.parquet").verdicts)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.test_freq=5"], "trainer.test_freq=5 needs prompts to validate on: set data.val_files"),
        (["trainer.val_before_train=true"], "set data.val_files"),
        (["trainer.val_only=true"], "trainer.val_before_train"),
        (["rollout.val_kwargs.do_sample=true"], "val_kwargs.temperature greater than 0"),
        (["rollout.val_kwargs.top_p=0"], r"val_kwargs.top_p=0.0 must be in \(0, 1\]"),
        (["rollout.val_kwargs.top_k=0"], "val_kwargs.top_k=0 must be -1"),
    ],
)
def test_what_a_validation_needs_is_asked_before_the_run(overrides, said):
    """Each mistake is one line with the key."""
    with pytest.raises(ConfigError, match=said):
        validate_config(compose(overrides))


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=4), st.integers(1, 3))
def test_best_of_is_the_mean_over_all_draws(values, n):
    """The closed form is the mean of the best over every draw with replacement."""
    every = [max(draw) for draw in itertools.product(values, repeat=n)]
    assert best_of(values, n) == pytest.approx(sum(every) / len(every), abs=1e-9)


def test_metrics_are_means_over_prompts_by_source():
    """Each source has its own names; best and worst at 2, 4, ... and at the number of sessions."""
    answers = [Answer("u", "a", reward, {}, 2) for reward in (0.0, 1.0, 1.0)]
    answers += [Answer("v", "a", reward, {}, 4) for reward in (0.0, 0.0, 0.0)]
    answers += [Answer("w", "b", 0.5, {"pred": "text", "len": 3}, 3)]
    metrics = validation_metrics(answers, {("a", "u"): 3, ("a", "v"): 3, ("b", "w"): 1})
    assert metrics["val-core/a/reward/mean@3"] == pytest.approx(1 / 3)
    assert metrics["val-core/a/reward/best@3/mean"] == pytest.approx((1 - (1 / 3) ** 3) / 2)
    assert metrics["val-aux/a/reward/worst@2/mean"] == pytest.approx((2 / 3) ** 2 / 2)
    assert metrics["val-aux/b/len/mean@1"] == 3
    assert metrics["val-core/b/reward/mean@1"] == 0.5
    assert not any("pred" in name for name in metrics)
    assert metrics["val-aux/num_turns/mean"] == pytest.approx(21 / 7)


def test_a_failed_session_counts_as_wrong():
    """A source with acc counts 0 for a session without an answer, and says the other figure beside it."""
    answers = [Answer("u", "a", 1.0, {"acc": 1.0})]
    metrics = validation_metrics(answers, {("a", "u"): 2, ("a", "v"): 2})
    assert metrics["val-core/a/acc/mean@2"] == 0.25
    assert metrics["val-aux/a/acc_success_only/mean@1"] == 1.0
