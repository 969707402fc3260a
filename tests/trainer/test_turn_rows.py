"""Turns in the trace prove how a trajectory was made; loops that name none are read by their mask."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

import lineage
from lineage.hooks import trace_queue
from lineage.trainer.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    AgentLoopWorker,
    LoopContext,
    Session,
    SingleTurnAgentLoop,
    ToolAgentLoop,
    Turn,
    register,
)
from lineage.trainer.agent_loop.turns import turns_of
from lineage.trainer.protocol import DataProto, object_array
from lineage.trainer.queue import LocalTransferQueue
from lineage.trainer.rollout import hf
from lineage.trainer.rollout.base import SamplingParams, TokenOutput
from lineage.trainer.rollout.sampling import Drawn
from lineage.trainer.tools.config import load_tools

END = "<|im_end|>"


def call(name="calculator", **arguments):
    """A policy's tool call, as hermes writes it."""
    body = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{body}}}}}</tool_call>{END}'


@register("test_tool_masked")
class Masked(AgentLoopBase):
    """A loop of somebody's own that names no turns."""

    async def run(self, sampling_params, **row):
        mask = [1, 1, 0, 0, 0, 1]
        return AgentLoopOutput([5, 6], list(range(10, 16)), mask, [-0.5] * 6, extra_fields={"generated": 3})


def traced_run(tokenizer, monkeypatch, folder, texts, agents, *, sessions=2, response_length=160):
    """Run prompts through a worker and the real engine, whose decoder is a script by (prompt number, turn)."""

    def decode(module, prompts, limits, seeds, params, **ends):
        drawn = []
        for ids in prompts:
            text = tokenizer.decode(ids)
            script = texts[int(text.partition("user\n")[2][0])]
            drawn.append(tokenizer.encode(script[min(text.count("tool\n"), len(script) - 1)], add_special_tokens=False))
        rows = [ids[:limit] for ids, limit in zip(drawn, limits, strict=True)]
        ended = [len(row) == len(ids) for row, ids in zip(rows, drawn, strict=True)]
        return Drawn(rows, [[-0.5] * len(row) for row in rows], ended)

    monkeypatch.setattr(hf, "decode", decode)
    engine = hf.HFRollout(torch.nn.Linear(1, 1), eos_token_ids=[tokenizer.eos_token_id], pad_token_id=0)
    engine.version, engine.asleep = 4, False
    context = LoopContext(
        engine, tokenizer, prompt_length=64, response_length=response_length, tools=load_tools(None)
    )  # fmt: skip
    messages = [[{"role": "user", "content": f"{number} go"}] for number in range(len(agents))]
    rows = {"uid": object_array([f"u{number}" for number in range(len(agents))]), "raw_prompt": object_array(messages)}
    rows["agent_name"] = object_array(list(agents))
    meta = {"global_steps": 5, "partition_id": "train", "expected": sessions, "sampling_params": SamplingParams()}
    with lineage.record(folder) as recorder:
        recorder.step(5)
        queue = trace_queue(LocalTransferQueue())
        worker = AgentLoopWorker(queue, context, None, default_agent_loop="single_turn_agent", seed=7)
        asyncio.run(worker.run(DataProto.from_dict(rows, meta)))
    return lineage.open(folder)


# Nothing but equality: turn k begins where k-1 ends; the last ends where the sequence does; each request of a policy
# turn was sent exactly the tokens before it, and its answer is the turn.
PROOF = """
with turns as (
    select key, turn, role, start, generated, length, fingerprint as fp, marks[1] as before, marks[2] as after,
        lead(marks[1]) over mine as following
    from facts where entity = 'turn' and stage = 'rollout' window mine as (partition by key order by turn)
),
whole as (select key, length, fingerprint as fp from facts
    where field = 'input_ids' and entity = 'trajectory' and op = 'produce'),
asked as (
    select regexp_extract(p.key, '^(.+)_[0-9]+$', 1) as session, p.length as prompt_length, p.fingerprint as prompt_fp,
        r.length as length, r.fingerprint as fp, r.generated as generated
    from facts as p join facts as r on p.key = r.key and p.entity = r.entity and p.seq < r.seq
    where p.entity = 'request' and p.field = 'prompts' and r.field = 'responses'
),
judged as (
    select t.*, w.length as seq_len,
        t.before.at = t.start and coalesce(t.following = t.after, t.after = {'at': w.length, 'fp': w.fp}) as tiled,
        exists (from asked as a where a.session = regexp_extract(t.key, '^(.+)_[0-9]+$', 1)
            and a.prompt_length = t.start and a.prompt_fp = t.before.fp
            and a.length = t.length and a.fp = t.fp and a.generated = t.generated) as sent
    from turns as t join whole as w using (key)
)
"""


def judged(trace, select):
    """Ask the proof."""
    return trace.connection.execute(PROOF + select).fetchall()


def test_the_trace_proves_that_turns_tile_and_prompts_extend(tokenizer, monkeypatch, tmp_path):
    """By equality of lengths and fingerprints alone; one row holds the turns of all sessions of a worker's call."""
    texts = [(call(expression="3+4"), call(expression="1/0"), f"7{END}"), (f"4{END}",), (f"{END}",)]
    agents = ["tool_agent", "single_turn_agent", "test_tool_masked"]
    trace = traced_run(tokenizer, monkeypatch, tmp_path / "run", texts, agents, response_length=400)
    rows = trace.connection.execute("select n, producer, span from \"rows\" where entity = 'turn'").fetchall()
    assert rows == [(2 * (8 + 2 + 4), "AgentLoopWorker.run", "sequence")]
    assert judged(trace, "select count(*), bool_and(tiled) from judged") == [(28, True)]
    sent = "select count(*), bool_and(sent) from judged where role = 'policy' and key not like 'u2%'"
    assert judged(trace, sent) == [(8, True)]
    ribbon = judged(trace, "select role from judged where key = 'u0_1_0' order by turn")
    assert [role for (role,) in ribbon] == ["prompt", "policy", *["inserted", "observation", "policy"] * 2]


@register("test_tool_forgets")
class Forgets(ToolAgentLoop):
    """Sends the engine another prompt than the one the trajectory has: its first token is left out."""

    async def generate(self, prompt_ids, sampling_params, max_tokens=None):
        kept = prompt_ids if self._turn == 0 else prompt_ids[1:]
        return await super().generate(kept, sampling_params, max_tokens)


@register("test_tool_gap")
class Gap(ToolAgentLoop):
    """Does not say whose a part of its tokens is."""

    async def run(self, sampling_params, **row):
        output = await super().run(sampling_params, **row)
        output.turns = [turn for turn in output.turns if turn.role != "inserted"]
        return output


@pytest.mark.parametrize(("agent", "tiled", "sent"), [("test_tool_forgets", 5, 1), ("test_tool_gap", 2, 1)])
def test_the_trace_shows_what_does_not_fit(tokenizer, monkeypatch, tmp_path, agent, tiled, sent):
    """A prompt that is no extension of the last, and tokens that no turn owns, are seen by the same equalities."""
    texts = [(call(expression="3+4"), f"7{END}")]
    trace = traced_run(tokenizer, monkeypatch, tmp_path / "run", texts, [agent], sessions=1)
    found = judged(trace, "select count(*) filter (tiled), count(*) filter (sent) from judged")
    assert found == [(tiled, sent)]


@register("test_turns_own_kinds")
class OwnKinds(AgentLoopBase):
    """Gives what the row says: another sequence than a list beside one, and turns that nobody can read."""

    async def run(self, sampling_params, **row):
        kind, turns = row["kind"], row["turns"]
        return AgentLoopOutput(kind([5, 6]), [7, 8, 9], kind([1, 1, 1]), kind([-0.5, -0.25, 0.0]), turns=turns)


UNREADABLE = [[Turn("policy", None, 2)], ["policy"], 3]


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor])
@pytest.mark.parametrize("turns", [[], [Turn("policy", 3, 9)], *UNREADABLE])
def test_a_trace_changes_no_session(tokenizer, tmp_path, kind, turns):
    """Whatever a loop gives, the queue holds the same traced and untraced; turns that cannot be read are a lost row."""
    context = LoopContext(None, tokenizer, prompt_length=64, response_length=20)
    rows = {"uid": ["u"], "raw_prompt": [[{"role": "user", "content": "?"}]], "kind": [kind], "turns": [turns]}
    meta = {"global_steps": 5, "partition_id": "train", "expected": 1, "sampling_params": SamplingParams()}

    def held():
        store = LocalTransferQueue()
        worker = AgentLoopWorker(trace_queue(store), context, None, default_agent_loop="test_turns_own_kinds", seed=7)
        asyncio.run(worker.run(DataProto.from_dict({name: object_array(one) for name, one in rows.items()}, meta)))
        data = store.kv_batch_get(["u_0_0"], "train", ["input_ids", "loss_mask", "rollout_log_probs"])
        return store.kv_list("train"), {name: data[name].unbind()[0].tolist() for name in data.keys()}  # noqa: SIM118

    untraced = held()
    assert untraced[0]["train"]["u"]["status"] == "finished"
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(5)
        assert held() == untraced
    report = lineage.check(tmp_path / "run", select="KEY001")
    assert ("1 rows dropped in step 5" in report.state) == (turns in UNREADABLE)


def test_turns_of_a_loop_that_names_none(tokenizer):
    """Runs of its mask are its turns; what the engine counted is known where there is one policy turn."""
    output = AgentLoopOutput([5, 6], [7, 8, 9], [0, 1, 1], extra_fields={"generated": 2})
    assert turns_of(output) == [Turn("prompt", 0, 2), Turn("observation", 2, 1), Turn("policy", 3, 2, 2)]


def test_single_turn_names_its_turns(tokenizer):
    """A prompt that was cut says how long it was, and the policy's turn what the engine counted."""

    class Seven:
        async def generate(self, request_id, **request):
            return TokenOutput([7, tokenizer.eos_token_id], [-0.5, -0.5], "stop", 2)

    context = LoopContext(Seven(), tokenizer, prompt_length=10, response_length=8, truncation="left")
    row = {"raw_prompt": [{"role": "user", "content": "3+4?"}]}
    output = asyncio.run(SingleTurnAgentLoop(context, Session("u", 0, 5, 7)).run(SamplingParams(), **row))
    whole = len(tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, return_dict=False))
    assert output.turns == [Turn("prompt", 0, 10, truncated_from=whole), Turn("policy", 10, 2, 2)]
    assert (output.extra_fields["turn_scores"], output.extra_fields["tool_rewards"]) == ([], [])
