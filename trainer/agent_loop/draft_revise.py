"""A loop of two outputs a session: a draft, then its revision (the seeds' custom loop that returns a list)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lineage.trainer.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, LoopContext, Session
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
        messages = list(row["raw_prompt"])
        media = dict(row.get("multi_modal_data") or {})
        draft = await self._answer(messages, sampling_params, media)
        text = self.context.tokenizer.decode(draft.response_ids, skip_special_tokens=True)
        follow_up = [{"role": "assistant", "content": text}, {"role": "user", "content": self.instruction}]
        return [draft, await self._answer([*messages, *follow_up], sampling_params, media)]

    async def _answer(
        self, messages: Sequence[Any], sampling_params: SamplingParams, media: dict[str, Any]
    ) -> AgentLoopOutput:
        prompt_ids = self.apply_chat_template(messages)
        begin = time.perf_counter()
        answer = await self.generate(prompt_ids, sampling_params)
        version = answer.extra_fields.get("global_steps")
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=answer.token_ids,
            response_mask=[1] * len(answer.token_ids),
            response_logprobs=answer.log_probs if self.context.calculate_log_probs else None,
            multi_modal_data=media,
            num_turns=len(messages) + 1,
            metrics=AgentLoopMetrics(generate_sequences=time.perf_counter() - begin),
            extra_fields={
                "finish_reason": answer.stop_reason,
                "generated": answer.generated,
                "min_global_steps": version,
                "max_global_steps": version,
            },
        )
