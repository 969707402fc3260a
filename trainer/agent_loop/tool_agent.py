"""The loop of several turns: the policy calls tools, reads what they say, and goes on (verl ``ToolAgentLoop``)."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lineage.hooks import first_line
from lineage.trainer.agent_loop.base import (
    AgentLoopBase,
    AgentLoopError,
    AgentLoopMetrics,
    AgentLoopOutput,
    MultiTurn,
)
from lineage.trainer.agent_loop.observations import continuation
from lineage.trainer.agent_loop.registry import register
from lineage.trainer.agent_loop.turns import Conversation
from lineage.trainer.rollout.base import SamplingParams, TokenOutput
from lineage.trainer.tools.base import BaseTool
from lineage.trainer.tools.interaction import BaseInteraction
from lineage.trainer.tools.parser import FunctionCall, tool_parser

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Heard:
    """What one tool or user answered.

    Attributes:
        text: as the policy reads it.
        uncut: the text before ``max_tool_response_length`` cut it; None where it was not cut.
    """

    role: str
    text: str
    uncut: str | None = None


@dataclass
class _Episode:
    """One session as it goes on."""

    conversation: Conversation
    messages: list[Mapping[str, Any]]
    tools: Mapping[str, BaseTool]
    tools_kwargs: Mapping[str, Any]
    interaction: BaseInteraction | None
    interaction_kwargs: Mapping[str, Any]
    answers: list[TokenOutput] = field(default_factory=list)
    user_turns: int = 0
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    generating: float = 0.0
    calling: float = 0.0
    finish_reason: str = ""
    media: dict[str, Any] = field(default_factory=dict)


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Generates, runs the tool calls in what was generated, adds their answers with mask 0, until there is no call.

    A row's ``tools_kwargs``, ``interaction_kwargs`` and ``tool_selection`` (names of the tools it may use, all by
    default) are read from its ``extra_info``. A session ends too when a turn limit is reached, when the response is
    full, and when an answer would leave no room to go on: the answer is then not added, and ``finish_reason`` is
    ``tool``.
    """

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput:
        """See :meth:`AgentLoopBase.run`.

        Raises:
            AgentLoopError: the row names an interaction that is not configured.
            ToolError: ``multi_turn.format`` is unknown.
        """
        episode = self._begin(row)
        instance_id = f"{self.session.uid}_{self.session.session_id}"
        if episode.interaction is None:
            await self._converse(episode, sampling_params, instance_id)
            return self._output(episode)
        await episode.interaction.start_interaction(instance_id, **episode.interaction_kwargs)
        try:
            await self._converse(episode, sampling_params, instance_id)
        finally:
            await episode.interaction.finalize_interaction(instance_id)
        return self._output(episode)

    def _begin(self, row: Mapping[str, Any]) -> _Episode:
        extra = row.get("extra_info") or {}
        interaction_kwargs = row.get("interaction_kwargs") or extra.get("interaction_kwargs") or {}
        selection = extra.get("tool_selection")
        tools = self.context.tools
        if selection:
            tools = {name: tools[name] for name in selection if name in tools}
        messages = list(row["raw_prompt"])
        prompt_ids = self.apply_chat_template(messages, [tool.tool_schema for tool in tools.values()])
        return _Episode(
            Conversation.begin(prompt_ids, self.truncated_from),
            messages,
            tools,
            row.get("tools_kwargs") or extra.get("tools_kwargs") or {},
            self._interaction(interaction_kwargs),
            interaction_kwargs,
            media=dict(row.get("multi_modal_data") or {}),
        )

    def _interaction(self, kwargs: Mapping[str, Any]) -> BaseInteraction | None:
        """The interaction the row names, if it names one and any are configured."""
        interactions, name = self.context.interactions, kwargs.get("name")
        if not interactions or name is None:
            return None
        if name not in interactions:
            known = ", ".join(sorted(interactions))
            raise AgentLoopError(
                f"extra_info.interaction_kwargs.name={name}: multi_turn.interaction_config_path has: {known}"
            )
        return interactions[name]

    async def _converse(self, episode: _Episode, sampling_params: SamplingParams, instance_id: str) -> None:
        while await self._generate(episode, sampling_params):
            heard = await self._react(episode, instance_id)
            if not heard:
                return
            if not self._observe(episode, heard):
                episode.finish_reason = "tool"
                return

    async def _generate(self, episode: _Episode, sampling_params: SamplingParams) -> bool:
        """Let the policy write its turn; false where the session ends with it."""
        conversation, limits = episode.conversation, self.context.multi_turn
        room = self.context.response_length - conversation.response_length
        begin = time.perf_counter()
        answer = await self.generate(conversation.ids, sampling_params, room)
        episode.generating += time.perf_counter() - begin
        episode.answers.append(answer)
        episode.finish_reason = answer.stop_reason
        conversation.answer(answer.token_ids, answer.log_probs, answer.generated)
        full = conversation.response_length >= self.context.response_length or not answer.token_ids
        spoken = limits.max_assistant_turns and len(episode.answers) >= limits.max_assistant_turns
        heard = limits.max_user_turns and episode.user_turns >= limits.max_user_turns
        return not (full or spoken or heard)

    async def _react(self, episode: _Episode, instance_id: str) -> list[Heard]:
        """What answers the policy's last turn: its tools, else its interaction; nothing ends the session."""
        limits, tokenizer = self.context.multi_turn, self.context.tokenizer
        text = tokenizer.decode(episode.answers[-1].token_ids)
        content, calls = tool_parser(limits.format).extract_tool_calls(text)
        episode.messages.append({"role": "assistant", "content": content.removesuffix(tokenizer.eos_token or "")})
        if calls:
            begin = time.perf_counter()
            called = calls[: limits.max_parallel_calls]
            answers = await asyncio.gather(*(call_tool(call, episode.tools, episode.tools_kwargs) for call in called))
            episode.calling += time.perf_counter() - begin
            episode.tool_rewards += [reward for _, reward in answers if reward is not None]
            return [cut(answer, limits) for answer, _ in answers]
        if episode.interaction is None:
            return []
        done, text, score, _ = await episode.interaction.generate_response(
            instance_id, episode.messages, **episode.interaction_kwargs
        )
        if score is not None:
            episode.turn_scores.append(float(score))
        return [] if done else [Heard("user", text)]

    def _observe(self, episode: _Episode, heard: Sequence[Heard]) -> bool:
        """Add what was heard to the conversation; false where no room would be left to answer it."""
        conversation, context = episode.conversation, self.context

        def follow(texts: Sequence[str]) -> Any:
            messages = [{"role": one.role, "content": text} for one, text in zip(heard, texts, strict=True)]
            return continuation(context.tokenizer, messages, conversation.ids[-1], context.template_kwargs)

        added = follow([one.text for one in heard])
        if conversation.response_length + len(added) >= context.response_length:
            return False
        uncut = None
        if any(one.uncut is not None for one in heard):
            uncut = len(follow([one.text if one.uncut is None else one.uncut for one in heard]).observation)
        conversation.observe("inserted", added.inserted)
        conversation.observe("observation", added.observation, uncut)
        episode.messages += [{"role": one.role, "content": one.text} for one in heard]
        episode.user_turns += 1
        return True

    def _output(self, episode: _Episode) -> AgentLoopOutput:
        return self.output_of(
            episode.conversation,
            episode.answers,
            episode.media,
            num_turns=episode.user_turns + len(episode.answers) + 1,
            metrics=AgentLoopMetrics(generate_sequences=episode.generating, tool_calls=episode.calling),
            finish_reason=episode.finish_reason,
            turn_scores=episode.turn_scores,
            tool_rewards=episode.tool_rewards,
        )


async def call_tool(
    call: FunctionCall, tools: Mapping[str, BaseTool], tools_kwargs: Mapping[str, Any]
) -> tuple[str, float | None]:
    """Run one call; whatever goes wrong is told to the policy, with reward 0.

    Args:
        tools_kwargs: by tool, what the dataset row gives it.

    Returns:
        The tool's text and the reward of the call.
    """
    tool = tools.get(call.name)
    if tool is None:
        return f"Unknown function '{call.name}'. Available tools: {list(tools)}", 0.0
    parameters = json.loads(call.arguments)
    if not isinstance(parameters, dict):
        return f"Invalid arguments for '{call.name}': not a JSON object", 0.0
    try:
        return await _use(tool, parameters, tools_kwargs.get(call.name) or {})
    except Exception as error:
        said = f"missing argument {error}" if isinstance(error, KeyError) else error
        _say_once(call.name, type(error).__name__, first_line(error))
        return f"Error executing tool '{call.name}': {said}", 0.0


async def _use(tool: BaseTool, parameters: dict[str, Any], kwargs: Mapping[str, Any]) -> tuple[str, float | None]:
    """Make an instance of the tool, let it answer, and release it whatever it does."""
    instance_id, _ = await tool.create(create_kwargs=kwargs.get("create_kwargs") or {})
    try:
        response, reward, _ = await tool.execute(instance_id, parameters)
    finally:
        await tool.release(instance_id)
    if response.text is not None and not isinstance(response.text, str):
        raise TypeError(f"the text of its ToolResponse is a {type(response.text).__name__}")
    return response.text or "", reward


@functools.lru_cache(maxsize=1024)
def _say_once(tool: str, error: str, said: str) -> None:
    """The policy is told of every failed call; whoever wrote the tool, of each kind of failure once."""
    logger.log(logging.DEBUG if error == "ValueError" else logging.WARNING, "tool %s raised %s: %s", tool, error, said)


def cut(text: str, limits: MultiTurn) -> Heard:
    """A tool's text in ``max_tool_response_length`` characters, with a note of the cut (verl's)."""
    length = limits.max_tool_response_length
    if len(text) <= length:
        return Heard("tool", text)
    if limits.tool_response_truncate_side == "left":
        kept = "(truncated)..." + text[len(text) - length :]
    elif limits.tool_response_truncate_side == "right":
        kept = text[:length] + "...(truncated)"
    else:
        half = length // 2
        kept = text[:half] + "...(truncated)..." + text[len(text) - half :]
    return Heard("tool", kept, text)
