"""Agent loops: sessions run, are scored, and end in the queue; a failing one fails its group."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import pytest

from lineage.trainer.agent_loop import (
    AgentLoopBase,
    AgentLoopError,
    AgentLoopManager,
    AgentLoopOutput,
    AgentLoopWorker,
    LoopContext,
    Session,
    SessionError,
    Turn,
    agent_loop,
    agent_loop_manager_class,
    register,
    register_agent_loops,
)
from lineage.trainer.agent_loop import registry as loops
from lineage.trainer.agent_loop.base import fit_prompt
from lineage.trainer.config import compose
from lineage.trainer.protocol import DataProto, lengths_of, object_array
from lineage.trainer.queue import LocalTransferQueue
from lineage.trainer.reward import Score
from lineage.trainer.rollout.base import SamplingParams, TokenOutput
from lineage.trainer.setup import build_agent_loop_manager


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
        return Score(float(len(response_ids)), {"tokens": len(response_ids)})


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


@register("test_leaves")
class Leaves(AgentLoopBase):
    """Exits for prompt a, raises for the others."""

    async def run(self, sampling_params, **row):
        if self.session.uid == "a":
            sys.exit(3)
        raise ValueError("first line\nsecond line")


def run(
    tokenizer,
    *,
    uids=("a", "b"),
    sessions=2,
    scorer=None,
    rollout=None,
    workers=1,
    prompt_length=64,
    manager=AgentLoopManager,
    **columns,
):
    """Run prompts through workers; returns the queue."""
    queue = LocalTransferQueue()
    context = LoopContext(rollout or EchoRollout(), tokenizer, prompt_length=prompt_length, response_length=8)
    made = [
        AgentLoopWorker(queue, context, scorer, default_agent_loop="single_turn_agent", seed=7) for _ in range(workers)
    ]
    messages = [[{"role": "user", "content": f"say {uid}"}] for uid in uids]
    rows = {"uid": object_array(list(uids)), "raw_prompt": object_array(messages)}
    rows.update({name: object_array(list(column)) for name, column in columns.items()})
    meta = {"global_steps": 5, "partition_id": "train", "expected": sessions, "sampling_params": SamplingParams()}
    batch = DataProto.from_dict(rows, meta)

    async def go():
        runs = manager(made)
        runs.generate_sequences(batch)
        assert runs.running
        await runs.join()
        assert not runs.running

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
    assert fit_prompt([1, 2, 3, 4, 5], 3, truncation, "u", "data.max_prompt_length") == kept
    assert fit_prompt([1, 2], 3, truncation, "u", "data.max_prompt_length") == [1, 2]


def test_long_prompt_under_error_says_what_to_set():
    """truncation=error is one line with the ways out."""
    with pytest.raises(SessionError, match=r"data\.max_prompt_length=3: raise it or set data\.truncation"):
        fit_prompt([1, 2, 3, 4], 3, "error", "u", "data.max_prompt_length")


@pytest.mark.parametrize(("uid", "said"), [("a", "SystemExit: 3"), ("b", "ValueError: first line")])
def test_what_a_loop_raises_is_one_line_that_names_the_loop(tokenizer, uid, said):
    """sys.exit ends a session, not the run; of a text of several lines the first is enough."""
    tags = run(tokenizer, sessions=1, agent_name=["test_leaves", "test_leaves"]).kv_list("train")["train"]
    assert tags[uid]["error"] == f"SessionError: test_leaves: {said}"


def test_what_a_reward_raises_names_the_reward(tokenizer):
    """A scorer that exits fails the session, not the run."""

    class Exits:
        async def compute_score(self, *args):
            sys.exit(5)

    tags = run(tokenizer, sessions=1, scorer=Exits()).kv_list("train")["train"]
    assert tags["a"]["error"] == "SessionError: reward: SystemExit: 5"


def test_log_probs_on_some_outputs_only_fail_the_group(tokenizer):
    """The queue would drop the field for every row, so a group that has it in part fails instead."""

    @register("test_log_probs_sometimes")
    class Sometimes(AgentLoopBase):
        async def run(self, sampling_params, **row):
            return AgentLoopOutput([1], [2], [1], [-0.1] if self.session.session_id else None)

    held = run(tokenizer, uids=["a"], agent_name=["test_log_probs_sometimes"]).kv_list("train")["train"]
    assert held["a"]["status"] == "failure"
    assert "response_logprobs" in held["a"]["error"]


# ------------------------------------------------------------------------------------------------ loops of one's own

OWN = """
from lineage.trainer.agent_loop import AgentLoopBase, AgentLoopManager, AgentLoopOutput

class Fixed(AgentLoopBase):
    def __init__(self, context, session, *, token=9, times=1):
        super().__init__(context, session)
        self.answer = [token] * times

    async def run(self, sampling_params, **row):
        return AgentLoopOutput([1], self.answer, [1] * len(self.answer), [-0.1] * len(self.answer))

class Backwards(AgentLoopManager):
    def generate_sequences(self, batch):
        for row in reversed(range(len(batch))):
            self.start(self.workers[0], batch[[row]])

class Half:
    def generate_sequences(self, batch):
        pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A file with a loop and a manager of the user's; the current folder is its own, and loops are forgotten again."""
    path = tmp_path / "own_loops.py"
    path.write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(loops, "AGENT_LOOPS", dict(loops.AGENT_LOOPS))
    return path


def test_a_row_may_name_a_class(tokenizer, own):
    """agent_name takes module.Class and file.py:Class beside registered names; a missing one is the default loop."""
    names = [f"{own}:Fixed", "own_loops.Fixed", None, float("nan"), "single_turn_agent"]
    queue = run(tokenizer, uids="abcde", sessions=1, agent_name=names)
    answers = [queue.kv_batch_get([f"{uid}_0_0"], "train")["responses"].unbind()[0].tolist() for uid in "abcde"]
    assert answers[:2] == [[9], [9]]
    assert answers[2] == answers[3] == answers[4] != [9]


def test_loops_of_a_file_take_its_arguments(tokenizer, own):
    """Each entry of agent_loop_config_path is a name, a class and its keyword arguments."""
    own.with_name("loops.yaml").write_text(
        "- {name: twice, _target_: own_loops.Fixed, times: 2}\n"
        f"- {{name: thrice, _target_: '{own}:Fixed', token: 4, times: 3}}\n"
    )
    register_agent_loops("loops.yaml")
    queue = run(tokenizer, uids="ab", sessions=1, agent_name=["twice", "thrice"])
    data = queue.kv_batch_get(["a_0_0", "b_0_0"], "train")["responses"]
    assert [row.tolist() for row in data.unbind()] == [[9, 9], [4, 4, 4]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "no such file"),
        ("{", "not readable YAML"),
        ("name: x", "a list of {name, _target_} is needed"),
        ("- {name: x}", "entry 1 needs name and _target_"),
        ("- {name: x, _target_: nothing.Fixed}", "ModuleNotFoundError: No module named 'nothing'"),
        ("- {name: x, _target_: own_loops.Absent}", "own_loops has no class Absent; it has: AgentLoopBase, Fixed"),
        ("- {name: x, _target_: own_loops.Half}", "Half is not a AgentLoopBase"),
        ("- {name: x, _target_: Fixed}", "neither package.module.Class nor file.py:Class"),
        ("- {name: x, _target_: 'absent.py:Fixed'}", "no such file"),
        ("- {name: x, _target_: own_loops.Fixed, size: 2}", "Fixed got an unexpected keyword argument 'size'"),
        ("- {name: x, _target_: '${oc.env:NO_SUCH_VARIABLE_HERE}'}", "not readable YAML"),
    ],
)
def test_a_file_of_loops_that_cannot_be_used_is_one_line(own, text, expected):
    """The error names the setting, the entry and what is wrong."""
    if text is not None:
        own.with_name("loops.yaml").write_text(text)
    with pytest.raises(AgentLoopError) as caught:
        register_agent_loops("loops.yaml")
    assert expected in str(caught.value)
    assert str(caught.value).startswith("actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml: ")
    assert "\n" not in str(caught.value)


def test_an_error_in_the_users_file_is_one_line(own):
    """A file that fails to run is reported with its error, and again when it is asked for again."""
    own.with_name("broken.py").write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(AgentLoopError, match=r"agent_name=broken\.py:Loop: ZeroDivisionError: division by zero"):
            agent_loop("broken.py:Loop")


def test_a_manager_of_ones_own(tokenizer, own):
    """agent_loop_manager_class names it; what it does not define it has from AgentLoopManager."""
    assert agent_loop_manager_class(None) is AgentLoopManager
    queue = run(tokenizer, uids="abc", sessions=1, manager=agent_loop_manager_class(f"{own}:Backwards"))
    held = queue.kv_list("train")["train"]
    assert [key for key in held if "_" not in key] == ["c", "b", "a"]
    assert all(held[uid]["status"] == "finished" for uid in "abc")
    with pytest.raises(AgentLoopError, match=r"Half has no running, join, cancel; subclass .*AgentLoopManager"):
        agent_loop_manager_class("own_loops.Half")


# ---------------------------------------------------------------------------------------------------- built-in loops


def test_the_revision_has_the_draft_in_its_prompt(tokenizer):
    """draft_revise_agent returns two outputs; the second prompt is the first, the draft and the instruction."""
    rollout = EchoRollout()
    queue = run(tokenizer, uids=["a"], sessions=1, rollout=rollout, agent_name=["draft_revise_agent"])
    assert list(rollout.requests) == ["a_0_0", "a_0_1"]
    prompts = queue.kv_batch_get(["a_0_0", "a_0_1"], "train")["prompts"].unbind()
    draft = queue.kv_batch_get(["a_0_0"], "train")["responses"].unbind()[0]
    text = tokenizer.decode(draft, skip_special_tokens=True)
    messages = [{"role": "user", "content": "say a"}, {"role": "assistant", "content": text}]
    messages.append({"role": "user", "content": "Revise."})
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompts[1].tolist() == list(expected)
    assert [queue.kv_list("train")["train"][f"a_0_{index}"]["num_turns"] for index in (0, 1)] == [2, 4]


def test_a_prompt_a_loop_makes_too_long_fails_its_group(tokenizer):
    """truncation=error inside a loop is a failed session, not the end of the run."""
    rows = {"agent_name": ["draft_revise_agent", "single_turn_agent"]}
    held = run(tokenizer, sessions=1, prompt_length=24, **rows).kv_list("train")["train"]
    assert (held["a"]["status"], held["b"]["status"]) == ("failure", "finished")
    assert "SessionError: draft_revise_agent: prompt a has" in held["a"]["error"]


def test_every_cut_prompt_of_a_session_is_declared(tokenizer):
    """The revision's prompt, which holds the draft, is cut like any other and says how long it was."""
    messages = [{"role": "user", "content": "?"}]
    size = len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    context = LoopContext(EchoRollout(), tokenizer, prompt_length=size, response_length=8, truncation="left")
    loop = agent_loop("draft_revise_agent")(context, Session("u", 0, 5, 7))
    draft, revision = asyncio.run(loop.run(SamplingParams(), raw_prompt=messages))
    text = tokenizer.decode(draft.response_ids, skip_special_tokens=True)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Revise."}]
    whole = len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    assert draft.turns == [Turn("prompt", 0, size), Turn("policy", size, 2, 2)]
    assert revision.turns == [Turn("prompt", 0, size, truncated_from=whole), Turn("policy", size, 2, 2)]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.max_prompt_length=4", "data.max_prompt_length=4"),
        ("actor_rollout_ref.rollout.prompt_length=4", "actor_rollout_ref.rollout.prompt_length=4"),
    ],
)
def test_a_prompt_too_long_names_the_setting_that_limits_it(tokenizer, override, named):
    """The rollout's own limit is not blamed on the data's."""
    config = compose([override])
    limit = config.actor_rollout_ref.rollout.prompt_length or config.data.max_prompt_length
    parts = SimpleNamespace(
        rollout=EchoRollout(),
        tokenizer=tokenizer,
        prompt_length=limit,
        response_length=8,
        vocab_size=None,
        queue=None,
        reward=SimpleNamespace(session_scorer=None),
    )
    context = build_agent_loop_manager(config, parts).workers[0].context
    with pytest.raises(SessionError) as caught:
        agent_loop("single_turn_agent")(context, Session("u", 0, 5, 7)).apply_chat_template(
            [{"role": "user", "content": "?"}]
        )
    assert f"tokens, {named}: raise it" in str(caught.value)


def test_what_the_scorer_says_beside_the_score_stays_with_the_outputs(tokenizer):
    """reward_extra_info is on every output of the session, as in verl."""
    queue = run(tokenizer, scorer=LengthScorer(), uids=["a"], sessions=1, agent_name=["test_two_outputs"])
    extra = queue.kv_batch_get(["a_0_0", "a_0_1"], "train")["extra_fields"].tolist()
    assert [fields["reward_extra_info"]["tokens"] for fields in extra] == [3, 3]
