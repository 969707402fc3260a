"""Faults of lengths and shapes."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import TRAJECTORY_FIELDS
from lineage.trainer.protocol import KVBatchMeta, nested_from_list
from lineage.trainer.training import rows_of


@fault("LEN001", "rollout")
def short_log_probs() -> Seams:
    """The engine returns the log-probs of all tokens but the last; whoever reads them pads, so nothing crashes."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        fields["rollout_log_probs"] = nested_from_list([row[:-1] for row in rows_of(fields["rollout_log_probs"])])
        return fields

    def read(original: Any, queue: Any, batch: KVBatchMeta, names: list[str]) -> TensorDict:
        data = original(queue, batch, names)
        if "rollout_log_probs" in names:
            pairs = zip(rows_of(data["rollout_log_probs"]), rows_of(data["response_mask"]), strict=True)
            padded = [torch.nn.functional.pad(row, (0, len(mask) - len(row))) for row, mask in pairs]
            data["rollout_log_probs"] = nested_from_list(padded)
        return data

    return {
        TRAJECTORY_FIELDS: write,
        "lineage.trainer.stages.log_prob.fetch": read,
        "lineage.trainer.stages.advantage.fetch": read,
    }


@fault("LEN002", "rollout")
def truncated_input_ids() -> Seams:
    """The sequence is cut to a model length one token short, after prompt and response were written whole."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        limit = max(len(row) for row in rows_of(fields["input_ids"])) - 1
        for name in ("input_ids", "attention_mask", "position_ids"):
            fields[name] = nested_from_list([row[:limit] for row in rows_of(fields[name])])
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("LEN003", "advantage")
def padding_loses_the_last_value() -> Seams:
    """The padded container is filled up to width - 1, a slice meant for shifted logits: the longest rows lose their
    last value, the reward among them."""

    def pad(original: Any, nested: Tensor, **options: Any) -> Tensor:
        padded = original(nested, **options)
        padded[:, -1] = 0
        return padded

    return {"lineage.trainer.protocol.nested_to_padded": pad}
