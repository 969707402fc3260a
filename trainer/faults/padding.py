"""Faults of padding rows."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict

from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.protocol import KVBatchMeta, nested_from_list
from lineage.trainer.training import rows_of


@fault("PAD001", "balance")
def padding_keeps_a_score() -> Seams:
    """A padding row is made from a real one and keeps its reward."""

    def make(original: Any, like: TensorDict, *rest: Any) -> TensorDict:
        fields = original(like, *rest)
        scores = rows_of(fields["rm_scores"])
        scores[0][-1] = like["rm_scores"].values().sum()
        fields["rm_scores"] = nested_from_list(scores)
        return fields

    return {"lineage.trainer.stages.balance.padding_fields": make}


@fault("PAD002", "metrics")
def metrics_over_padding() -> Seams:
    """The metrics are taken over the whole batch: padding rows count as samples of score 0."""

    def compute(original: Any, parts: Any, batch: KVBatchMeta, *rest: Any) -> dict[str, float]:
        tags = [{**tag, "is_padding": False} for tag in batch.tags]
        return original(parts, KVBatchMeta(batch.keys, tags, batch.partition_id), *rest)

    return {"lineage.trainer.grpo.compute_metrics": compute}
