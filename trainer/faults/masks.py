"""Faults of masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tensordict import TensorDict

from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import TRAJECTORY_FIELDS, not_eos
from lineage.trainer.protocol import nested_from_list
from lineage.trainer.training import rows_of


@fault("MSK001", "rollout")
def loss_mask_by_token() -> Seams:
    """The loss mask is built as ``ids != pad`` with pad = eos: the token that ends a response does not train."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        fields["loss_mask"] = nested_from_list([not_eos(ids) for ids in rows_of(fields["responses"])])
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("MSK002", "update_actor")
def mask_rebuilt_in_the_update() -> Seams:
    """The actor does not use the mask it read: it builds one from the token ids of its own batch."""

    def read(original: Any, *args: Any) -> Any:
        rows = original(*args)
        if "loss_mask" not in rows.columns:
            return rows
        pairs = zip(rows.columns["input_ids"], rows.columns["loss_mask"], strict=True)
        rows.columns["loss_mask"] = masks = [not_eos(ids[-len(mask) :]) for ids, mask in pairs]
        return replace(rows, tokens=[int(mask.sum()) for mask in masks])

    return {"lineage.trainer.actor.ActorRolloutRefWorker._rows": read}
