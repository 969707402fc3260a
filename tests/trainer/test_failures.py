"""Sessions that fail and sessions of two outputs: what reaches the batch, and what the trace says of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lineage
from lineage import hooks
from lineage.trainer.agent_loop import (
    AgentLoopBase,
    AgentLoopError,
    AgentLoopManager,
    AgentLoopOutput,
    AgentLoopWorker,
    LoopContext,
    Session,
    agent_loop,
    register,
)
from lineage.trainer.agent_loop.flaky import FlakyError
from lineage.trainer.config import compose, resolved, validate_config
from lineage.trainer.grpo import PPOTrainerSync
from lineage.trainer.protocol import DataProto, object_array
from lineage.trainer.queue import LocalTransferQueue
from lineage.trainer.replay_buffer import ReplayBuffer, ReplayBufferError
from lineage.trainer.reward import Score
from lineage.trainer.rollout.base import SamplingParams

OUTCOMES = ("ok", "two outputs", "raises", "no token", "no output", "reward raises", "wrong types", "no row")


@register("test_outcomes")
class Outcomes(AgentLoopBase):
    """Ends each session as the row's ``outcomes`` say."""

    async def run(self, sampling_params, **row):
        outcome = row["outcomes"][self.session.session_id]
        await asyncio.sleep(0)
        if outcome == "raises":
            raise RuntimeError("tool crashed")
        if outcome == "no output":
            return []
        one = AgentLoopOutput([1, 2], [3, 4], [1, 1], [-0.1, -0.2], extra_fields={"outcome": outcome})
        if outcome == "no token":
            one = AgentLoopOutput([1, 2], [], [], [])
        if outcome == "wrong types":
            one = AgentLoopOutput([1, 2], ["a"], [1], [-0.1])
        if outcome == "no row":
            one.extra_fields["position_ids"] = [0]
        return [one, AgentLoopOutput([1], [5], [1], [-0.3])] if outcome == "two outputs" else one


class Scorer:
    """Scores 1; the session of that name, it cannot."""

    async def compute_score(self, key, response_ids, row):
        session = hooks.parse_key(key).session_id
        if row["outcomes"][session] == "reward raises":
            raise ZeroDivisionError("in the reward")
        return Score(1.0, {"acc": 1.0})


def rollout_and_sample(outcomes):
    """Run groups of sessions that end as ``outcomes`` (uid -> one a session) say; returns the batch and the queue."""
    store = LocalTransferQueue()
    queue = hooks.trace_queue(store)
    context = LoopContext(None, None, prompt_length=8, response_length=8)
    made = [AgentLoopWorker(queue, context, Scorer(), default_agent_loop="test_outcomes", seed=1) for _ in range(2)]
    rows = {"uid": object_array(list(outcomes)), "outcomes": object_array(list(outcomes.values()))}
    rows["raw_prompt"] = object_array([[{"role": "user", "content": "?"}]] * len(outcomes))
    expected = len(next(iter(outcomes.values())))
    meta = {"global_steps": 1, "partition_id": "train", "expected": expected, "sampling_params": SamplingParams()}
    tag = {"is_prompt": True, "status": "pending", "global_steps": 1, "expected": expected}
    batch = DataProto.from_dict(rows, meta)

    async def go():
        with hooks.traced("prompt", component="test"):
            queue.kv_batch_put(keys=list(outcomes), partition_id="train", tags=[dict(tag) for _ in outcomes])
        manager = AgentLoopManager(made)
        manager.generate_sequences(batch)
        sampled = await ReplayBuffer(queue).sample(1, "train", len(outcomes), still_running=lambda: manager.running)
        await manager.join()
        return sampled

    return asyncio.run(go()), store


def survivors(outcomes):
    """Keys of the sessions that succeed. A group with an output no row can be made of has none."""
    keys = []
    for uid, sessions in outcomes.items():
        for number, outcome in enumerate(sessions):
            if "no row" not in sessions and outcome in ("ok", "two outputs"):
                keys += [f"{uid}_{number}_{index}" for index in range(2 if outcome == "two outputs" else 1)]
    return keys


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.tuples(st.integers(1, 4), st.integers(1, 3)), data=st.data())
def test_the_batch_is_the_sessions_that_succeeded(sizes, data):
    """Whatever pattern of sessions fails, the batch has the outputs of the others, whole and in order."""
    groups, sessions = sizes
    drawn = st.lists(st.sampled_from(OUTCOMES), min_size=sessions, max_size=sessions)
    outcomes = {f"g{number}": data.draw(drawn) for number in range(groups)}
    keys = survivors(outcomes)
    if not keys:
        with pytest.raises(ReplayBufferError, match="failed without any output; first error: "):
            rollout_and_sample(outcomes)
        return
    batch, store = rollout_and_sample(outcomes)
    assert batch.keys == keys
    assert set(store.kv_list("train")["train"]) == set(keys)


def test_every_group_is_accounted_for_in_the_trace(tmp_path):
    """One filter row names all groups with status, reason and expected sessions; the sessions got are in the batch."""
    outcomes = {"a": ["ok", "ok"], "b": ["raises", "ok"], "c": ["no token", "reward raises"], "d": ["no output", "ok"]}
    with hooks.recording(tmp_path, config={}, run={}) as recorder:
        recorder.step(1)
        rollout_and_sample(outcomes)
    table = pq.read_table(tmp_path / "trace.parquet").to_pylist()
    (chosen,) = [row for row in table if (row["stage"], row["op"]) == ("sample", "filter")]
    status = dict(
        zip(chosen["key"], zip(chosen["status"], chosen["reason"], chosen["expected"], strict=True), strict=True)
    )
    failed = ("failure", "failed", 2)
    assert status == {"a": ("finished", None, 2), "b": failed, "c": failed, "d": failed}
    (handed,) = [row for row in table if (row["stage"], row["op"]) == ("sample", "produce")]
    assert handed["key"] == ["a_0_0", "a_1_0", "b_1_0", "d_1_0"]


# --------------------------------------------------------------------------------------------- nobody writes late


@register("test_slow")
class Slow(AgentLoopBase):
    """Answers after a while."""

    async def run(self, sampling_params, **row):
        await asyncio.sleep(0.02)
        return AgentLoopOutput([1], [2], [1], [-0.1])


@pytest.mark.parametrize("how", ["error", "cancel"])
def test_a_session_writes_nothing_once_the_rollout_has_ended(how):
    """When a user's mistake or a cancel ends the rollout, sessions still at work stop: no ghost comes back."""
    queue = LocalTransferQueue()
    context = LoopContext(None, None, prompt_length=8, response_length=8)
    worker = AgentLoopWorker(queue, context, None, default_agent_loop="test_slow", seed=1)
    names = ["test_slow", "no_such_loop" if how == "error" else "test_slow"]
    rows = {"uid": object_array(["a", "b"]), "raw_prompt": object_array([[], []]), "agent_name": object_array(names)}
    meta = {"global_steps": 1, "partition_id": "train", "expected": 2, "sampling_params": SamplingParams()}

    async def go():
        manager = AgentLoopManager([worker])
        manager.generate_sequences(DataProto.from_dict(rows, meta))
        await asyncio.sleep(0)
        if how == "cancel":
            await manager.cancel()
        else:
            with pytest.raises(AgentLoopError, match="no_such_loop"):
                await manager.join()
        queue.kv_clear(["a", "b"], "train")
        await asyncio.sleep(0.05)

    asyncio.run(go())
    assert queue.resident()[:2] == (0, 0)


# ------------------------------------------------------------------------------------------------- the flaky loop


async def flaky(session, **options):
    """The flaky loop of one session, over a loop that answers."""
    context = LoopContext(None, None, prompt_length=8, response_length=8)
    loop = agent_loop("flaky_agent")(context, session)
    row = {"outcomes": ["ok"] * 400, "extra_info": {"interaction_kwargs": {"inner": "test_outcomes", **options}}}
    return await loop.run(SamplingParams(), **row)


def ends(seed, **options):
    """How 300 sessions of one prompt end: the tokens of the answer, or None for one that raised."""

    async def go():
        sessions = [flaky(Session("u", number, 1, seed), **options) for number in range(300)]
        return await asyncio.gather(*sessions, return_exceptions=True)

    results = asyncio.run(go())
    return [None if isinstance(result, FlakyError) else len(result.response_ids) for result in results]


def test_the_flaky_loop_fails_in_the_same_sessions_every_time():
    """The seed says which sessions fail, about as many as asked; more empty answers make no other session raise."""
    first = ends(7, failure_rate=0.2)
    assert first == ends(7, failure_rate=0.2)
    assert first != ends(8, failure_rate=0.2)
    assert 30 < first.count(None) < 90
    both = ends(7, failure_rate=0.2, empty_rate=0.3)
    assert [end is None for end in both] == [end is None for end in first]
    assert 60 < both.count(0) < 120
    assert set(ends(7, failure_rate=0)) == {2}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"failure_rate": 1.5}, "together 0 to 1"),
        ({"failure_rate": 0.6, "empty_rate": 0.6}, "together 0 to 1"),
        ({"failure_rate": "often"}, "together 0 to 1"),
        ({"inner": "flaky_agent"}, "would wrap itself"),
        ({"failure_rate": 0, "inner": "nope"}, "unknown agent loop 'nope'"),
    ],
)
def test_wrong_options_of_the_flaky_loop_stop_the_run(options, expected):
    """They are the user's mistake, in one line."""
    with pytest.raises(AgentLoopError, match=expected):
        asyncio.run(flaky(Session("u", 0, 1, 7), **options))


# ------------------------------------------------------------------------------------------------------ a whole step

HARD = (
    "data.train_batch_size=5",
    "data.gen_batch_size=1",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=5",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.agent.default_agent_loop=flaky_drafts",
    "algorithm.filter_groups.enable=true",
    "trainer.v1.sampler.sync_refill_failed_groups=true",
    "trainer.total_training_steps=2",
)
LOOPS = """
- name: flaky_drafts
  _target_: lineage.trainer.agent_loop.flaky.FlakyAgentLoop
  failure_rate: 0.2
  empty_rate: 0.1
  inner: draft_revise_agent
"""


def hard_config(folder):
    """Two steps of drafts and revisions where sessions fail, groups are filtered and replaced."""
    (folder / "loops.yaml").write_text(LOOPS)
    path = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder / 'loops.yaml'}"
    config = compose([*HARD, path])
    validate_config(config)
    return config


def train_hard(config, folder):
    """Train by it and leave nothing; returns the weights."""
    store = LocalTransferQueue()
    trainer = PPOTrainerSync(config, folder=folder, queue=store)

    async def go():
        await trainer.init()
        await trainer.fit()

    asyncio.run(go())
    assert store.resident() == (0, 0, 0)
    return torch.cat([tensor.reshape(-1).float() for _, tensor in trainer.parts.worker.state_dict()])


@pytest.fixture(scope="module")
def hard_run(tmp_path_factory):
    """The hard steps traced: folder of the trace, its facts as dicts, the weights at the end."""
    folder = tmp_path_factory.mktemp("hard")
    config = hard_config(folder)
    with hooks.recording(folder / "run", config=resolved(config), run={}):
        weights = train_hard(config, folder)
    return folder / "run", lineage.open(folder / "run").facts.df().to_dict("records"), weights


def test_a_hard_run_checks_clean(hard_run):
    """Failing, empty and filtered sessions, refill and padding: what they could break is seen, and holds."""
    seen = ("KEY001", "KEY002", "KEY003", "KEY005", "QUE001", "QUE002", "QUE005", "QUE007", "REW001", "REW003")
    seen += ("REW006", "ADV001", "ADV002", "ADV003", "ADV004", "ADV006", "MSK001", "MSK002", "PAD001", "PAD002")
    seen += ("BAT001", "BAT002")
    report = lineage.check(hard_run[0], select=seen)
    assert {one.code: str(one.kind) for one in report.verdicts} == dict.fromkeys(seen, "pass"), report


def test_every_group_of_a_hard_run_is_accounted_for(hard_run):
    """Each uid submitted is selected or left out once, and each output is in a batch or left out with a reason."""
    facts = hard_run[1]
    submitted = {fact["key"] for fact in facts if fact["stage"] == "prompt" and fact["op"] == "produce"}
    filters = [fact for fact in facts if fact["stage"] == "sample" and fact["op"] == "filter"]
    groups = [fact for fact in filters if fact["entity"] == "prompt"]
    assert sorted(fact["key"] for fact in groups) == sorted(submitted)
    assert len(submitted) > 6
    assert {(fact["status"], fact["reason"] or None) for fact in groups} >= {("finished", "filtered")}
    written, taken, left_out = (
        {fact["key"] for fact in facts if (fact["stage"], fact["op"], fact["entity"], fact["field"]) == event}
        for event in (
            ("rollout", "produce", "trajectory", "responses"),
            ("sample", "produce", "trajectory", "key"),
            ("sample", "filter", "trajectory", "key"),
        )
    )
    assert left_out
    assert taken.isdisjoint(left_out)
    assert taken | left_out == written


def test_a_session_of_two_outputs_is_scored_once_and_trains_both(hard_run):
    """The last output alone is scored; sessions are compared, and each gives all its outputs its advantage."""
    facts = hard_run[1]
    scored, advantages = defaultdict(dict), defaultdict(dict)
    for fact in facts:
        parsed = hooks.parse_key(fact["key"]) if fact["entity"] == "trajectory" else None
        if parsed is None or fact["is_padding"]:
            continue
        if (fact["stage"], fact["op"]) == ("reward", "score"):
            assert parsed.index == 1
            scored[parsed.uid][parsed.session_id] = fact["sum"]
        if (fact["stage"], fact["op"], fact["field"]) == ("advantage", "unpad", "advantages"):
            advantages[parsed.uid][parsed.session_id, parsed.index] = fact["sum"] / fact["mask_sum"]
    spread = 0.0
    for uid, outputs in advantages.items():
        scores = torch.tensor(list(scored[uid].values()), dtype=torch.float64)
        deviation = scores.std() if len(scores) > 1 else torch.tensor(0.0)
        relative = dict(zip(scored[uid], ((scores - scores.mean()) / (deviation + 1e-6)).tolist(), strict=True))
        assert set(outputs) == {(session, index) for session in relative for index in (0, 1)}
        for (session, _), advantage in outputs.items():
            assert advantage == pytest.approx(relative[session], abs=1e-5)
        spread = max(spread, *relative.values())
    assert spread > 0.5


@pytest.mark.slow
def test_tracing_a_hard_run_changes_no_bit(hard_run, tmp_path):
    """What is filtered and refilled does not depend on timing: an untraced run ends in the same weights."""
    assert torch.equal(train_hard(hard_config(tmp_path), tmp_path), hard_run[2])
