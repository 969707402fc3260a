"""The tool loop: what the policy wrote and what it was told stay apart, and the trace proves how they were joined."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields

import pytest

from lineage.trainer.agent_loop import (
    AgentLoopError,
    LoopContext,
    MultiTurn,
    Session,
    ToolAgentLoop,
)
from lineage.trainer.agent_loop.tool_agent import call_tool, cut
from lineage.trainer.config.actor_rollout_ref import MultiTurnConfig
from lineage.trainer.rollout.base import SamplingParams, TokenOutput
from lineage.trainer.tools import BaseInteraction, BaseTool, FunctionCall, ToolResponse, function_schema
from lineage.trainer.tools.config import load_tools

END = "<|im_end|>"


def call(name="calculator", **arguments):
    """A policy's tool call, as hermes writes it."""
    body = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{body}}}}}</tool_call>{END}'


class Script:
    """An engine that writes a session's texts in turn, cut to the room it is given, and remembers its requests."""

    def __init__(self, tokenizer, *texts, versions=(4,)):
        self.tokenizer, self.texts, self.versions = tokenizer, texts, versions
        self.prompts, self.rooms = [], []

    async def generate(self, request_id, *, prompt_ids, sampling_params, max_tokens, seed):
        turn = int(request_id.rpartition("_")[2])
        self.prompts.append(list(prompt_ids))
        self.rooms.append(max_tokens)
        whole = self.tokenizer.encode(self.texts[min(turn, len(self.texts) - 1)], add_special_tokens=False)
        ids = whole[:max_tokens]
        reason = "stop" if len(ids) == len(whole) else "length"
        version = self.versions[min(turn, len(self.versions) - 1)]
        return TokenOutput(ids, [-0.5 - turn] * len(ids), reason, len(ids), {"global_steps": version})


def run(tokenizer, engine, *, response_length=400, tools=None, interactions=None, extra_info=None, **limits):
    """One session of the tool loop."""
    context = LoopContext(
        engine,
        tokenizer,
        prompt_length=64,
        response_length=response_length,
        multi_turn=MultiTurn(**limits),
        tools=load_tools(None) if tools is None else {tool.name: tool for tool in tools},
        interactions=interactions or {},
    )
    loop = ToolAgentLoop(context, Session("u", 0, 5, 7))
    row = {"raw_prompt": [{"role": "user", "content": "3+4?"}], "extra_info": extra_info or {}}
    return asyncio.run(loop.run(SamplingParams(), **row))


def spans(tokenizer, output):
    """Role and text of each turn."""
    ids = output.prompt_ids + output.response_ids
    return [(turn.role, tokenizer.decode(ids[turn.start : turn.start + turn.length])) for turn in output.turns]


def test_a_tool_is_called_and_read(tokenizer):
    """The answer follows the call as the template writes it, and the policy goes on after the head of its next turn."""
    output = run(tokenizer, Script(tokenizer, call(expression="3+4"), f"7{END}", versions=(4, 6)))
    assert spans(tokenizer, output) == [
        ("prompt", f"<|im_start|>user\n3+4?{END}\n<|im_start|>assistant\n"),
        ("policy", call(expression="3+4")),
        ("inserted", "\n"),
        ("observation", f"<|im_start|>tool\n7{END}\n<|im_start|>assistant\n"),
        ("policy", f"7{END}"),
    ]
    assert output.num_turns == 4
    fields = output.extra_fields
    assert (fields["finish_reason"], fields["min_global_steps"], fields["max_global_steps"]) == ("stop", 4, 6)
    assert fields["generated"] == sum(output.response_mask) == sum(turn.generated or 0 for turn in output.turns)
    assert (fields["tool_rewards"], fields["turn_scores"]) == ([0.0], [])


def test_observations_train_nothing(tokenizer):
    """Mask and log-probs are those of the policy on its tokens, 0 on all others."""
    output = run(tokenizer, Script(tokenizer, call(expression="3+4"), f"7{END}"))
    policy, last = output.turns[1], output.turns[4]
    between = last.start - policy.start - policy.length
    assert output.response_mask == [1] * policy.length + [0] * between + [1] * last.length
    assert output.response_logprobs == [-0.5] * policy.length + [0.0] * between + [-1.5] * last.length


def test_the_conversation_is_only_added_to(tokenizer):
    """Each request's prompt is the last one, what was answered and what was observed, token by token."""
    engine = Script(tokenizer, call(expression="3+4"), call(expression="x"), f"7{END}")
    output = run(tokenizer, engine)
    whole = output.prompt_ids + output.response_ids
    starts = [turn.start for turn in output.turns if turn.role == "policy"]
    assert engine.prompts == [whole[:start] for start in starts]
    assert engine.rooms == [400 + len(output.prompt_ids) - start for start in starts]


def test_an_answer_is_never_tokenised_again(tokenizer):
    """Tokens that their own text would not give back stay as they were generated."""

    class Odd(Script):
        async def generate(self, request_id, **request):
            answer = await super().generate(request_id, **request)
            first = [] if request_id != "u_0_0" else [tokenizer.unk_token_id]
            return TokenOutput(first + answer.token_ids, [-0.5] * len(first) + answer.log_probs, "stop", 9)

    engine = Odd(tokenizer, call(expression="3+4"), f"7{END}")
    output = run(tokenizer, engine)
    assert output.response_ids[0] == tokenizer.unk_token_id
    assert engine.prompts[1][len(output.prompt_ids)] == tokenizer.unk_token_id
    assert output.extra_fields["min_global_steps"] is output.extra_fields["max_global_steps"] is None


@pytest.mark.parametrize(
    ("limits", "policy_turns", "num_turns"),
    [({"max_assistant_turns": 2}, 2, 4), ({"max_user_turns": 2}, 3, 6), ({"max_assistant_turns": 1}, 1, 2)],
)
def test_turn_limits_end_the_session(tokenizer, limits, policy_turns, num_turns):
    """A policy that would call tools for ever stops at the limit, on a turn of its own."""
    output = run(tokenizer, Script(tokenizer, call(expression="3+4")), **limits)
    assert [turn.role for turn in output.turns].count("policy") == policy_turns
    assert output.turns[-1].role == "policy"
    assert output.num_turns == num_turns


def test_a_full_response_ends_the_session(tokenizer):
    """A response at the limit is not asked for tools, and says length."""
    text = call(expression="3+4")
    output = run(tokenizer, Script(tokenizer, text), response_length=20)
    assert len(output.response_ids) == 20
    assert output.extra_fields["finish_reason"] == "length"


@pytest.mark.parametrize("room", [0, 1])
def test_an_answer_without_room_after_it_is_not_added(tokenizer, room):
    """The observation is left out when it would fill the response; with one token more it is in, and one is written."""
    text = call(expression="3+4")
    fits = len(tokenizer.encode(text)) + len("\n<tool\n7>\n<assistant\n")
    output = run(tokenizer, Script(tokenizer, text, "7777"), response_length=fits + room)
    roles = [turn.role for turn in output.turns]
    assert roles == ["prompt", "policy", *["inserted", "observation", "policy"] * room]
    assert output.extra_fields["finish_reason"] == ("length" if room else "tool")
    assert len(output.response_ids) <= fits + room


def test_calls_beyond_the_limit_are_dropped(tokenizer):
    """max_parallel_calls of a turn are run, and all their answers are one observation."""
    text = (call(expression="1+1") + call(expression="2+2") + call(expression="3+3")).replace(END, "") + END
    output = run(tokenizer, Script(tokenizer, text, f"ok{END}"), max_parallel_calls=2)
    observed = spans(tokenizer, output)[3][1]
    assert observed == f"<|im_start|>tool\n2{END}\n<|im_start|>tool\n4{END}\n<|im_start|>assistant\n"


class Gate(BaseTool):
    """Raises, or answers with what it was made with; remembers its life."""

    life: list[str]

    def get_openai_tool_schema(self):
        return function_schema("gate", "opens", word="any")

    async def create(self, instance_id=None, **kwargs):
        self.life = ["create"]
        self.given = kwargs["create_kwargs"]
        return "one", ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.life.append(f"execute {instance_id}")
        if parameters["word"] == "bad":
            raise RuntimeError("the gate is stuck")
        return ToolResponse(self.given.get("answer")), self.given.get("reward"), {}

    async def release(self, instance_id, **kwargs):
        self.life.append(f"release {instance_id}")


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("gate", '{"word": "bad"}', "Error executing tool 'gate': the gate is stuck"),
        ("gate", "{}", "Error executing tool 'gate': missing argument 'word'"),
        ("gate", '"word"', "Invalid arguments for 'gate': not a JSON object"),
        ("door", "{}", "Unknown function 'door'. Available tools: ['gate']"),
    ],
)
def test_what_goes_wrong_is_told_to_the_policy(name, arguments, text):
    """A tool that raises, and a call it does not take, are words to read, with reward 0."""
    assert asyncio.run(call_tool(FunctionCall(name, arguments), {"gate": Gate()}, {})) == (text, 0.0)


class Stuck(Gate):
    """Raises where it is asked to: when it is made, or when it is released."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    async def create(self, instance_id=None, **kwargs):
        if self.where == "create":
            raise RuntimeError("the gate is stuck")
        return await super().create(instance_id, **kwargs)

    async def release(self, instance_id, **kwargs):
        raise RuntimeError("the gate is stuck")


@pytest.mark.parametrize("where", ["create", "release"])
def test_a_tool_that_fails_around_its_call_is_told_too(where):
    """What it raises before or after its answer ends no session."""
    told = asyncio.run(call_tool(FunctionCall("gate", '{"word": "good"}'), {"gate": Stuck(where)}, {}))
    assert told == ("Error executing tool 'gate': the gate is stuck", 0.0)


@pytest.mark.parametrize("word", ["good", "bad"])
def test_a_tool_lives_for_its_call(tokenizer, word):
    """It is made with the row's create_kwargs, executed, and released whatever happens; its reward is kept."""
    gate = Gate()
    kwargs = {"gate": {"create_kwargs": {"answer": "open", "reward": 0.5}}}
    output = run(
        tokenizer, Script(tokenizer, call("gate", word=word), END), tools=[gate], extra_info={"tools_kwargs": kwargs}
    )
    assert gate.life == ["create", "execute one", "release one"]
    assert output.extra_fields["tool_rewards"] == [0.5 if word == "good" else 0.0]
    assert ("open" in spans(tokenizer, output)[3][1]) == (word == "good")


def test_a_row_chooses_its_tools(tokenizer):
    """tool_selection leaves the other tools unknown; a tool without a reward adds none."""
    text = call(expression="3+4")
    output = run(tokenizer, Script(tokenizer, text, END), extra_info={"tool_selection": ["lookup", "nothing"]})
    assert "Unknown function 'calculator'" in spans(tokenizer, output)[3][1]
    gate = Gate()
    output = run(tokenizer, Script(tokenizer, call("gate", word="good"), END), tools=[gate])
    assert output.extra_fields["tool_rewards"] == []


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("left", "(truncated)...6789"),
        ("right", "0123...(truncated)"),
        ("middle", "01...(truncated)...89"),
    ],
)
def test_long_tool_texts_are_cut_on_a_side(side, text):
    """The characters kept are those at the side named, or both ends, and the cut is marked."""
    limits = MultiTurn(max_tool_response_length=4, tool_response_truncate_side=side)
    assert cut("0123456789", limits).text == text
    assert cut("0123", limits).text == "0123"


def test_a_cut_is_declared_on_its_turn(tokenizer):
    """The observation's turn says how many tokens it would have had."""
    table = {"lookup": {"create_kwargs": {"table": {"a": "0123456789" * 4}}}}
    output = run(
        tokenizer, Script(tokenizer, call("lookup", key="a"), END), extra_info={"tools_kwargs": table},
        max_tool_response_length=10,
    )  # fmt: skip
    observation = output.turns[3]
    assert observation.truncated_from == observation.length - len("01234...(truncated)...56789") + 40


class Coach(BaseInteraction):
    """Answers until the policy says it right."""

    def __init__(self, config=None):
        super().__init__(config)
        self.life = []

    async def start_interaction(self, instance_id, **kwargs):
        self.life.append(("start", instance_id, kwargs["goal"]))
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        said = messages[-1]["content"]
        self.life.append(("said", [message["role"] for message in messages], said))
        if said == "crash":
            raise RuntimeError("no coach")
        return said == kwargs["goal"], "again", float(said == kwargs["goal"]), {}

    async def finalize_interaction(self, instance_id):
        self.life.append(("final", instance_id))


def test_an_interaction_answers_as_a_user(tokenizer):
    """Its words are a user turn with mask 0, its scores are kept, and it ends the session when it is content."""
    coach = Coach()
    kwargs = {"name": "coach", "goal": "7"}
    engine = Script(tokenizer, f"8{END}", f"7{END}")
    output = run(tokenizer, engine, interactions={"coach": coach}, extra_info={"interaction_kwargs": kwargs})
    assert spans(tokenizer, output)[3] == ("observation", f"<|im_start|>user\nagain{END}\n<|im_start|>assistant\n")
    assert output.extra_fields["turn_scores"] == [0.0, 1.0]
    assert output.num_turns == 4
    assert coach.life == [
        ("start", "u_0", "7"),
        ("said", ["user", "assistant"], "8"),
        ("said", ["user", "assistant", "user", "assistant"], "7"),
        ("final", "u_0"),
    ]


def test_an_interaction_is_finalized_when_it_raises(tokenizer):
    """A failed session leaves nothing open; a name nobody configured is the user's mistake."""
    coach = Coach()
    kwargs = {"name": "coach", "goal": "7"}
    with pytest.raises(RuntimeError, match="no coach"):
        run(
            tokenizer, Script(tokenizer, f"crash{END}"), interactions={"coach": coach},
            extra_info={"interaction_kwargs": kwargs},
        )  # fmt: skip
    assert coach.life[-1] == ("final", "u_0")
    with pytest.raises(AgentLoopError, match=r"name=judge.*has: coach"):
        run(
            tokenizer, Script(tokenizer, END), interactions={"coach": coach},
            extra_info={"interaction_kwargs": {"name": "judge"}},
        )  # fmt: skip


def test_every_limit_is_a_configuration_key():
    """The loop's limits are those of rollout.multi_turn, with the same defaults."""
    configured = {item.name: getattr(MultiTurnConfig(), item.name) for item in fields(MultiTurnConfig)}
    assert configured.items() >= vars(MultiTurn()).items()


def test_who_wrote_a_tool_hears_of_each_kind_of_failure_once(caplog):
    """The policy is told every time; a refusal of the arguments (ValueError) is no failure of the tool."""

    class Number(Gate):
        async def execute(self, instance_id, parameters, **kwargs):
            if parameters["word"] == "bad":
                raise ValueError("no")
            return ToolResponse(text=42), 0.0, {}

    for word in ("good", "good", "bad"):
        text, reward = asyncio.run(call_tool(FunctionCall("gate", json.dumps({"word": word})), {"gate": Number()}, {}))
        assert text.startswith("Error executing tool 'gate': ")
        assert reward == 0.0
    assert [record.getMessage() for record in caplog.records] == [
        "tool gate raised TypeError: the text of its ToolResponse is a int"
    ]
