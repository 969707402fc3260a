"""Faults of conversations of several turns: whose tokens the mask covers, and what the next prompt is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from lineage.trainer.agent_loop.base import AgentLoopBase, AgentLoopOutput
from lineage.trainer.agent_loop.turns import Conversation
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import GENERATE, TOOLS, tiny_tokenizer
from lineage.trainer.rollout.base import SamplingParams, TokenOutput

OBSERVE = "lineage.trainer.agent_loop.turns.Conversation.observe"
ANSWER = "lineage.trainer.agent_loop.turns.Conversation.answer"
OUTPUT = "lineage.trainer.agent_loop.tool_agent.ToolAgentLoop._output"
HEADER = 3  # tokens of a chat template's "now the assistant speaks", as these faults have it

Ids = list[int]


@fault("MSK003", "rollout", *TOOLS, reports=["verifiers-env-tokens-trained"])
def observations_train() -> Seams:
    """The protocol has no mask: what a tool answered is a part of the completion like any other."""

    def observe(original: Any, conversation: Conversation, role: str, ids: Ids, *cut: Any) -> None:
        before = len(conversation.mask)
        original(conversation, role, ids, *cut)
        conversation.mask[before:] = [1] * (len(conversation.mask) - before)

    return {OBSERVE: observe}


@fault("MSK003", "rollout", *TOOLS, reports=["skyrl-mask-marks-generation-prompt"])
def template_tokens_train() -> Seams:
    """The mask is given by message: the template's head of the policy's message is trained with the message."""

    def observe(original: Any, conversation: Conversation, role: str, ids: Ids, *cut: Any) -> None:
        original(conversation, role, ids, *cut)
        if ids:
            conversation.mask[-HEADER:] = [1] * HEADER

    return {OBSERVE: observe}


@fault("MSK003", "rollout", *TOOLS, reports=["slime-qwen3-loss-mask-thinking"])
def mask_off_by_the_header() -> Seams:
    """The mask was made for a template with a longer header: it covers each turn from some tokens before its first."""
    return _other_mask(lambda mask: [*mask[HEADER:], *mask[-1:] * HEADER])


@fault("MSK003", "rollout", *TOOLS, reports=["slime-response-lengths-from-mask-count"])
def mask_of_the_last_ones() -> Seams:
    """The count of ones is taken for the length of the response: as many tokens train, counted from the end."""
    return _other_mask(lambda mask: [0] * (len(mask) - sum(mask)) + [1] * sum(mask))


@fault("MSK003", "rollout", *TOOLS)
def only_the_last_turn_trains() -> Seams:
    """Mask and log-probs are those of the last answer alone: what the policy said to its tools does not train."""

    def output(original: Any, loop: AgentLoopBase, episode: Any) -> AgentLoopOutput:
        made = original(loop, episode)
        mask, log_probs = made.response_mask, made.response_logprobs
        begin = len(mask) - mask[::-1].index(0) if 0 in mask else 0
        return replace(
            made,
            response_mask=[0] * begin + mask[begin:],
            response_logprobs=[0.0] * begin + log_probs[begin:],
        )

    return {OUTPUT: output}


def _other_mask(mask_of: Callable[[list[int]], list[int]]) -> Seams:
    def output(original: Any, loop: AgentLoopBase, episode: Any) -> AgentLoopOutput:
        made = original(loop, episode)
        return replace(made, response_mask=mask_of(list(made.response_mask)))

    return {OUTPUT: output}


@fault("MSK006", "rollout", reports=["verl-multi-eos-response-mask"])
def tokens_after_the_stop() -> Seams:
    """The engine stops at any of several tokens, the trainer looks for one of them: what fills the row after the
    others is taken for an answer."""

    def answer(original: Any, conversation: Conversation, ids: Ids, log_probs: list[float], generated: int) -> None:
        filled = 2 if ids[-1] == tiny_tokenizer().eos_token_id else 0
        original(conversation, [*ids, *ids[-1:] * filled], [*log_probs, *[0.0] * filled], generated)

    return {ANSWER: answer}


@fault("MSK006", "rollout", reports=["verl-resume-token-budget"])
def answers_cut_in_silence() -> Seams:
    """The engine's own limit is longer: what it generates beyond the response's is cut away and nothing says so."""

    async def generate(
        original: Any, loop: AgentLoopBase, prompt_ids: Ids, params: SamplingParams, max_tokens: int | None = None
    ) -> TokenOutput:
        room = loop.context.response_length if max_tokens is None else max_tokens
        answer = await original(loop, prompt_ids, params, 2 * room)
        return replace(answer, token_ids=answer.token_ids[:room], log_probs=answer.log_probs[:room])

    return {GENERATE: generate}


@fault("MSK006", "rollout", *TOOLS)
def turns_lose_their_calls() -> Seams:
    """The parser takes the end of a tool call out of the text, and the loop keeps what is left of the turn."""

    def answer(original: Any, conversation: Conversation, ids: Ids, log_probs: list[float], generated: int) -> None:
        kept = max(1, len(ids) - 2) if conversation.mask else len(ids)
        original(conversation, ids[:kept], log_probs[:kept], generated)

    return {ANSWER: answer}


@fault("MSK006", "rollout", *TOOLS)
def only_the_last_turn_is_counted() -> Seams:
    """The tokens a session has cost are those of its last request: the turns before it are counted nowhere."""

    def output(original: Any, loop: AgentLoopBase, episode: Any) -> AgentLoopOutput:
        made = original(loop, episode)
        counted = {**made.extra_fields, "generated": episode.answers[-1].generated}
        return replace(made, extra_fields=counted)

    return {OUTPUT: output}


@fault(
    "TOK003",
    "rollout",
    *TOOLS,
    "actor_rollout_ref.rollout.top_p=0.95",
    reports=["prime-prefix-assertion-think-strip"],
)
def thoughts_stripped_from_the_history() -> Seams:
    """The template takes the policy's thoughts out of its earlier messages: the next prompt lacks tokens that train."""
    return _next_prompt(lambda ids, prompt: [*ids[:prompt], *ids[prompt + 4 :]])


@fault("TOK003", "rollout", *TOOLS, reports=["verl-tool-calls-cleared-in-history"])
def calls_cleared_from_the_history() -> Seams:
    """A parsed call is taken out of the message: the next prompt has the tool's answer, and no call before it."""

    def cleared(ids: Ids, prompt: int) -> Ids:
        end = ids.index(tiny_tokenizer().eos_token_id, prompt)
        return [*ids[:prompt], *ids[end:]]

    return _next_prompt(cleared)


@fault("TOK003", "rollout", *TOOLS, reports=["prime-prefix-only-last-step"])
def only_the_last_step_goes_on() -> Seams:
    """The next prompt is made of the new tokens of the last step: the conversation before it is forgotten."""
    return _next_prompt(lambda ids, prompt: ids[prompt:])


@fault("TOK003", "rollout", *TOOLS, reports=["vllm-return-token-ids-eos-drift"])
def end_token_lost_at_the_border() -> Seams:
    """The history is rendered without the token that ended the policy's turn; what is trained has it."""

    def lost(ids: Ids, prompt: int) -> Ids:
        end = ids.index(tiny_tokenizer().eos_token_id, prompt)
        return [*ids[:end], *ids[end + 1 :]]

    return _next_prompt(lost)


@fault("TOK003", "rollout", *TOOLS, reports=["verl-retokenization-missing-newline"])
def newline_only_in_the_rendering() -> Seams:
    """The template writes a line feed after a finished message: the engine has read it, what is trained lacks it."""

    def rendered(ids: Ids, prompt: int) -> Ids:
        end = ids.index(tiny_tokenizer().eos_token_id, prompt)
        return [*ids[: end + 1], *tiny_tokenizer().encode("\n", add_special_tokens=False), *ids[end + 1 :]]

    return _next_prompt(rendered)


def _next_prompt(sent_for: Callable[[Ids, int], Ids]) -> Seams:
    """The engine is sent something else for the conversation so far, from the second turn of a session on.

    Args:
        sent_for: what is sent, by the tokens so far and how many of them were the first prompt.
    """
    begun: WeakKeyDictionary[AgentLoopBase, int] = WeakKeyDictionary()

    def generate(original: Any, loop: AgentLoopBase, prompt_ids: Sequence[int], *args: Any) -> Any:
        ids = list(prompt_ids)
        prompt = begun.setdefault(loop, len(ids))
        return original(loop, ids if len(ids) == prompt else sent_for(ids, prompt), *args)

    return {GENERATE: generate}


@fault("TOK003", "rollout", *TOOLS, reports=["nemo-duplicated-assistant-turn"])
def earlier_answers_twice() -> Seams:
    """What is new in a rendering is found by comparing text: the earlier answer is taken for new and trains as a part
    of the observation, once more than the engine has read it."""
    doubled: dict[int, slice] = {}  # where it stands, by the list of the conversation's tokens

    def observe(original: Any, conversation: Conversation, role: str, ids: Ids, *cut: Any) -> None:
        begin, answer = len(conversation.ids), conversation.ids[conversation.prompt_length :]
        original(conversation, role, [*answer, *ids], *cut)
        doubled[id(conversation.ids)] = slice(begin, begin + len(answer))

    def generate(original: Any, loop: AgentLoopBase, prompt_ids: Ids, *args: Any) -> Any:
        sent = list(prompt_ids)
        del sent[doubled.get(id(prompt_ids), slice(0))]
        return original(loop, sent, *args)

    return {OBSERVE: observe, GENERATE: generate}
