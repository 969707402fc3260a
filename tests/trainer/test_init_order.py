"""The life before the first step: the order of the initialisation, as the trace tells it."""

from __future__ import annotations

import asyncio

import pyarrow.parquet as pq
import pytest

from lineage import hooks
from lineage.trainer import setup
from lineage.trainer.config import ConfigError, compose, validate_config
from lineage.trainer.dataset import DatasetError
from lineage.trainer.grpo import PPOTrainerSync

ORDER = [
    "_init_tokenizer",
    "_init_dataloader",
    "create_resource_pool",
    "spawn",
    "init_model",
    "RewardLoopManager",
    "LLMServerManager",
    "CheckpointEngineManager",
    "sleep",
    "_load_checkpoint",
    "init_agent_loop_manager",
    "sync",
    "cache_reset",
    "wake",
]


def initialise(folder, *overrides):
    """Everything up to the first step; returns the trace's rows of step 0 in the order of their events."""
    trainer = PPOTrainerSync(compose(overrides), folder=folder)

    async def go():
        await trainer.init()
        trainer.init_agent_loop_manager()
        trainer.on_init_end()

    with hooks.recording(folder, config={}, run={}):
        asyncio.run(go())
    return pq.read_table(folder / "trace.parquet").sort_by("seq").to_pylist()


def step_of(row):
    """The word of ``ORDER`` a row stands for: what was made, or what the weights did."""
    return row["op"] if row["stage"] == "weight_sync" else row["field"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of two nodes with a reference and validation prompts."""
    return initialise(
        tmp_path_factory.mktemp("run"),
        *("trainer.nnodes=2", "trainer.n_gpus_per_node=2"),
        *("data.val_files=builtin:add", "data.val_max_samples=5", "data.train_max_samples=24"),
    )


def test_init_is_traced_in_the_order_of_the_seeds(recorded):
    """Tokenizer, data, pool, workers, engine, reward, rollout, weight sync; sleep, load; sessions; first sync."""
    assert {row["global_steps"] for row in recorded} == {0}
    steps = [step_of(row) for row in recorded if step_of(row) in ORDER]
    assert list(dict.fromkeys(steps)) == ORDER


def test_each_step_says_what_it_made(recorded):
    """Sizes and roles, no text and no path."""
    made = {row["field"]: dict(row["attrs"]) for row in recorded if row["stage"] == "init" and row["attrs"]}
    assert made["_init_tokenizer"]["vocab_size"] == "100"
    data = made["_init_dataloader"]
    assert (data["train_rows"], data["val_rows"], data["total_training_steps"]) == ("24", "5", "3")
    assert made["create_resource_pool"] == {"name": "global_pool", "process_on_nodes": "[2, 2]", "world_size": "4"}
    assert made["spawn"] == {"roles": "actor_rollout_ref", "world_size": "4", "processes": "1"}
    assert made["init_model"]["with_reference"] == "True"
    begun = dict.fromkeys(("global_steps", "epoch", "drawn", "optimizer_steps"), "0")
    assert made["_load_checkpoint"] == {"resume_mode": "disable", **begun}
    assert not any("/" in text for attrs in made.values() for text in attrs.values())


def test_the_first_weights_are_recorded_with_the_engine(recorded):
    """Those of actor and reference, under version 0, right after the engine was made."""
    fields = [row["field"] for row in recorded if row["stage"] == "init"]
    first = fields.index("init_model")
    assert fields[first : first + 4] == ["init_model", "parameters", "parameters", "topology"]
    phases = [row["weights"]["phase"] for row in recorded if row["field"] == "parameters" and row["stage"] == "init"]
    assert phases == ["actor", "ref"]


def test_without_a_reference_the_role_says_so(tmp_path):
    """The worker group is then actor and rollout."""
    rows = initialise(tmp_path, "actor_rollout_ref.actor.use_kl_loss=false")
    (spawned,) = (dict(row["attrs"]) for row in rows if row["field"] == "spawn")
    assert spawned["roles"] == "actor_rollout"


def test_prompts_are_fetched_one_by_one_where_groups_are_replaced(tmp_path):
    """A filter asks for exact numbers of fresh prompts, whatever data.gen_batch_size says (verl)."""
    rows = initialise(tmp_path, "algorithm.filter_groups.enable=true")
    (made,) = (dict(row["attrs"]) for row in rows if row["field"] == "_init_dataloader")
    assert made["gen_batch_size"] == "1"


def test_a_batch_is_fetched_in_whole_parts():
    """data.gen_batch_size divides data.train_batch_size, or the configuration is refused."""
    with pytest.raises(ConfigError, match=r"data\.train_batch_size=8 is not a multiple of data\.gen_batch_size=3"):
        validate_config(compose(["data.gen_batch_size=3"]))


def test_fewer_rows_than_a_batch_are_refused(tmp_path):
    """However few are fetched at a time."""
    with pytest.raises(DatasetError, match=r"4 rows are fewer than data\.train_batch_size=8"):
        initialise(tmp_path, "data.train_max_samples=4", "data.gen_batch_size=2")


def test_the_code_reads_in_that_order():
    """The functions of setup stand in the order they are called in."""
    names = ["init_tokenizer", "init_dataloader", "create_resource_pool", "spawn_worker_groups", "init_model"]
    names += ["init_reward_loop_manager", "init_llm_server_manager", "init_checkpoint_engine_manager"]
    lines = [getattr(setup, name).__code__.co_firstlineno for name in names]
    assert lines == sorted(lines)
    called = [name for name in setup.build_parts.__code__.co_names if name in names]
    assert called == names
