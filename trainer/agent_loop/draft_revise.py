"""A loop of two outputs a session: a draft, then its revision (the seeds' custom loop that returns a list)."""

from __future__ import annotations

from typing import Any

from lineage.trainer.agent_loop.base import AgentLoopBase, AgentLoopOutput, LoopContext, Session
from lineage.trainer.agent_loop.registry import register
from lineage.trainer.rollout.base import SamplingParams


@register("draft_revise_agent")
class DraftReviseAgentLoop(AgentLoopBase):
    """Answers, then answers again with the first answer in the prompt; both answers are outputs of the session.

    The second is the session's result: it is scored, and both train on the advantage it earns.

    Args:
        instruction: the user message that asks for the revision.
    """

    def __init__(self, context: LoopContext, session: Session, *, instruction: str = "Revise.") -> None:
        super().__init__(context, session)
        self.instruction = instruction

    async def run(self, sampling_params: SamplingParams, **row: Any) -> list[AgentLoopOutput]:
        """See :meth:`AgentLoopBase.run`."""
        messages, media = list(row["raw_prompt"]), row.get("multi_modal_data")
        draft = await self.answer_once(messages, sampling_params, media, num_turns=len(messages) + 1)
        text = self.context.tokenizer.decode(draft.response_ids, skip_special_tokens=True)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": self.instruction}]
        return [draft, await self.answer_once(messages, sampling_params, media, num_turns=len(messages) + 1)]
