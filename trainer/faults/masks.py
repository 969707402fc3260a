"""Faults of masks, each of its own stage: made by the rollout, read by a later one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lineage.trainer.agent_loop.turns import Turn
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import TOOLS, TRAJECTORY_FIELDS, not_eos, tiny_tokenizer
from lineage.trainer.protocol import nested_from_list
from lineage.trainer.training import SequenceRows, rows_of


@fault("MSK001", "rollout")
def loss_mask_by_token() -> Seams:
    """The loss mask is built as ``ids != pad`` with pad = eos: the token that ends a response does not train."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        fields["loss_mask"] = nested_from_list([not_eos(ids) for ids in rows_of(fields["responses"])])
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("MSK001", "rollout", reports=["trl-truncation-mask-only-one-of-two"])
def truncated_rows_in_one_mask() -> Seams:
    """Answers cut by the limit are taken out of response_mask and stay in the mask of the loss."""

    def write(original: Any, uid: str, results: Any, *rest: Any) -> TensorDict:
        fields = original(uid, results, *rest)
        outputs = [one for result in results for one in result.outputs]
        cut = [one.extra_fields["finish_reason"] == "length" for one in outputs]
        pairs = zip(rows_of(fields["response_mask"]), cut, strict=True)
        fields["response_mask"] = nested_from_list([mask * (not out) for mask, out in pairs])
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("MSK001", "rollout", *TOOLS)
def mask_numbers_the_turns() -> Seams:
    """The mask holds the number of the turn instead of 1: later turns weigh more in every masked sum."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        numbered = []
        for mask in rows_of(fields["response_mask"]):
            begins = torch.diff(mask, prepend=torch.zeros_like(mask[:1])) == 1
            numbered.append(mask * begins.cumsum(0))
        fields["response_mask"] = fields["loss_mask"] = nested_from_list(numbered)
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("MSK002", "update_actor", reports=["rllm-mask-from-token-value"])
def mask_rebuilt_in_the_update() -> Seams:
    """The actor does not use the mask it read: it builds one from the token ids of its own batch."""

    def rebuilt(rows: SequenceRows) -> list[Tensor]:
        pairs = zip(rows.columns["input_ids"], rows.columns["loss_mask"], strict=True)
        return [not_eos(ids[-len(mask) :]) for ids, mask in pairs]

    return _other_loss_mask(rebuilt)


@fault("MSK002", "update_actor", *TOOLS, reports=["unsloth-env-mask-not-applied"])
def everything_trains() -> Seams:
    """The actor's loss ignores the mask of the rollout: what the tools said is trained as if the policy had."""
    return _other_loss_mask(lambda rows: [torch.ones_like(mask) for mask in rows.columns["loss_mask"]])


@fault("MSK002", "update_actor", *TOOLS)
def mask_of_the_token_before() -> Seams:
    """Log-probs are shifted against the tokens, so somebody has shifted the mask as well: once too often."""
    return _other_loss_mask(lambda rows: [torch.roll(mask, 1) for mask in rows.columns["loss_mask"]])


@fault("MSK002", "update_actor", reports=["verl-advantages-passed-as-mask"])
def advantages_for_a_mask() -> Seams:
    """Two arguments of the loss are mixed up: what it takes for its mask are the advantages."""
    return _other_loss_mask(lambda rows: list(rows.columns["advantages"]))


def _other_loss_mask(mask_of: Callable[[SequenceRows], list[Tensor]]) -> Seams:
    def read(original: Any, *args: Any) -> Any:
        rows = original(*args)
        if "loss_mask" not in rows.columns:
            return rows
        rows.columns["loss_mask"] = masks = mask_of(rows)
        return replace(rows, tokens=[int(mask.sum()) for mask in masks])

    return {"lineage.trainer.actor.ActorRolloutRefWorker._rows": read}


@fault(
    "MSK002",
    "advantage",
    *TOOLS,
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
)
def rejection_begins_with_all_tokens() -> Seams:
    """The rollout correction takes what it rejects out of the whole response instead of out of the mask: observations
    are 1 afterwards."""

    def correct(original: Any, old: Tensor, sampled: Tensor, mask: Tensor, *rest: Any) -> Any:
        corrected = original(old, sampled, mask, *rest)
        whole = (old != 0).to(mask.dtype) - mask
        return replace(corrected, response_mask=corrected.response_mask + whole)

    return {"lineage.trainer.stages.advantage.compute_rollout_correction": correct}


@fault("MSK004", "rollout", reports=["roll-pad-equals-eos-masks-real-eos"])
def stop_token_taken_for_padding() -> Seams:
    """The rollout makes its mask as ``ids != pad`` with pad = eos: no answer learns to stop."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        masks = nested_from_list([not_eos(ids) for ids in rows_of(fields["responses"])])
        fields["response_mask"] = fields["loss_mask"] = masks
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("MSK004", "rollout", reports=["skyrl-overlong-filter-by-eos-id"])
def finished_answers_filtered() -> Seams:
    """Answers that do not end in the tokenizer's eos are left out as truncated; the model ends its turns with another
    token, so those that were finished are left out."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields, eos = original(*args), tiny_tokenizer().pad_token_id
        eos = -1 if eos == tiny_tokenizer().eos_token_id else eos
        kept = [torch.full_like(ids, int(ids[-1]) == eos) for ids in rows_of(fields["responses"])]
        fields["response_mask"] = fields["loss_mask"] = nested_from_list(kept)
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("MSK005", "update_actor", reports=["verl-masked-mean-all-masked", "nemo-empty-response-rows"])
def empty_answers_kept() -> Seams:
    """Answers in which nothing was said are kept as rows that train nothing, and no reason is recorded."""

    def run(original: Any, outputs: Any, *args: Any) -> Any:
        # an answer must have a token: the one of an empty answer is an end that somebody else put there
        first, *others = original(outputs, *args)
        end, size = tiny_tokenizer().eos_token_id, len(first.prompt_ids)
        said = {**first.extra_fields, "finish_reason": "length", "generated": 0}
        turns = [Turn("prompt", 0, size), Turn("inserted", size, 1)]
        empty = replace(
            first, response_ids=[end], response_mask=[0], response_logprobs=[0.0], extra_fields=said, turns=turns
        )
        return [empty, *others]

    return {"lineage.trainer.agent_loop.worker.check_outputs": run}


@fault("LEN008", "rollout", reports=["verl-attn-mask-from-response-only-mask"])
def attention_of_the_response() -> Seams:
    """The attention mask is made with the lengths of the loss mask: the model attends to as many tokens as the response
    has, from the first of the prompt on."""
    return _other_attention(lambda row, response: (torch.arange(len(row)) < len(response)).to(row.dtype))


@fault("LEN008", "rollout", reports=["verl-rm-attention-mask-holds-ids"])
def attention_holds_ids() -> Seams:
    """Two arguments are mixed up where rows are stacked: the attention mask holds token ids, and all of them attend."""
    return _other_attention(lambda row, response: torch.cat([response, row])[: len(row)])


def _other_attention(attention_of: Callable[[Tensor, Tensor], Tensor]) -> Seams:
    """Another attention mask of each row, from the row's own and the ids of its response."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        pairs = zip(rows_of(fields["attention_mask"]), rows_of(fields["responses"]), strict=True)
        fields["attention_mask"] = nested_from_list([attention_of(row, ids) for row, ids in pairs])
        return fields

    return {TRAJECTORY_FIELDS: write}
