"""The named experiments: each trains, checks clean, and shows in its trace what its file says to look at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

import lineage
from lineage import hooks
from lineage.cli import app
from lineage.trainer.agent_loop import AgentLoopError
from lineage.trainer.agent_loop.registry import AGENT_LOOPS, agent_loop, register_agent_loops
from lineage.trainer.config import compose, experiments

Ask = Callable[[str], list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Callable[[str], Ask]:
    """Trains an experiment, once; returns what asks its trace by SQL."""

    @functools.cache
    def trace_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        before = hooks.recorder()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.delenv("LINEAGE_DISABLED", raising=False)
            done = CliRunner().invoke(app, ["run", f"+experiment={name}"])
        hooks.install(before)
        assert done.exit_code == 0, done.output
        return (folder / "runs" / "latest").resolve() / "trace.parquet"

    def asker(name: str) -> Ask:
        def ask(query: str) -> list[tuple[Any, ...]]:
            with lineage.open(trace_of(name)) as trace:
                return trace.sql(query).fetchall()

        return ask

    return asker


def test_every_loop_an_experiment_names_is_there(monkeypatch):
    """The default loop of each experiment is registered, or by the file that the experiment names."""
    monkeypatch.setattr("lineage.trainer.agent_loop.registry.AGENT_LOOPS", dict(AGENT_LOOPS))
    named = []
    for name in experiments.names():
        text = (resources.files("lineage.trainer.config") / "experiment" / f"{name}.yaml").read_text("utf-8")
        agent = OmegaConf.select(OmegaConf.create(text), "actor_rollout_ref.rollout.agent") or {}
        if "agent_loop_config_path" in agent:
            register_agent_loops(agent.agent_loop_config_path)
        if "default_agent_loop" in agent:
            named.append(agent.default_agent_loop)
            assert callable(agent_loop(named[-1]))
    assert len(named) >= 2


@pytest.mark.parametrize("path", ["pkg://no_such_package/loops.yaml", "pkg://lineage.trainer/no.yaml", "pkg://"])
def test_a_file_of_no_package_is_one_line(path):
    """A package or a file in it that is not there is told as a missing file is."""
    with pytest.raises(AgentLoopError, match=f"agent_loop_config_path={path}: no such file"):
        register_agent_loops(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", experiments.names())
def test_every_experiment_trains_and_checks_clean(run, name):
    """Exit 0: trained to its last step, and every code passes or is rightly not applicable."""
    steps = compose([f"+experiment={name}"]).trainer.total_training_steps
    assert run(name)("select count(*) from steps where trajectories > 0") == [(steps,)]


@pytest.mark.slow
def test_tools_show_observations(run):
    """Sessions call tools: some tokens of their responses are observations, which are not policy tokens."""
    ask = run("tools")
    ((observed,),) = ask("select count(*) from facts where entity = 'turn' and role = 'observation'")
    ((shorter,),) = ask("select count(*) from trajectories where policy_len < response_len and not is_padding")
    assert observed > 0
    assert shorter > 0


@pytest.mark.slow
def test_multi_output_scores_the_last_and_trains_both(run):
    """Keys end in 0 and 1; the scorer saw the last output of each session; both have one advantage."""
    ask = run("multi_output")
    assert ask('select distinct "index" from trajectories where not is_padding order by all') == [(0,), (1,)]
    assert ask("select distinct right(key, 2) from facts where stage = 'reward' and op = 'score'") == [("_1",)]
    sessions = "select count(distinct advantage) as values from trajectories group by global_steps, uid, session_id"
    assert ask(f"select max(values) from ({sessions})") == [(1,)]


@pytest.mark.slow
def test_lora_ref_begins_as_the_actor_and_parts_from_it(run):
    """The reference's log-probs are the old policy's in the first step, and no longer in the last."""
    ask = run("lora_ref")
    apart = ask(
        "select max(abs(old_log_probs_sum - ref_log_prob_sum)) from trajectories where not is_padding "
        "group by global_steps order by global_steps"
    )
    assert apart[0][0] == pytest.approx(0, abs=1e-4)
    assert apart[-1][0] > 1e-3


@pytest.mark.slow
def test_failures_are_declared_and_padded(run):
    """Groups end in failure, none of a session is lost without a word, and padding fills the mini-batch."""
    ask = run("failures")
    ((failed,),) = ask("select count(*) from groups where status = 'failure'")
    ((padding,),) = ask("select count(*) from trajectories where is_padding")
    assert failed > 0
    assert padding > 0


@pytest.mark.slow
def test_dynamic_batch_keeps_to_its_budget(run):
    """Micro-batches have different numbers of rows; none has more tokens than the budget, but for a lone row."""
    budget = compose(["+experiment=dynamic_batch"]).actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    packed = run("dynamic_batch")(
        "select count(*), sum(seq_len) from facts join trajectories using (global_steps, key) "
        "where stage = 'update_actor' and op = 'split' and micro_batch is not null "
        "group by global_steps, coord, ppo_epoch, mini_batch, micro_batch"
    )
    assert len({rows for rows, _ in packed}) > 1
    assert all(rows == 1 or tokens <= budget for rows, tokens in packed)


@pytest.mark.slow
def test_kl_in_reward_changes_the_rewards_and_not_the_loss(run):
    """Token rewards differ from the scores once the actor has moved; no KL is in the loss."""
    ask = run("kl_in_reward")
    same = ask(
        "select count(distinct fingerprint) from facts where stage = 'advantage' and op = 'forward' "
        "and field in ('token_level_scores', 'token_level_rewards') and global_steps > 1 group by global_steps, key"
    )
    assert {count for (count,) in same} == {2}
    assert ask("select count(*) from rows where loss.term like '%kl%'") == [(0,)]


@pytest.mark.slow
def test_bypass_takes_the_samplers_log_probs(run):
    """No forward pass before the update, and old_log_probs are rollout_log_probs, to the bit."""
    ask = run("bypass")
    assert ask("select count(*) from rows where stage = 'old_log_prob' and op = 'forward'") == [(0,)]
    marks = ask(
        "select count(distinct fingerprint) from facts where field in ('old_log_probs', 'rollout_log_probs') "
        "and op = 'produce' and not is_padding group by global_steps, key"
    )
    assert {count for (count,) in marks} == {1}


@pytest.mark.slow
def test_reward_colocated_scores_after_the_sample(run):
    """The rollout writes no rm_scores; the reward stage does, after the batch was sampled."""
    ask = run("reward_colocated")
    writers = ask("select distinct stage from facts where field = 'rm_scores' and op = 'produce' and not is_padding")
    assert writers == [("reward",)]
    order = ask(
        "select min(seq) filter (stage = 'reward') > min(seq) filter (stage = 'sample') from rows "
        "where global_steps > 0 group by global_steps"
    )
    assert set(order) == {(True,)}


@pytest.mark.slow
def test_merged_steps_sync_once_and_clear_all(run):
    """Two batches are sampled a step; the weights go over once, and the clear leaves nothing."""
    ask = run("merged_steps")
    step = "where global_steps > 0 group by global_steps"
    once = ask(
        "select count(*) filter (stage = 'weight_sync' and op = 'wake'), "
        f"max(resident.trajectories) filter (stage = 'clear' and op = 'clear') from rows {step}"
    )
    assert set(once) == {(1, 0)}
    ((most,),) = ask("select max(n) from rows where stage = 'sample' and op = 'produce' and field = 'key'")
    ((cleared,),) = ask("select min(n) from rows where stage = 'clear' and op = 'clear' and entity = 'trajectory'")
    assert cleared >= 2 * most


@pytest.mark.slow
def test_without_kl_in_reward_the_rewards_are_the_scores(run):
    """Reward and KL are two paths by default: rm_scores, token scores and token rewards have one fingerprint."""
    same = run("bypass")(
        "select count(distinct fingerprint) from facts where stage = 'advantage' and op in ('pad', 'forward') "
        "and field in ('rm_scores', 'token_level_scores', 'token_level_rewards') group by global_steps, key"
    )
    assert {count for (count,) in same} == {1}
