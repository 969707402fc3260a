"""Agent loops: sessions run, are scored, and end in the queue; a failing one fails its group."""

from __future__ import annotations

import asyncio

import pytest

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
from lineage.trainer.agent_loop.base import fit_prompt
from lineage.trainer.agent_loop.postprocess import SessionError, check_outputs
from lineage.trainer.protocol import DataProto, lengths_of, object_array
from lineage.trainer.queue import LocalTransferQueue
from lineage.trainer.rollout.base import SamplingParams, TokenOutput


class EchoRollout:
    """Answers every request with the prompt's last two tokens, as version 4."""

    def __init__(self):
        self.requests = {}

    async def generate(self, request_id, *, prompt_ids, sampling_params, max_tokens, seed):
        self.requests[request_id] = seed
        ids = list(prompt_ids[-2:])
        return TokenOutput(ids, [-0.5] * len(ids), "stop", len(ids), {"global_steps": 4})


class LengthScorer:
    """Scores a session by the tokens of its last output, and remembers which key it was asked for."""

    def __init__(self):
        self.keys = []

    async def compute_score(self, key, response_ids, row):
        self.keys.append(key)
        return float(len(response_ids))


@register("test_two_outputs")
class TwoOutputs(AgentLoopBase):
    """Returns two outputs, the second with an observation token."""

    async def run(self, sampling_params, **row):
        extra = {"min_global_steps": 4, "max_global_steps": 4}
        return [
            AgentLoopOutput([1], [2, 3], [1, 1], [-0.1, -0.2], extra_fields=extra),
            AgentLoopOutput([1, 2], [3, 4, 5], [1, 0, 1], [-0.1, 0.0, -0.2], extra_fields=extra),
        ]


@register("test_session_one_fails")
class SessionOneFails(AgentLoopBase):
    """Raises in session 1."""

    async def run(self, sampling_params, **row):
        if self.session.session_id == 1:
            raise RuntimeError("tool crashed")
        return AgentLoopOutput([1], [2], [1], [-0.1])


def run(tokenizer, *, uids=("a", "b"), sessions=2, scorer=None, rollout=None, workers=1, **columns):
    """Run prompts through workers; returns the queue."""
    queue = LocalTransferQueue()
    context = LoopContext(rollout or EchoRollout(), tokenizer, prompt_length=64, response_length=8)
    made = [
        AgentLoopWorker(queue, context, scorer, default_agent_loop="single_turn_agent", seed=7) for _ in range(workers)
    ]
    messages = [[{"role": "user", "content": f"say {uid}"}] for uid in uids]
    rows = {"uid": object_array(list(uids)), "raw_prompt": object_array(messages)}
    rows.update({name: object_array(list(column)) for name, column in columns.items()})
    meta = {"global_steps": 5, "partition_id": "train", "expected": sessions, "sampling_params": SamplingParams()}
    batch = DataProto.from_dict(rows, meta)

    async def go():
        manager = AgentLoopManager(made)
        manager.generate_sequences(batch)
        assert manager.running
        await manager.join()
        assert not manager.running

    try:
        asyncio.run(go())
    finally:
        run.queue = queue
    return queue


def test_every_session_of_every_prompt_is_in_the_queue(tokenizer):
    """Keys are uid, session, index; prompts end finished; the sessions' fields align."""
    queue = run(tokenizer, sessions=3, workers=2)
    held = queue.kv_list("train")["train"]
    keys = [f"{uid}_{session}_0" for uid in "ab" for session in range(3)]
    assert set(held) == {"a", "b", *keys}
    assert held["a"]["status"] == held["b"]["status"] == "finished"
    data = queue.kv_batch_get(keys, "train")
    prompt, response, sequence = (lengths_of(data[name]) for name in ("prompts", "responses", "input_ids"))
    assert (prompt + response).tolist() == sequence.tolist() == [held[key]["seq_len"] for key in keys]
    for name in ("response_mask", "loss_mask", "rollout_log_probs"):
        assert lengths_of(data[name]).tolist() == response.tolist()
    assert data["uid"].tolist() == ["a"] * 3 + ["b"] * 3
    first = data["input_ids"].unbind()[0]
    assert first.tolist() == data["prompts"].unbind()[0].tolist() + data["responses"].unbind()[0].tolist()


def test_tags_carry_step_and_versions(tokenizer):
    """The tag of the step that asked and the versions that generated come from where they are known."""
    tag = run(tokenizer).kv_list("train")["train"]["a_0_0"]
    assert (tag["global_steps"], tag["min_global_steps"], tag["max_global_steps"]) == (5, 4, 4)
    assert (tag["status"], tag["is_padding"], tag["finish_reason"], tag["generated"]) == ("success", False, "stop", 2)


def test_score_lies_on_the_last_token(tokenizer):
    """rm_scores is zero but for the last response token, which has the session's score."""
    queue = run(tokenizer, scorer=LengthScorer())
    assert queue.kv_batch_get(["a_0_0"], "train")["rm_scores"].unbind()[0].tolist() == [0.0, 2.0]


def test_only_the_final_output_is_scored(tokenizer):
    """A session of two outputs is scored once, by its last, and both carry the score; the observation is masked."""
    scorer = LengthScorer()
    queue = run(tokenizer, scorer=scorer, uids=["a"], sessions=1, agent_name=["test_two_outputs"])
    assert scorer.keys == ["a_0_1"]
    data = queue.kv_batch_get(["a_0_0", "a_0_1"], "train")
    assert [row.tolist() for row in data["rm_scores"].unbind()] == [[0.0, 3.0], [0.0, 0.0, 3.0]]
    assert data["response_mask"].unbind()[1].tolist() == [1, 0, 1]


def test_one_failing_session_fails_its_group_only(tokenizer):
    """The group is failure with a reason, its survivors are kept, and other groups finish."""
    queue = run(tokenizer, agent_name=["test_session_one_fails", "single_turn_agent"])
    held = queue.kv_list("train")["train"]
    assert (held["a"]["status"], held["a"]["reason"]) == ("failure", "failed")
    assert "tool crashed" in held["a"]["error"]
    assert "a_0_0" in held
    assert "a_1_0" not in held
    assert held["b"]["status"] == "finished"


def test_unknown_loop_stops_the_run_and_lists_the_known(tokenizer):
    """A mistake of the user's is raised, after its group is marked."""
    with pytest.raises(AgentLoopError, match=r"unknown agent loop 'nope'.*single_turn_agent"):
        run(tokenizer, uids=["a"], agent_name=["nope"])
    assert run.queue.kv_list("train")["train"]["a"]["status"] == "failure"
    with pytest.raises(AgentLoopError, match="nope"):
        agent_loop("nope")


def test_each_session_has_its_own_seed(tokenizer):
    """Seeds differ by session, prompt, step, turn and run, and are the same in any batch."""
    rollout, alone = EchoRollout(), EchoRollout()
    run(tokenizer, rollout=rollout, uids=["a", "b"])
    run(tokenizer, rollout=alone, uids=["b"])
    assert len(set(rollout.requests.values())) == 4
    assert alone.requests == {key: seed for key, seed in rollout.requests.items() if key.startswith("b")}
    base = Session("a", 0, 1, 7).draw_seed(0)
    assert len({base, Session("a", 0, 2, 7).draw_seed(0), Session("a", 0, 1, 8).draw_seed(0)}) == 3
    assert base != Session("a", 0, 1, 7).draw_seed(1)
    assert 0 <= base < 2**63


@pytest.mark.parametrize(("truncation", "kept"), [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])])
def test_long_prompts_are_cut_as_asked(truncation, kept):
    """left drops the beginning, right the end, middle keeps both ends."""
    assert fit_prompt([1, 2, 3, 4, 5], 3, truncation, "u") == kept
    assert fit_prompt([1, 2], 3, truncation, "u") == [1, 2]


def test_long_prompt_under_error_says_what_to_set():
    """truncation=error is one line with the ways out."""
    with pytest.raises(AgentLoopError, match=r"data\.max_prompt_length=3.*filter_overlong_prompts"):
        fit_prompt([1, 2, 3, 4], 3, "error", "u")


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [AgentLoopOutput([1], [], [])],
        [AgentLoopOutput([], [1], [1])],
        [AgentLoopOutput([1], [1, 2], [1])],
        [AgentLoopOutput([1], [1, 2], [1, 1], [-0.1])],
    ],
)
def test_outputs_no_trajectory_can_be_made_of(outputs):
    """Nothing, an empty prompt or response, and parts of other lengths are refused."""
    with pytest.raises(SessionError):
        check_outputs(outputs)


def test_log_probs_on_some_outputs_only_fail_the_group(tokenizer):
    """The queue would drop the field for every row, so a group that has it in part fails instead."""

    @register("test_log_probs_sometimes")
    class Sometimes(AgentLoopBase):
        async def run(self, sampling_params, **row):
            return AgentLoopOutput([1], [2], [1], [-0.1] if self.session.session_id else None)

    held = run(tokenizer, uids=["a"], agent_name=["test_log_probs_sometimes"]).kv_list("train")["train"]
    assert held["a"]["status"] == "failure"
    assert "response_logprobs" in held["a"]["error"]
