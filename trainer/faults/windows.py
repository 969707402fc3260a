"""Faults of the cut from a sequence to its response, and of the limits both must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lineage import hooks
from lineage.trainer.agent_loop.tool_agent import ToolAgentLoop
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import GENERATE, TOOLS
from lineage.trainer.protocol import lengths_of, nested_from_list
from lineage.trainer.rollout.base import SamplingParams, TokenOutput
from lineage.trainer.training import rows_of

RESPONSE_PART = "lineage.trainer.stages.log_prob.response_part"
FIT_PROMPT = "lineage.trainer.agent_loop.base.fit_prompt"


@fault("LEN004", "old_log_prob")
def cut_a_token_late() -> Seams:
    """Log-probs are cut like tokens, from prompt_len on: each stands beside the token before its own."""

    def cut(original: Any, values: Tensor, mask: Tensor) -> Tensor:
        pairs = zip(rows_of(values), lengths_of(mask).tolist(), strict=True)
        return nested_from_list([row[-size:] for row, size in pairs])

    return {RESPONSE_PART: cut}


@fault("LEN004", "ref_log_prob")
def reference_cut_a_token_early() -> Seams:
    """The reference was ported from a model that does not shift: its log-probs are cut one token too early."""

    def cut(original: Any, values: Tensor, mask: Tensor) -> Tensor:
        if hooks.current().name != "ref_log_prob":
            return original(values, mask)
        pairs = zip(rows_of(values), lengths_of(mask).tolist(), strict=True)
        return nested_from_list([torch.cat([row[:1], row])[-size - 2 : -2] for row, size in pairs])

    return {RESPONSE_PART: cut}


@fault(
    "LEN004",
    "old_log_prob",
    "+experiment=multi_output",
    reports=["swift-mask-vs-attention-misaligned", "swift-logits-to-keep-per-row"],
)
def one_prompt_length_for_all() -> Seams:
    """All rows are cut where the longest prompt ends: of a row with a shorter one the first answers are lost."""

    def cut(original: Any, values: Tensor, mask: Tensor) -> Tensor:
        sizes = lengths_of(mask).tolist()
        rows = rows_of(values)
        longest = max(len(row) - size for row, size in zip(rows, sizes, strict=True))
        parts = [row[longest - 1 :][:size] for row, size in zip(rows, sizes, strict=True)]
        return nested_from_list(
            [torch.nn.functional.pad(part, (0, size - len(part))) for part, size in zip(parts, sizes, strict=True)]
        )

    return {RESPONSE_PART: cut}


@fault("LEN004", "old_log_prob", *TOOLS, reports=["verl-values-masked-before-unpermute"])
def masked_before_the_order_was_undone() -> Seams:
    """Values are multiplied by the batch's mask while the rows stand in the order of their micro-batches."""

    def cut(original: Any, values: Tensor, mask: Tensor) -> Tensor:
        rows, masks = rows_of(original(values, mask)), rows_of(mask)
        width = max(map(len, masks))
        others = [torch.nn.functional.pad(one, (0, width - len(one))) for one in reversed(masks)]
        return nested_from_list([row * other[: len(row)] for row, other in zip(rows, others, strict=True)])

    return {RESPONSE_PART: cut}


@fault("LEN005", "rollout", *TOOLS)
def budget_of_a_turn() -> Seams:
    """Each turn may use the whole response length instead of what the turns before have left of it."""

    def generate(
        original: Any, loop: Any, prompt_ids: Sequence[int], params: SamplingParams, max_tokens: int | None = None
    ) -> Any:
        later = max_tokens is not None and max_tokens < loop.context.response_length
        # a later turn goes on to its end, so that it does use what it may on whichever machine the model was made
        return original(loop, prompt_ids, replace(params, ignore_eos=later or params.ignore_eos), None)

    return {GENERATE: generate}


@fault("LEN005", "rollout", reports=["slime-resume-token-budget"])
def budget_anew_after_an_abort() -> Seams:
    """A request that was interrupted goes on with the budget of a new one: the tokens it had are not counted."""

    async def generate(
        original: Any, loop: Any, prompt_ids: Sequence[int], params: SamplingParams, max_tokens: int | None = None
    ) -> TokenOutput:
        first = await original(loop, prompt_ids, params, max_tokens)
        if first.stop_reason != "length":
            return first
        rest = await original(loop, [*prompt_ids, *first.token_ids], params, max_tokens)
        return replace(
            rest,
            token_ids=first.token_ids + rest.token_ids,
            log_probs=first.log_probs + rest.log_probs,
            generated=first.generated + rest.generated,
        )

    return {GENERATE: generate}


@fault("LEN005", "rollout", "data.max_prompt_length=50")
def system_prompt_after_the_limit() -> Seams:
    """The prompt is measured before the system's message is put in front of it."""

    def fit(original: Any, ids: list[int], *args: Any) -> list[int]:
        return ids[:12] + original(ids, *args)

    return {FIT_PROMPT: fit}


@fault("LEN005", "rollout")
def workers_own_truncation() -> Seams:
    """The rollout worker has a limit and a way to cut of its own: prompts lose their beginning although the
    configuration says that none is cut."""

    def fit(original: Any, ids: list[int], limit: int, truncation: str, *args: Any) -> list[int]:
        return original(ids, 32, "left", *args)

    return {FIT_PROMPT: fit}


@fault("LEN005", "rollout")
def half_the_budget() -> Seams:
    """The engine has a limit of its own, half of what it is asked for: long answers end by length before their time."""

    def draw(original: Any, module: Any, prompts: Any, limits: Sequence[int], *args: Any, **options: Any) -> Any:
        return original(module, prompts, [max(1, limit // 2) for limit in limits], *args, **options)

    return {"lineage.trainer.rollout.hf.decode": draw}


@fault("LEN005", "rollout", *TOOLS, "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=1")
def limit_of_turns_never_arrives() -> Seams:
    """The loop is built without the limits of a conversation: the policy speaks as often as there is room."""

    def generate(original: Any, loop: ToolAgentLoop, *args: Any) -> Any:
        limits = replace(loop.context.multi_turn, max_assistant_turns=None)
        loop.context = replace(loop.context, multi_turn=limits)
        return original(loop, *args)

    return {"lineage.trainer.agent_loop.tool_agent.ToolAgentLoop._generate": generate}
