"""The AgentLoop protocol: what a session is, what it returns, and what every loop can do (verl ``AgentLoopBase``)."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lineage.hooks import UserError
from lineage.trainer.rollout.base import RolloutEngine, SamplingParams, TokenOutput


class AgentLoopError(UserError):
    """A prompt that does not fit, or a loop that is not registered."""


@dataclass(frozen=True)
class AgentLoopMetrics:
    """Seconds and counts of one session (verl ``AgentLoopMetrics``)."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    num_preempted: int = 0


@dataclass
class AgentLoopOutput:
    """One output of a session.

    Attributes:
        prompt_ids: token ids the policy was given first.
        response_ids: everything after them: policy tokens, and observations if there were any.
        response_mask: 1 on policy tokens, 0 on observations; as long as ``response_ids``.
        response_logprobs: log-probability of each response token under the sampler, 0 on observations; None if unknown.
        multi_modal_data: images, videos, audio of the conversation.
        reward_score: score of the session, if the loop scores itself; None leaves it to the reward worker.
        num_turns: messages of the conversation, the first prompt's and the policy's included.
        metrics: seconds and counts.
        extra_fields: anything else. Read by the trainer: ``finish_reason``, ``generated`` (policy tokens the engine
            counted), ``min_global_steps`` and ``max_global_steps`` (weight versions that generated).
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


@dataclass(frozen=True)
class Session:
    """One independent rollout of a prompt: ``0 <= session_id < rollout.n``."""

    uid: str
    session_id: int
    global_steps: int
    seed: int

    def draw_seed(self, turn: int) -> int:
        """Seed of the session's own random numbers in one turn: the same in every batch and every process."""
        text = f"{self.seed}/{self.global_steps}/{self.uid}/{self.session_id}/{turn}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class LoopContext:
    """What a worker gives each loop.

    Attributes:
        rollout: the engine.
        tokenizer: with a chat template.
        prompt_length: most prompt tokens after the template.
        response_length: most response tokens, observations included.
        truncation: what to do with a longer prompt: ``error left right middle``.
        template_kwargs: more arguments of the chat template.
        calculate_log_probs: keep the sampler's log-probs (``rollout_log_probs``).
    """

    rollout: RolloutEngine
    tokenizer: Any
    prompt_length: int
    response_length: int
    truncation: str = "error"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    calculate_log_probs: bool = True


class AgentLoopBase(ABC):
    """One session's conversation. An instance lives for one session."""

    def __init__(self, context: LoopContext, session: Session) -> None:
        self.context = context
        self.session = session
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

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a message list, ready for the policy to answer.

        Raises:
            AgentLoopError: longer than ``prompt_length`` with ``truncation=error``.
        """
        ids = self.context.tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self.context.template_kwargs,
        )
        return fit_prompt(list(ids), self.context.prompt_length, self.context.truncation, self.session.uid)


def fit_prompt(ids: list[int], limit: int, truncation: str, uid: str) -> list[int]:
    """A prompt cut to ``limit`` tokens the way ``data.truncation`` says.

    ``left`` drops the beginning, ``right`` the end, ``middle`` keeps both ends.

    Raises:
        AgentLoopError: too long with ``error``.
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
    raise AgentLoopError(
        f"prompt {uid} has {len(ids)} tokens, data.max_prompt_length={limit}: raise it, set "
        "data.filter_overlong_prompts=true, or set data.truncation=left|right|middle"
    )
