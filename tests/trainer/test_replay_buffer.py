"""The replay buffer: terminal groups, oldest first, prompt keys cleared at sample; groups evicted and replaced."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

import lineage
from lineage import hooks
from lineage.trainer.protocol import nested_from_list
from lineage.trainer.queue import LocalTransferQueue
from lineage.trainer.replay_buffer import RefillPolicy, ReplayBuffer, ReplayBufferError


def prompt(queue, uid, status, step=1, **tag):
    """A prompt key with a status."""
    tags = [{"is_prompt": True, "status": status, "global_steps": step, "expected": 2, **tag}]
    queue.kv_batch_put(keys=[uid], partition_id="train", tags=tags)


def outputs(queue, *keys):
    """Trajectory keys with tags and no fields."""
    queue.kv_batch_put(keys=list(keys), partition_id="train", tags=[{"status": "success"} for _ in keys])


def sample(queue, size, **options):
    """One batch."""
    return asyncio.run(ReplayBuffer(queue).sample(1, "train", size, **options))


def test_batch_is_by_group_session_and_index():
    """Outputs come group by group in the order of submission, whatever order they were written in."""
    queue = LocalTransferQueue()
    prompt(queue, "a", "finished")
    prompt(queue, "b", "finished")
    outputs(queue, "b_1_0", "a_10_0", "a_2_0", "b_0_1", "b_0_0")
    batch = sample(queue, 2)
    assert batch.keys == ["a_2_0", "a_10_0", "b_0_0", "b_0_1", "b_1_0"]
    assert batch.partition_id == "train"


def test_oldest_step_goes_first_and_the_rest_stays():
    """Groups of an earlier step are taken first; the others keep their prompt keys and outputs."""
    queue = LocalTransferQueue()
    prompt(queue, "new", "finished", step=2)
    prompt(queue, "old", "failure", step=1)
    outputs(queue, "new_0_0", "old_0_0")
    assert sample(queue, 1).keys == ["old_0_0"]
    assert set(queue.kv_list("train")["train"]) == {"new", "new_0_0", "old_0_0"}


def test_sample_waits_for_terminal_groups():
    """Pending and running groups are not taken; the call returns when they end."""
    queue = LocalTransferQueue()
    prompt(queue, "a", "running")
    outputs(queue, "a_0_0")

    async def finish_later():
        waiting = asyncio.create_task(ReplayBuffer(queue).sample(1, "train", 1))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        prompt(queue, "a", "finished")
        return await waiting

    assert asyncio.run(finish_later()).keys == ["a_0_0"]


def test_uid_may_hold_underscores():
    """A uid like data_7 keeps its outputs, and data does not get them."""
    queue = LocalTransferQueue()
    prompt(queue, "data", "finished")
    prompt(queue, "data_7", "finished")
    outputs(queue, "data_7_0_0", "data_0_0")
    assert sample(queue, 2).keys == ["data_0_0", "data_7_0_0"]


def test_a_failed_group_gives_what_it_has():
    """Survivors of a failed group are part of the batch, as in verl."""
    queue = LocalTransferQueue()
    prompt(queue, "a", "failure", reason="failed", error="ValueError: x")
    prompt(queue, "b", "failure", reason="failed", error="ValueError: x")
    outputs(queue, "a_1_0")
    assert sample(queue, 2).keys == ["a_1_0"]


def test_a_batch_that_failed_wholly_says_so():
    """No output at all is an error with the first reason."""
    queue = LocalTransferQueue()
    prompt(queue, "a", "failure", reason="failed", error="ValueError: bad tool")
    with pytest.raises(ReplayBufferError, match=r"all 1 prompt groups failed.*ValueError: bad tool"):
        sample(queue, 1)


def test_nothing_left_that_could_finish_is_an_error():
    """When no rollout runs and a group is still pending, waiting would never end."""
    queue = LocalTransferQueue()
    prompt(queue, "a", "pending")
    with pytest.raises(ReplayBufferError, match="no rollout is running"):
        sample(queue, 1, still_running=lambda: False)


def test_a_key_of_neither_kind_is_refused():
    """A row that is no prompt and whose key is not a trajectory's is named: it would be lost in silence."""
    queue = LocalTransferQueue()
    prompt(queue, "a", "finished")
    queue.kv_batch_put(keys=["a_007_0"], partition_id="train", tags=[{"is_prompt": False}])
    with pytest.raises(ReplayBufferError, match="queue key 'a_007_0' is no trajectory key"):
        sample(queue, 1)


def test_unknown_status_is_refused():
    """A status that is none of the four is named with the four."""
    queue = LocalTransferQueue()
    prompt(queue, "a", "done")
    with pytest.raises(ReplayBufferError, match="pending, running, finished, failure"):
        sample(queue, 1)


# ------------------------------------------------------------------------------------------- eviction and refill

EVEN, UNEVEN, LOST, HALF = [1, 1], [0, 1], [None, None], [None, 1]


class Rollout:
    """A rollout whose groups end at once: ``script`` has, for each prompt in turn, the scores of its sessions.

    A score is a number, a list (of a session's outputs), or None for a session that failed.
    """

    def __init__(self, queue, script):
        self.queue, self.script, self.submitted = queue, script, []
        self._number = count()

    def __call__(self, prompts):
        self.submitted.append(prompts)
        for _ in range(prompts):
            number = next(self._number)
            self.end(f"p{number}", self.script[number])

    def end(self, uid, sessions):
        """One group: its outputs, then its status."""
        with hooks.traced("rollout", component="test"):
            prompt(self.queue, uid, "pending", expected=len(sessions))
            rows = [
                (f"{uid}_{session}_{index}", float(score))
                for session, scores in enumerate(sessions)
                if scores is not None
                for index, score in enumerate(scores if isinstance(scores, list) else [scores])
            ]
            if rows:
                keys, scores = zip(*rows, strict=True)
                fields = {
                    "rm_scores": nested_from_list([torch.tensor([0.0, score]) for score in scores]),
                    "extra_fields": NonTensorStack(*[{"reward_extra_info": {"tokens": score}} for score in scores]),
                }
                tags = [{"status": "success"} for _ in keys]
                self.queue.kv_batch_put(list(keys), "train", TensorDict(fields, batch_size=[len(keys)]), tags)
            prompt(self.queue, uid, "running")
            failed = None in sessions
            prompt(self.queue, uid, "failure" if failed else "finished", **({"reason": "failed"} if failed else {}))


def refilled(script, size, queue=None, **policy):
    """Sample one batch of ``size`` groups under a policy; returns the batch, the buffer, the rollout and the queue."""
    queue = queue or LocalTransferQueue()
    rollout = Rollout(queue, script)
    buffer = ReplayBuffer(queue, policy=RefillPolicy(**policy), refill=rollout)
    rollout(size)
    return asyncio.run(buffer.sample(1, "train", size)), buffer, rollout, queue


@pytest.mark.parametrize("metric", ["reward", "tokens"])
def test_a_group_without_variance_is_replaced_by_two_prompts(metric):
    """k groups evicted are 2k prompts submitted; those that are then too many are discarded, the youngest first."""
    batch, buffer, rollout, queue = refilled([EVEN, UNEVEN, UNEVEN, UNEVEN, UNEVEN], 3, filter_groups_metric=metric)
    assert rollout.submitted == [3, 2]
    assert batch.keys == [f"p{group}_{session}_0" for group in (1, 2, 3) for session in (0, 1)]
    assert set(queue.kv_list("train")["train"]) == set(batch.keys)
    assert buffer.metrics == {
        "training/filter_groups/evicted_samples": 1.0,
        "training/filter_groups/discarded_surplus_samples": 1.0,
    }


def test_a_long_search_for_groups_is_not_silent(caplog):
    """Every ten batches of prompts a line says how many were generated and how many are kept."""
    refilled([EVEN] * 21 + [UNEVEN] * 3, 1, filter_groups_metric="reward")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"step 1: {10 * times} prompt groups generated so far: {10 * times - 1} filtered, 0 failed, 0 of 1 kept"
        for times in (1, 2)
    ]


def test_prompts_in_flight_are_bounded():
    """So many batches of prompts at most are submitted at once, whatever the credit."""
    script = [EVEN] * 4 + [UNEVEN, UNEVEN]
    assert refilled(script, 2, filter_groups_metric="reward")[2].submitted == [2, 2, 2]
    script = [EVEN] * 2 + [UNEVEN] * 4
    assert refilled(script, 2, filter_groups_metric="reward", max_inflight_gen_batches=2)[2].submitted == [2, 4]


def test_only_finished_groups_of_several_sessions_are_filtered():
    """A failed group and a group of one session, however many outputs it has, have nothing to compare."""
    batch, _, rollout, _ = refilled([HALF, [[1, 1]]], 2, filter_groups_metric="reward")
    assert rollout.submitted == [2]
    assert batch.keys == ["p0_1_0", "p1_0_0", "p1_0_1"]


def test_a_session_counts_by_its_last_output():
    """As for the advantage: earlier outputs may differ."""
    assert refilled([[[5, 1], 1], UNEVEN], 1, filter_groups_metric="reward")[2].submitted == [1, 1]


def test_failed_groups_are_replaced_one_for_one_when_asked():
    """sync_refill_failed_groups replaces groups without any output; survivors of a failed group stay."""
    batch, buffer, rollout, queue = refilled([LOST, HALF, LOST, UNEVEN], 2, refill_failed_groups=True)
    assert rollout.submitted == [2, 1, 1]
    assert batch.keys == ["p1_1_0", "p3_0_0", "p3_1_0"]
    assert set(queue.kv_list("train")["train"]) == set(batch.keys)
    assert buffer.metrics == {"training/rollout_failure/evicted_samples": 2.0}


def test_failed_groups_stay_by_default():
    """Without the option a failed group is sampleable as it is, and nothing is submitted."""
    batch, buffer, rollout, _ = refilled([LOST, HALF], 2)
    assert (batch.keys, rollout.submitted, buffer.metrics) == (["p1_1_0"], [2], {})


def test_the_limit_of_batches_ends_the_run_in_one_line():
    """max_num_gen_batches batches of prompts may be submitted for a step, the first one included."""
    with pytest.raises(ReplayBufferError) as caught:
        refilled([EVEN] * 6, 2, filter_groups_metric="reward", max_num_gen_batches=3)
    assert str(caught.value) == (
        "step 1: of 6 prompt groups 6 were filtered and 0 failed, which leaves 0 of 2: raise "
        "algorithm.filter_groups.max_num_gen_batches=3, 0 sets no limit"
    )
    script = [EVEN, EVEN, EVEN, EVEN, UNEVEN, UNEVEN]
    assert refilled(script, 2, filter_groups_metric="reward", max_num_gen_batches=3)[2].submitted == [2, 2, 2]


def test_nothing_is_evicted_before_every_prompt_has_ended():
    """What is drawn from the dataset must not depend on which session ends first."""
    queue = LocalTransferQueue()
    rollout = Rollout(queue, [UNEVEN])
    buffer = ReplayBuffer(queue, policy=RefillPolicy("reward"), refill=rollout)
    rollout.end("a", EVEN)
    prompt(queue, "b", "running")

    async def go():
        waiting = asyncio.create_task(buffer.sample(1, "train", 1))
        await asyncio.sleep(0.02)
        assert (waiting.done(), rollout.submitted) == (False, [])
        rollout.end("b", UNEVEN)
        return await waiting

    assert asyncio.run(go()).keys == ["b_0_0", "b_1_0"]


def test_the_submit_function_may_be_a_coroutine():
    """It is awaited before the buffer looks again."""
    queue = LocalTransferQueue()
    rollout = Rollout(queue, [EVEN, UNEVEN, UNEVEN])

    async def refill(prompts):
        await asyncio.sleep(0)
        rollout(prompts)

    rollout(1)
    buffer = ReplayBuffer(queue, policy=RefillPolicy("reward"), refill=refill)
    assert asyncio.run(buffer.sample(1, "train", 1)).keys == ["p1_0_0", "p1_1_0"]


def test_validation_takes_every_terminal_group():
    """In partition val nothing is filtered or replaced, and a batch without any output is empty, not an error."""
    queue = LocalTransferQueue()
    buffer = ReplayBuffer(queue, policy=RefillPolicy("reward", refill_failed_groups=True))
    tag = {"is_prompt": True, "global_steps": 1}
    queue.kv_batch_put(["a", "b"], "val", tags=[{**tag, "status": "finished"}, {**tag, "status": "failure"}])
    assert asyncio.run(buffer.sample(1, "val", 2)).keys == []
    assert queue.resident()[:2] == (0, 0)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("reward", "score them inside the agent loop"), ("length", "it gave tokens; take one of them")],
)
def test_a_metric_that_is_not_there_is_named(metric, expected):
    """The error says what to set: the scores come too late, or the scorer gives other keys."""
    queue = LocalTransferQueue()
    if metric == "reward":
        prompt(queue, "a", "finished")
        outputs(queue, "a_0_0", "a_1_0")
    else:
        Rollout(queue, []).end("a", UNEVEN)
    with pytest.raises(ReplayBufferError, match=expected):
        asyncio.run(ReplayBuffer(queue, policy=RefillPolicy(metric), refill=print).sample(1, "train", 1))


def test_evictions_are_declared_in_the_trace(tmp_path):
    """Groups left out, and their outputs, are filter rows with a reason; their entries are cleared; checks pass."""
    with hooks.recording(tmp_path, config={}, run={}) as recorder:
        recorder.step(1)
        queue = hooks.trace_queue(LocalTransferQueue())
        script = [EVEN, LOST, UNEVEN, EVEN, UNEVEN, HALF]
        policy = {"filter_groups_metric": "reward", "refill_failed_groups": True}
        batch, _, rollout, _ = refilled(script, 3, queue, **policy)
        with hooks.traced("clear", component="test"):
            queue.kv_clear(batch.keys, "train")
    assert rollout.submitted == [3, 3]
    facts = lineage.open(tmp_path).facts.filter("stage = 'sample' and op = 'filter'").df()
    reasons = dict(zip(facts["key"], facts["reason"], strict=True))
    left_out = {"p0": "filtered", "p1": "failed", "p3": "filtered"}
    left_out |= {f"p{group}_{session}_0": "filtered" for group in (0, 3) for session in (0, 1)}
    assert {key: reasons[key] for key in left_out} == left_out
    assert reasons.keys() - left_out.keys() == {"p2", "p4", "p5"}
    report = lineage.check(tmp_path, select=["KEY", "QUE"])
    assert report.ok, report
    seen = {verdict.code for verdict in report.verdicts if verdict.kind == "pass"}
    assert seen >= {"KEY001", "KEY002", "KEY005", "QUE001", "QUE002", "QUE003", "QUE005"}


SESSIONS = st.lists(st.one_of(st.none(), st.integers(0, 1)), min_size=2, max_size=2)


@settings(max_examples=60)
@given(
    drawn=st.lists(SESSIONS, max_size=20),
    size=st.integers(1, 4),
    inflight=st.integers(1, 3),
    filters=st.booleans(),
    fails=st.booleans(),
)
def test_whatever_is_evicted_the_batch_has_the_groups_that_may_stay(drawn, size, inflight, filters, fails):
    """A batch has the first ``size`` groups that the policy keeps, and nothing else stays in the queue."""
    script = [*drawn, *[UNEVEN] * 100]
    kept = [
        number
        for number, sessions in enumerate(script)
        if not (filters and None not in sessions and len(set(sessions)) == 1) and not (fails and sessions == LOST)
    ][:size]
    keys = [f"p{number}_{place}_0" for number in kept for place in (0, 1) if script[number][place] is not None]
    policy = {
        "filter_groups_metric": "reward" if filters else None,
        "refill_failed_groups": fails,
        "max_inflight_gen_batches": inflight,
    }
    if not keys:
        with pytest.raises(ReplayBufferError, match="failed without any output"):
            refilled(script, size, **policy)
        return
    batch, _, rollout, queue = refilled(script, size, **policy)
    assert batch.keys == keys
    assert set(queue.kv_list("train")["train"]) == set(keys)
    assert max(rollout.submitted) <= size * inflight
