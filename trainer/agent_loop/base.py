"""The AgentLoop protocol: what a session is, what it returns, and what every loop can do (verl ``AgentLoopBase``)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lineage.hooks import LineageError, UserError
from lineage.trainer.agent_loop.turns import Conversation, Turn
from lineage.trainer.rng import derived_seed
from lineage.trainer.rollout.base import RolloutEngine, SamplingParams, TokenOutput
from lineage.trainer.tools.base import BaseTool
from lineage.trainer.tools.interaction import BaseInteraction


class AgentLoopError(UserError):
    """A loop that is not registered or cannot be loaded: a mistake of the user's, which stops the run."""


class SessionError(LineageError):
    """A session cannot go on, or returned something that cannot be a trajectory; its group fails."""


@dataclass(frozen=True)
class AgentLoopMetrics:
    """Seconds and counts of one session (verl ``AgentLoopMetrics``)."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    num_preempted: int = 0


@dataclass
class AgentLoopOutput:
    """One output of a session.

    A loop may give ids, mask and log-probs as any sequence of numbers: the worker makes lists of them.

    Attributes:
        prompt_ids: token ids the policy was given first.
        response_ids: everything after them: policy tokens, and observations if there were any.
        response_mask: 1 on policy tokens, 0 on observations; as long as ``response_ids``.
        response_logprobs: log-probability of each response token under the sampler, 0 on observations; None if unknown.
        multi_modal_data: images, videos, audio of the conversation, or what a processor made of them; it goes with the
            trajectory as ``multi_modal_inputs``, and nobody looks inside.
        reward_score: score of the session, if the loop scores itself; None leaves it to the reward worker.
        num_turns: messages of the conversation, the first prompt's and the policy's included.
        metrics: seconds and counts.
        extra_fields: anything else. Read by the trainer: ``finish_reason``, ``generated`` (policy tokens the engine
            counted), ``min_global_steps`` and ``max_global_steps`` (weight versions that generated); ``position_ids``
            ``(seq)`` where they are not 0, 1, 2, ..., or ``(k, seq)`` for a model of k axes. ``turn_scores`` and
            ``tool_rewards`` are lists.
        turns: whose tokens the sequence is made of; a loop that gives none is read by its mask.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    multi_modal_data: dict[str, Any] = field(default_factory=dict)
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)


@dataclass(frozen=True)
class Session:
    """One independent rollout of a prompt: ``0 <= session_id < rollout.n``."""

    uid: str
    session_id: int
    global_steps: int
    seed: int

    def draw_seed(self, turn: int) -> int:
        """Seed of the session's own random numbers in one turn: the same in every batch and every process."""
        return derived_seed(self.seed, self.global_steps, self.uid, self.session_id, turn)


@dataclass(frozen=True)
class MultiTurn:
    """Limits of a conversation (verl ``rollout.multi_turn``).

    Attributes:
        max_assistant_turns: most generations; None sets no limit but the response length.
        max_user_turns: most observations; None likewise.
        max_parallel_calls: tool calls of one turn that are run; more are dropped.
        max_tool_response_length: most characters of a tool's text.
        tool_response_truncate_side: the side a longer one keeps: ``left`` its end, ``right`` its beginning, else both.
        format: how a call is written.
    """

    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_parallel_calls: int = 1
    max_tool_response_length: int = 256
    tool_response_truncate_side: str = "middle"
    format: str = "hermes"


@dataclass(frozen=True)
class LoopContext:
    """What a worker gives each loop.

    Attributes:
        rollout: the engine.
        tokenizer: with a chat template.
        prompt_length: most prompt tokens after the template.
        response_length: most response tokens, observations included.
        vocab_size: token ids of the model lie below it; None where nobody knows.
        prompt_length_key: the setting ``prompt_length`` comes from, for the error of a longer prompt.
        truncation: what to do with a longer prompt: ``error left right middle``.
        template_kwargs: more arguments of the chat template.
        calculate_log_probs: keep the sampler's log-probs (``rollout_log_probs``).
        multi_turn: limits of a conversation.
        tools: what a policy may call, by name.
        interactions: who may answer it, by name.
    """

    rollout: RolloutEngine
    tokenizer: Any
    prompt_length: int
    response_length: int
    vocab_size: int | None = None
    prompt_length_key: str = "data.max_prompt_length"
    truncation: str = "error"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    calculate_log_probs: bool = True
    multi_turn: MultiTurn = field(default_factory=MultiTurn)
    tools: Mapping[str, BaseTool] = field(default_factory=dict)
    interactions: Mapping[str, BaseInteraction] = field(default_factory=dict)


class AgentLoopBase(ABC):
    """One session's conversation. An instance lives for one session.

    Attributes:
        truncated_from: tokens of the last prompt before ``data.truncation`` cut it; None where it was not cut.
    """

    def __init__(self, context: LoopContext, session: Session) -> None:
        self.context = context
        self.session = session
        self.truncated_from: int | None = None
        self._turn = 0

    @abstractmethod
    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Hold the conversation of one dataset row.

        Args:
            row: the row's fields; ``raw_prompt`` is the message list.
        """

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: SamplingParams, max_tokens: int | None = None
    ) -> TokenOutput:
        """Let the policy continue ``prompt_ids``; the request is ``{uid}_{session_id}_{turn}``."""
        session, turn = self.session, self._turn
        self._turn += 1
        return await self.context.rollout.generate(
            f"{session.uid}_{session.session_id}_{turn}",
            prompt_ids=prompt_ids,
            sampling_params=sampling_params,
            max_tokens=self.context.response_length if max_tokens is None else max_tokens,
            seed=session.draw_seed(turn),
        )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a message list, ready for the policy to answer.

        Args:
            tools: schemas of the tools the template shows, if it shows any.

        Raises:
            SessionError: longer than ``prompt_length`` with ``truncation=error``.
        """
        ids = self.context.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self.context.template_kwargs,
        )
        limit, key = self.context.prompt_length, self.context.prompt_length_key
        fitting = fit_prompt(list(ids), limit, self.context.truncation, self.session.uid, key)
        self.truncated_from = len(ids) if len(fitting) < len(ids) else None
        return fitting

    async def answer_once(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams,
        media: Mapping[str, Any] | None,
        *,
        num_turns: int,
    ) -> AgentLoopOutput:
        """One output: the messages as prompt, the policy's answer as response."""
        conversation = Conversation.begin(self.apply_chat_template(messages), self.truncated_from)
        begin = time.perf_counter()
        answer = await self.generate(conversation.ids, sampling_params)
        metrics = AgentLoopMetrics(generate_sequences=time.perf_counter() - begin)
        conversation.answer(answer.token_ids, answer.log_probs, answer.generated)
        return self.output_of(conversation, [answer], media, num_turns=num_turns, metrics=metrics)

    def output_of(
        self,
        conversation: Conversation,
        answers: Sequence[TokenOutput],
        media: Mapping[str, Any] | None,
        *,
        num_turns: int,
        metrics: AgentLoopMetrics,
        **extra_fields: Any,
    ) -> AgentLoopOutput:
        """The output a conversation ends as.

        Args:
            answers: what the engine answered in it, in order.
            extra_fields: more of them, or others than follow from the answers.
        """
        versions = [answer.extra_fields.get("global_steps") for answer in answers]
        known = [version for version in versions if version is not None]
        return AgentLoopOutput(
            prompt_ids=conversation.ids[: conversation.prompt_length],
            response_ids=conversation.response_ids,
            response_mask=conversation.mask,
            response_logprobs=conversation.log_probs if self.context.calculate_log_probs else None,
            multi_modal_data=dict(media or {}),
            num_turns=num_turns,
            metrics=metrics,
            extra_fields={
                "finish_reason": answers[-1].stop_reason,
                "generated": sum(answer.generated for answer in answers),
                "min_global_steps": min(known, default=None),
                "max_global_steps": max(known, default=None),
                "turn_scores": [],
                "tool_rewards": [],
                **extra_fields,
            },
            turns=conversation.turns,
        )


def fit_prompt(ids: list[int], limit: int, truncation: str, uid: str, key: str) -> list[int]:
    """A prompt cut to ``limit`` tokens the way ``data.truncation`` says.

    ``left`` drops the beginning, ``right`` the end, ``middle`` keeps both ends.

    Args:
        key: the setting that gave the limit.

    Raises:
        SessionError: too long with ``error``. A prompt that a loop has built, or one that ``data.max_prompt_length``
            lets pass and ``rollout.prompt_length`` does not.
    """
    if len(ids) <= limit:
        return ids
    if truncation == "left":
        return ids[-limit:]
    if truncation == "right":
        return ids[:limit]
    if truncation == "middle":
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    raise SessionError(
        f"prompt {uid} has {len(ids)} tokens, {key}={limit}: raise it or set data.truncation=left|right|middle"
    )
