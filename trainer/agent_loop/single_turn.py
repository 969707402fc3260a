"""The default loop: one question, one answer (verl ``SingleTurnAgentLoop``)."""

from __future__ import annotations

from typing import Any

from lineage.trainer.agent_loop.base import AgentLoopBase, AgentLoopOutput
from lineage.trainer.agent_loop.registry import register
from lineage.trainer.rollout.base import SamplingParams


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Applies the chat template, generates once, returns one output whose every response token is the policy's."""

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput:
        """See :meth:`AgentLoopBase.run`."""
        return await self.answer_once(row["raw_prompt"], sampling_params, row.get("multi_modal_data"), num_turns=2)
