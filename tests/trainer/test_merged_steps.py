"""``parameter_sync_step``: several batches, each with its update, between two weight syncs."""

from __future__ import annotations

import asyncio
import copy

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lineage
from lineage.hooks import parse_key
from lineage.schema import schema
from lineage.trainer.agent_loop import AgentLoopBase, AgentLoopOutput, SingleTurnAgentLoop, register
from lineage.trainer.config import ConfigError, compose, validate_config
from lineage.trainer.grpo import PPOTrainerSync

SMALL_RUN = (
    "data.train_batch_size=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
)
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
TWICE = "trainer.v1.sync.parameter_sync_step=2"
# what a step of several batches could break, and must be seen in one
SEEN = ("BAT001", "BAT002", "KEY002", "KEY003", "KEY005", "KEY006", "LOS001", "MSK002", "PAD001", "QUE002", "VER004")


def attrs(row):
    """The attrs of a row as a dict."""
    return dict(row["attrs"] or {})


@pytest.fixture(scope="module")
def merged(traced_run):
    """Three groups a batch, two a mini-batch: both batches of a step are padded."""
    return traced_run(TWICE, MINI)


def test_a_merged_step_checks_clean_and_leaves_nothing(merged):
    """What a run whose steps have two padded batches could break passes, and the store is empty."""
    assert merged.judged(*SEEN) == dict.fromkeys(SEEN, "pass")
    assert merged.store.resident() == (0, 0, 0)


def test_the_weights_go_once_after_both_batches(merged):
    """A step sleeps once, updates twice and syncs once; the rollout has the version of the step."""
    for step in (1, 2):
        rows = [row for row in merged.rows if row["global_steps"] == step]
        kinds = [row["op"] for row in rows if row["op"] in ("sleep", "optim_step", "wake")]
        assert kinds == ["sleep", *["optim_step"] * 4, "wake"]
    assert merged.trainer.parts.rollout.version == merged.trainer.parts.worker.version == 2


def test_the_batches_of_a_step_share_no_group_and_take_them_in_order(merged):
    """The first batch has the groups that were submitted first, padding rows are each batch's own."""
    for step in (1, 2):
        submitted = merged.select(global_steps=step, stage="prompt", field="uid")[0]["key"]
        sampled = merged.select(global_steps=step, stage="sample", op="produce")
        assert [dict.fromkeys(parse_key(key).uid for key in row["key"]) for row in sampled] == [
            dict.fromkeys(submitted[:3]),
            dict.fromkeys(submitted[3:]),
        ]
        first, second = merged.select(global_steps=step, stage="balance", op="pad", field="key")
        assert not set(first["key"]) & set(second["key"])


def test_update_index_counts_on_over_the_batches(merged):
    """Optimiser steps of the run step are numbered through; attrs tell the batch."""
    for step in (1, 2):
        taken = merged.select(global_steps=step, op="optim_step")
        assert [row["update_index"] for row in taken] == [0, 1, 2, 3]
        minis = [row for row in merged.select(global_steps=step, op="split") if row["micro_batch"] is None]
        assert [attrs(row)["sub_step"] for row in minis] == ["0", "0", "1", "1"]


def test_old_log_probs_of_the_second_batch_are_those_of_the_updated_actor(merged):
    """They are computed when its turn comes: its first update computes them again, and they are the same."""
    compared = merged.select(op="compare", field="log_probs", against="old_log_probs")
    assert sorted({row["update_index"] for row in compared}) == [0, 1, 2, 3]
    again = [row for row in compared if row["update_index"] in (0, 2)]
    assert all(value < 1e-4 for row in again for value in row["absdiff_max"])
    versions = [
        row["weights"]["version"] for row in merged.select(stage="old_log_prob", op="forward", field="log_probs")
    ]
    assert versions == [0, 1, 1, 2]


def test_merged_keys_are_cleared_together(merged):
    """One clear a step takes the keys of both batches, padding included."""
    for step in (1, 2):
        (cleared,) = merged.select(global_steps=step, stage="clear", op="clear")
        dealt = [key for row in merged.select(global_steps=step, op="reorder") for key in row["key"]]
        assert sorted(cleared["key"]) == sorted(dealt)
        assert len(dealt) == 16


def test_update_rows_carry_the_arithmetic(merged):
    """The attrs of an update's rows are the plan: rows, mini-batches, epochs, seed, order, temperature, step."""
    row = merged.select(global_steps=2, stage="update_actor", op="dispatch")[0]
    known = attrs(row)
    assert {name: known[name] for name in ("trajectories", "rows", "mini_batch_size", "mini_batches", "updates")} == {
        "trajectories": "6",
        "rows": "8",
        "mini_batch_size": "4",
        "mini_batches": "2",
        "updates": "2",
    }
    named = {name: known[name] for name in ("global_batch_size", "epochs", "seed", "shuffle", "temperature")}
    assert named == {"global_batch_size": "4", "epochs": "1", "seed": "42", "shuffle": "False", "temperature": "1.0"}
    assert (known["global_steps"], known["sub_step"], known["first_update"]) == ("2", "0", "0")


@register("test_second_batch_fails")
class SecondBatchFails(AgentLoopBase):
    """Raises in all sessions of two groups that an unshuffled step has in its second batch."""

    async def run(self, sampling_params, **row) -> AgentLoopOutput:
        if row["index"] % 6 in (3, 4):
            raise RuntimeError("no tool server")
        return await SingleTurnAgentLoop(self.context, self.session).run(sampling_params, **row)


@pytest.mark.slow
def test_batches_of_unequal_size_check_clean(traced_run):
    """Failed groups make one batch of a step smaller than the other: each is dealt equally by itself."""
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=test_second_batch_fails"
    run = traced_run(TWICE, MINI, loop, "data.shuffle=false")
    assert [len(row["key"]) for row in run.select(global_steps=1, op="dispatch")] == [4, 4, 2, 2]
    assert [row["update_index"] for row in run.select(global_steps=1, op="optim_step")] == [0, 1, 2]
    kinds = run.judged()
    assert "fail" not in kinds.values()
    assert {code: kinds[code] for code in SEEN} == dict.fromkeys(SEEN, "pass")
    assert run.store.resident() == (0, 0, 0)


def swap_places(rows):
    """The second batch's reorder mixes up where two of its rows were."""
    places = select(rows, op="reorder")[1]["source_index"]
    places[0], places[1] = places[1], places[0]


def exchange_keys(rows):
    """A key of the first batch stands in the second one's reorder, and the other way round."""
    first, second = (row["key"] for row in select(rows, op="reorder")[:2])
    first[0], second[0] = second[0], first[0]


def lose_a_rank(rows):
    """The second batch is dealt to one rank of two."""
    rows.remove(select(rows, op="dispatch")[3])


def select(rows, **columns):
    """Rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in columns.items())]


@pytest.mark.parametrize(
    ("fault", "code"), [(swap_places, "KEY003"), (exchange_keys, "KEY003"), (lose_a_rank, "BAT001")]
)
def test_a_fault_in_one_batch_of_a_recorded_step_fails_its_code(fault, code, merged, tmp_path):
    """What leaves the keys of the whole step as they were is seen in the batch where it happened."""
    rows = copy.deepcopy(merged.rows)
    fault(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema()), tmp_path / "trace.parquet")
    report = lineage.check(tmp_path / "trace.parquet", select=["KEY003", "BAT001"])
    assert {verdict.code for verdict in report.verdicts if verdict.errors} == {code}


def test_metrics_are_of_the_whole_step(merged):
    """Data metrics are over the real rows of both batches, times add up, and the schedule moved once a batch."""
    metrics = merged.metrics[1]
    (scored,) = merged.select(global_steps=1, op="score")
    assert len(scored["key"]) == 12
    assert metrics["critic/score/mean"] == pytest.approx(sum(scored["sum"]) / 12)
    assert metrics["training/global_step"] == 1.0
    assert merged.trainer.parts.worker.actor.scheduler.last_epoch == 4


@pytest.mark.slow
def test_shuffled_rows_come_once_an_epoch_in_an_order_of_each_update(traced_run):
    """Shuffling leaves every row in every epoch once; epochs, batches and steps differ in their order."""
    run = traced_run(TWICE, MINI, "actor_rollout_ref.actor.shuffle=true", "actor_rollout_ref.actor.ppo_epochs=2")
    kinds = run.judged()
    assert "fail" not in kinds.values()
    assert {code: kinds[code] for code in SEEN} == dict.fromkeys(SEEN, "pass")
    orders = {}
    for row in run.select(stage="update_actor", op="split"):
        if row["micro_batch"] is None:
            at = (row["global_steps"], attrs(row)["sub_step"], row["ppo_epoch"])
            orders.setdefault(at, []).extend(row["key"])
    dispatched = {}
    for row in run.select(stage="update_actor", op="dispatch"):
        dispatched.setdefault((row["global_steps"], attrs(row)["sub_step"]), []).extend(row["key"])
    assert len(orders) == 8
    for (step, sub_step, _), keys in orders.items():
        assert sorted(keys) == sorted(dispatched[step, sub_step])
    places = {at: [dispatched[at[:2]].index(key) for key in keys] for at, keys in orders.items()}
    assert len({tuple(place) for place in places.values()}) > 4


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.v1.sync.parameter_sync_step=4"], "is not a multiple of trainer.v1.sync.parameter_sync_step=4"),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=4", TWICE], "greater than data.train_batch_size=6 / param"),
        ([TWICE, "algorithm.filter_groups.enable=true"], "algorithm.filter_groups.enable=true with trainer.v1.sync"),
        ([TWICE, "trainer.v1.sampler.sync_refill_failed_groups=true"], "sync_refill_failed_groups=true with trainer"),
        (
            ["reward.reward_model.enable=true", "algorithm.filter_groups.enable=true"],
            "filter_groups.enable=true with reward.reward_model.enable=true",
        ),
    ],
)
def test_what_cannot_be_merged_is_one_line(overrides, said):
    """A batch that does not divide, or a rollout that would have to wake again, is refused before the run."""
    with pytest.raises(ConfigError) as caught:
        validate_config(compose([*SMALL_RUN, *overrides]))
    assert said in str(caught.value)


def test_a_merged_batch_that_does_not_divide_is_warned_of():
    """The warning counts the rows of one batch of the step."""
    (line,) = validate_config(compose([*SMALL_RUN, TWICE]))
    assert "data.train_batch_size=6 / parameter_sync_step=2 is not a multiple" in line
    assert "each batch is padded from 6 to 8 rows" in line


def test_the_schedule_of_a_merged_run_ends_with_its_last_step(tmp_path):
    """Counts of training steps in the configuration are stretched as the run's own is: no step trains at rate 0."""
    cosine = ("optim.lr_scheduler_type=cosine", "optim.total_training_steps=10", "optim.lr_warmup_steps=2")
    config = compose([*SMALL_RUN, TWICE, *(f"actor_rollout_ref.actor.{line}" for line in cosine)])
    trainer = PPOTrainerSync(config, folder=tmp_path)
    asyncio.run(trainer.init())
    (factor,) = trainer.parts.worker.actor.scheduler.lr_lambdas
    assert [factor(batch) for batch in (2, 4, 12, 20)] == pytest.approx([0.5, 1.0, 0.5, 0.0], abs=1e-12)
