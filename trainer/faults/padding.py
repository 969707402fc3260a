"""Faults of padding rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lineage import hooks
from lineage.trainer.batching.padding import PaddingRows
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.loss import MiniBatch
from lineage.trainer.protocol import KVBatchMeta, nested_from_list
from lineage.trainer.tracking.dump import Sample
from lineage.trainer.training import rows_of

_ROWS = "lineage.trainer.stages.balance.padding_rows"
_FIELDS = "lineage.trainer.stages.balance.padding_fields"
_SEQUENCE_MEAN = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
_DUMP = "trainer.rollout_data_dir={folder}/dump"


def _untagged(batch: KVBatchMeta) -> KVBatchMeta:
    """The same rows, none of them padding."""
    tags = [{**tag, "is_padding": False} for tag in batch.tags]
    return KVBatchMeta(batch.keys, tags, batch.partition_id, extra_info=batch.extra_info)


@fault("PAD001", "balance")
def padding_keeps_a_score() -> Seams:
    """A padding row is made from a real one and keeps its reward."""

    def make(original: Any, like: TensorDict, *rest: Any) -> TensorDict:
        fields = original(like, *rest)
        scores = rows_of(fields["rm_scores"])
        scores[0][-1] = like["rm_scores"].values().sum()
        fields["rm_scores"] = nested_from_list(scores)
        return fields

    return {_FIELDS: make}


@fault("PAD001", "balance", reports=["rllm-padded-rows-keep-mask", "prime-dummy-microbatch-counted"])
def padding_keeps_its_mask() -> Seams:
    """Padding rows have advantage 0 and a mask of ones: they train nothing, and are counted as tokens of the loss."""

    def make(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        for name in ("response_mask", "loss_mask"):
            fields[name] = nested_from_list([torch.ones_like(row) for row in rows_of(fields[name])])
        return fields

    return {_FIELDS: make}


@fault("PAD001", "balance", reports=["verl-padding-by-duplicating-real-rows"])
def padding_copies_a_row() -> Seams:
    """The batch is filled up with copies of its first row, their masks set to 0: real content under padding keys."""

    def keys(original: Any, count: int, like: dict[str, Any], **options: Any) -> PaddingRows:
        rows = original(count, like, **options)
        lengths = {name: like[name] for name in ("prompt_len", "response_len", "seq_len")}
        return replace(rows, tags=[{**tag, **lengths} for tag in rows.tags])

    def make(original: Any, like: TensorDict, rows: PaddingRows, *rest: Any) -> TensorDict:
        fields, count = original(like, rows, *rest), len(rows.keys)
        for name in ("prompts", "responses", "input_ids", "attention_mask", "position_ids"):
            fields[name] = nested_from_list(rows_of(like[name]) * count)
        for name in ("response_mask", "loss_mask", "rm_scores", "rollout_log_probs"):
            fields[name] = nested_from_list([torch.zeros_like(row) for row in rows_of(like[name])] * count)
        return fields

    return {_ROWS: keys, _FIELDS: make}


@fault("PAD001", "balance")
def padding_joins_a_group() -> Seams:
    """Padding rows take the uid of the row they are made from: they are further sessions of a real group."""
    seen: list[str] = []

    def add(original: Any, parts: Any, batch: KVBatchMeta, *rest: Any) -> KVBatchMeta:
        seen[:] = [batch.keys[0].rsplit("_", 2)[0]]
        return original(parts, batch, *rest)

    def keys(original: Any, count: int, *args: Any, **options: Any) -> PaddingRows:
        rows, first = original(count, *args, **options), 1000  # beyond the sessions that were asked for
        return PaddingRows(seen[0], [f"{seen[0]}_{first + row}_0" for row in range(count)], rows.tags)

    return {"lineage.trainer.stages.balance._add_padding": add, _ROWS: keys}


@fault("LEN001", "balance", reports=["prime-pad-some-fields-only"])
def padding_forgets_a_field() -> Seams:
    """A field that was added later is not padded with the others: its padding rows are of another length."""

    def make(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        fields["rm_scores"] = nested_from_list([row[:1] for row in rows_of(fields["rm_scores"])])
        return fields

    return {_FIELDS: make}


@fault("PAD002", "metrics", reports=["verl-padding-dilutes-offpolicy-metrics"])
def metrics_over_padding() -> Seams:
    """The metrics are taken over the whole batch: padding rows count as samples of score 0."""

    def compute(original: Any, parts: Any, batch: KVBatchMeta, *rest: Any) -> dict[str, float]:
        return original(parts, _untagged(batch), *rest)

    return {"lineage.trainer.grpo.compute_metrics": compute}


@fault("PAD002", "metrics")
def perplexity_over_padding() -> Seams:
    """The perplexities of the two policies are means over all rows: a padding row, which has no token, counts as 1."""

    def compute(original: Any, log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> dict[str, float]:
        metrics, share = original(log_prob, rollout_log_prob, mask), float(mask.bool().any(dim=-1).double().mean())
        for side in ("training", "rollout"):
            metrics[f"{side}_log_ppl"] *= share
            metrics[f"{side}_ppl"] = metrics[f"{side}_ppl"] * share + (1 - share)
        return metrics

    return {"lineage.trainer.correction.rollout_correction.off_policy_metrics": compute}


@fault("LOS001", "update_actor", _SEQUENCE_MEAN)
def mean_over_padding() -> Seams:
    """The mean over sequences divides by all rows of the mini-batch: padding makes every real row's share smaller."""
    return {"lineage.trainer.training.MiniBatch.of": _all_rows}


@fault("PAD003", "update_actor", _SEQUENCE_MEAN, step=1, onwards=True, profile="verl")
def mean_over_m_x_g() -> Seams:
    """The mean over sequences divides by M x G, as verl means to, and padding stands in for what did not divide."""
    return {"lineage.trainer.training.MiniBatch.of": _all_rows}


def _all_rows(original: Any, tokens: Any) -> MiniBatch:
    counts = list(tokens)
    made = original(counts)
    return replace(made, rows=len(counts)) if hooks.current().name == "update_actor" else made


@fault("PAD004", "metrics")
def lengths_over_padding() -> Seams:
    """The statistics of sequence lengths are taken after the batch was padded: the shortest row is a padding row."""
    padded: list[int] = []

    def balance(original: Any, seq_lens: list[int], *rest: Any) -> Any:
        padded[:] = seq_lens
        return original(seq_lens, *rest)

    return {
        "lineage.trainer.stages.balance.balance_rows": balance,
        "lineage.trainer.stages.balance.balance_metrics": lambda original, before, after, _: original(
            before, after, padded
        ),
    }


@fault("PAD004", "metrics")
def throughput_over_padding() -> Seams:
    """The tokens of the step are summed over every key it holds: padding counts as work done."""
    tokens: list[int] = []

    def fetch(original: Any, queue: Any, batch: KVBatchMeta, names: list[str]) -> TensorDict:
        tokens[:] = [tag["seq_len"] for tag in batch.tags]
        return original(queue, batch, names)

    return {
        "lineage.trainer.stages.metrics.fetch": fetch,
        "lineage.trainer.stages.metrics.compute_throughput_metrics": lambda original, _, *rest: original(
            sum(tokens), *rest
        ),
    }


@fault("PAD004", "dump", _DUMP)
def padding_is_dumped() -> Seams:
    """The dump holds a line for every key of the batch: two end tokens and score 0 for each padding row."""

    def read(original: Any, queue: Any, batch: KVBatchMeta, *rest: Any) -> list[Sample]:
        padding = {key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag["is_padding"]}
        samples = original(queue, _untagged(batch), *rest)
        return [replace(sample, is_padding=sample.key in padding) for sample in samples]

    return {"lineage.trainer.tracking.dump.read_samples": read}
