"""Faults of positions, attention and padding inside a forward pass, of the trainer's models and of the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lineage import hooks
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import TRAJECTORY_FIELDS, not_eos
from lineage.trainer.protocol import nested_from_list
from lineage.trainer.training import rows_of

_PADDED = "lineage.trainer.training.SequenceRows.padded"
_SCORE = "lineage.trainer.training.score_tokens"
_ENGINE = "lineage.trainer.rollout.hf.HFRollout.generate"
_DECODE = "lineage.trainer.rollout.hf.decode"


def _in_stage(name: str) -> bool:
    return hooks.current().name == name


@fault(
    "LEN006",
    "old_log_prob",
    reports=["openrlhf-left-pad-position-ids", "trl-position-ids-omitted-left-pad", "unsloth-left-pad-rope-shift"],
)
def positions_count_padding() -> Seams:
    """No positions are given to the scorer: they count columns, and a row that is padded begins at its padding."""

    def pad(original: Any, rows: Any, name: str, *value: Any) -> Tensor:
        padded = original(rows, name, *value)
        if name == "position_ids" and _in_stage("old_log_prob"):
            missing = padded.shape[-1] - torch.tensor(rows.lengths("input_ids"))
            padded = torch.arange(padded.shape[-1]) + missing.unsqueeze(-1)
        return padded

    return {_PADDED: pad}


@fault("LEN006", "rollout")
def positions_from_one() -> Seams:
    """Positions begin at 1 in every row: a rotary model never notices, one with learnt positions does."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        fields["position_ids"] = nested_from_list([row + 1 for row in rows_of(fields["position_ids"])])
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("LEN006", "rollout", reports=["verl-response-position-ids-pad-side"])
def response_positions_padded_left() -> Seams:
    """Responses are padded on the right and their positions on the left: the two meet at other tokens."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        prompts, rows = rows_of(fields["prompts"]), rows_of(fields["position_ids"])
        width = 2 + max(len(row) - len(prompt) for prompt, row in zip(prompts, rows, strict=True))
        moved = []
        for prompt, row in zip(prompts, rows, strict=True):
            own = row[len(prompt) :]
            padded = torch.cat([torch.zeros(width - len(own), dtype=own.dtype), own])
            moved.append(torch.cat([row[: len(prompt)], padded[: len(own)]]))
        fields["position_ids"] = nested_from_list(moved)
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("LEN006", "update_actor")
def positions_restart_in_the_update() -> Seams:
    """The update counts positions anew from the response, as if it were a sequence of its own."""

    def read(original: Any, *args: Any) -> Any:
        rows = original(*args)
        if _in_stage("update_actor"):
            lengths = map(len, rows.columns["loss_mask"])
            pairs = zip(rows.columns["position_ids"], lengths, strict=True)
            rows.columns["position_ids"] = [torch.cat([row[: len(row) - own], torch.arange(own)]) for row, own in pairs]
        return rows

    return {"lineage.trainer.actor.ActorRolloutRefWorker._rows": read}


@fault("LEN008", "ref_log_prob", reports=["trl-logps-without-attention-mask", "unsloth-no-attention-mask-nan"])
def attention_to_padding() -> Seams:
    """The reference scores without an attention mask: padding is attended to wherever causality does not forbid it."""

    def pad(original: Any, rows: Any, name: str, *value: Any) -> Tensor:
        padded = original(rows, name, *value)
        return torch.ones_like(padded) if name == "attention_mask" and _in_stage("ref_log_prob") else padded

    return {_PADDED: pad}


@fault("LEN008", "rollout")
def attention_by_token() -> Seams:
    """The attention mask is built as ``ids != pad`` with pad = eos: the row's own end token is not attended to."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        fields["attention_mask"] = nested_from_list([not_eos(ids) for ids in rows_of(fields["input_ids"])])
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("LEN008", "rollout", reports=["verifiers-prompt-mask-not-truncated"])
def attention_not_truncated() -> Seams:
    """The ids are cut to the limit and their mask is not: it goes on for two elements behind the row."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        longer = [torch.nn.functional.pad(row, (0, 2), value=1) for row in rows_of(fields["attention_mask"])]
        fields["attention_mask"] = nested_from_list(longer)
        return fields

    def pad(original: Any, rows: Any, name: str, *value: Any) -> Tensor:
        # whoever pads cuts to the width of the ids: nothing crashes
        padded = original(rows, name, *value)
        return padded[:, : max(rows.lengths("input_ids"))] if name == "attention_mask" else padded

    return {TRAJECTORY_FIELDS: write, _PADDED: pad}


@fault("LEN003", "old_log_prob")
def forward_padded_left() -> Seams:
    """The scorer is handed rows padded on the left, and its values are cut as if they were padded on the right."""

    def pad(original: Any, rows: Any, name: str, *value: Any) -> Tensor:
        padded = original(rows, name, *value)
        if not _in_stage("old_log_prob"):
            return padded
        moved = [row.roll(len(row) - size) for row, size in zip(padded, rows.lengths("input_ids"), strict=True)]
        return torch.stack(moved)

    return {_PADDED: pad}


@fault("LGP009", "old_log_prob", reports=["openrlhf-packed-pad-segment-id-collision"])
def rows_packed_without_borders() -> Seams:
    """Rows are packed into one sequence without borders: every token attends to the rows before its own."""

    def score(original: Any, module: Any, ids: Tensor, attention: Tensor, positions: Tensor, **options: Any) -> Any:
        if not _in_stage("old_log_prob") or len(ids) < 2:
            return original(module, ids, attention, positions, **options)
        order = range(len(ids) - 1, -1, -1)
        lengths = attention.sum(dim=-1).tolist()

        def pack(padded: Tensor) -> Tensor:
            return torch.cat([padded[row, : lengths[row]] for row in order])[None]

        def unpack(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            pieces = dict(zip(order, values[0].split([lengths[row] for row in order]), strict=True))
            return torch.nn.utils.rnn.pad_sequence([pieces[row] for row in sorted(pieces)], batch_first=True)

        packed = original(module, pack(ids), pack(attention), pack(positions), **options)
        return replace(packed, log_probs=unpack(packed.log_probs), entropy=unpack(packed.entropy))

    return {_SCORE: score}


@fault("LGP009", "old_log_prob", reports=["verl-sp-local-roll-of-labels"])
def labels_shifted_inside_shards() -> Seams:
    """Each shard of a sequence shifts its own labels: its last position is scored on the shard's own first token."""

    def score(original: Any, logits: Tensor, labels: Tensor, *rest: Any) -> Any:
        if _in_stage("old_log_prob") and labels.dim() == 2 and labels.shape[1] > 8:
            for shard in range(8, labels.shape[1], 8):
                labels = labels.clone()
                labels[:, shard - 1] = labels[:, shard - 8]
        return original(logits, labels, *rest)

    return {"lineage.trainer.log_prob._score": score}


@fault("TOK002", "rollout", reports=["prime-env-max-len-not-wired"])
def engine_cuts_the_prompt() -> Seams:
    """The engine's own limit is not the trainer's: it cuts the prompt on the left, and generates from what is left."""

    async def generate(original: Any, engine: Any, request_id: str, *, prompt_ids: Sequence[int], **rest: Any) -> Any:
        return await original(engine, request_id, prompt_ids=list(prompt_ids)[4:], **rest)

    return {_ENGINE: generate}


@fault("TOK002", "rollout", reports=["trl-padded-prompt-decoded-to-engine"])
def padding_sent_to_the_engine() -> Seams:
    """Prompts go to the engine as rows of a padded batch: it takes the padding on the left for tokens."""

    async def generate(original: Any, engine: Any, request_id: str, *, prompt_ids: Sequence[int], **rest: Any) -> Any:
        padded = [engine.pad_token_id] * 4 + list(prompt_ids)
        return await original(engine, request_id, prompt_ids=padded, **rest)

    return {_ENGINE: generate}


@fault("LGP002", "old_log_prob", reports=["skyrl-prompts-right-padded", "unsloth-padding-side-mutated"])
def prompts_padded_right() -> Seams:
    """The engine pads prompts on the right: it generates behind the padding, and tokens follow a gap."""

    def decode(original: Any, module: Any, prompts: Sequence[Sequence[int]], *rest: Any, **options: Any) -> Any:
        pad, width = options["pad_token_id"], 8 + max(map(len, prompts))
        padded = [[*prompt, *[pad] * (width - len(prompt))] for prompt in prompts]
        return original(module, padded, *rest, **options)

    return {_DECODE: decode}


@fault(
    "LEN005",
    "rollout",
    "data.max_prompt_length=40",
    "data.truncation=left",
    reports=["trl-max-prompt-length-ignored"],
)
def prompt_limit_not_passed_on() -> Seams:
    """Cutting prompts was left to the engine, and the chat template's path does not hand it the limit."""
    return {"lineage.trainer.agent_loop.base.fit_prompt": lambda _, ids, *limits: ids}


@fault("BAT003", "update_actor", "data.train_batch_size=6", reports=["verl-nested-split-vs-chunk"])
def split_for_padded_fields() -> Seams:
    """Micro-batches of jagged rows are cut by a count of whole ones: what is left over at the end is in none."""

    def split(original: Any, limit: Any, seq_lens: Sequence[Sequence[int]]) -> Any:
        parts = original(limit, seq_lens)
        if not _in_stage("update_actor"):
            return parts
        return [[part[: max(len(part) - 1, 1)] for part in rank] for rank in parts]

    return {"lineage.trainer.batching.micro_batches.MicroBatchLimit.split": split}
