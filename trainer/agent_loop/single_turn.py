"""The default loop: one question, one answer (verl ``SingleTurnAgentLoop``)."""

from __future__ import annotations

import time
from typing import Any

from lineage.trainer.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from lineage.trainer.agent_loop.registry import register
from lineage.trainer.agent_loop.turns import Conversation
from lineage.trainer.rollout.base import SamplingParams


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Applies the chat template, generates once, returns one output whose every response token is the policy's."""

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput:
        """See :meth:`AgentLoopBase.run`."""
        prompt_ids = self.apply_chat_template(row["raw_prompt"])
        begin = time.perf_counter()
        answer = await self.generate(prompt_ids, sampling_params)
        version = answer.extra_fields.get("global_steps")
        conversation = Conversation.begin(prompt_ids, self.truncated_from)
        conversation.answer(answer.token_ids, answer.log_probs, answer.generated)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=answer.token_ids,
            response_mask=conversation.mask,
            response_logprobs=answer.log_probs if self.context.calculate_log_probs else None,
            multi_modal_data=dict(row.get("multi_modal_data") or {}),
            num_turns=2,
            metrics=AgentLoopMetrics(generate_sequences=time.perf_counter() - begin),
            extra_fields={
                "finish_reason": answer.stop_reason,
                "generated": answer.generated,
                "min_global_steps": version,
                "max_global_steps": version,
                "turn_scores": [],
                "tool_rewards": [],
            },
            turns=conversation.turns,
        )
