"""Faults of values and of their kinds; and of validation rows that enter training."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lineage import hooks
from lineage.trainer.batching.padding import PAD_RESPONSE_TOKENS
from lineage.trainer.faults.registry import Seams, fault, trace_fault
from lineage.trainer.faults.rows import TraceRows
from lineage.trainer.faults.seams import TRAJECTORY_FIELDS
from lineage.trainer.loss import Aggregated, MiniBatch
from lineage.trainer.protocol import KVBatchMeta, nested_from_list
from lineage.trainer.training import rows_of

_VALIDATION = ("data.val_files=builtin:add", "data.val_max_samples=3", "trainer.test_freq=1")


@fault("VAL001", "old_log_prob")
def entropy_of_a_certain_token() -> Seams:
    """The entropy is computed as ``-p log p`` where a probability of 0 has a log of minus infinity: it is NaN."""

    def score(original: Any, *args: Any) -> Any:
        log_probs, entropy = original(*args)
        if entropy is not None and hooks.current().name == "old_log_prob":
            entropy = torch.where(torch.arange(entropy.shape[-1]) == entropy.shape[-1] - 2, torch.nan, entropy)
        return log_probs, entropy

    return {"lineage.trainer.log_prob._score": score}


@fault("VAL001", "update_actor", reports=["skyrl-nan-through-zero-mask"])
def masked_by_product() -> Seams:
    """A padding row's log-probs are NaN in the update, and the loss multiplies by the mask: NaN times 0 is NaN."""

    def cut(original: Any, values: Tensor, prompt_lens: list[int], response_lens: list[int]) -> Tensor:
        rows = original(values, prompt_lens, response_lens)
        padding = torch.tensor(response_lens) == PAD_RESPONSE_TOKENS
        return rows.masked_fill(padding.unsqueeze(-1), torch.nan)

    def aggregate(original: Any, matrix: Tensor, mask: Tensor, mode: str, mini: MiniBatch) -> Aggregated:
        return Aggregated((matrix * mask).sum(), original(matrix, mask, mode, mini).denominator)

    return {"lineage.trainer.training.response_windows": cut, "lineage.trainer.ppo_loss.aggregate": aggregate}


@fault("VAL001", "advantage")
def deviation_of_zero() -> Seams:
    """Advantages of a group whose scores are all alike are 0 / 0: the deviation is divided by without an epsilon."""

    def estimate(original: Any, *args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        constant = (result.advantages == 0).all(dim=-1, keepdim=True) & (args[1] > 0)
        result.advantages[constant] = torch.nan
        return result

    return {"lineage.trainer.stages.advantage.compute_advantage": estimate}


@fault("VAL002", "rollout")
def masks_as_numbers() -> Seams:
    """Masks are stored as float, by whoever averaged them: what indexes by one, or sums it in fewer bits, is wrong."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        for name in ("response_mask", "loss_mask"):
            fields[name] = nested_from_list([row.float() for row in rows_of(fields[name])])
        return fields

    return {TRAJECTORY_FIELDS: write, "lineage.trainer.stages.balance.padding_fields": write}


# a device that is not there cannot hold a tensor: the reference trainer has one, so the rows are edited
@trace_fault("VAL002", "advantage")
def half_a_batch_elsewhere(rows: TraceRows) -> None:
    """The advantages of a batch are left on the device they were computed on, beside masks that were moved."""
    rows.one(global_steps=2, stage="advantage", op="unpad", field="advantages")["device"] = "cuda:0"


@fault("VAL003", "metrics", *_VALIDATION)
def validation_in_the_running_mean() -> Seams:
    """The running mean of the reward is kept by whoever reads scores: answers of a validation move it too."""
    answered: list[KVBatchMeta] = []

    def fetch(original: Any, queue: Any, batch: KVBatchMeta, names: list[str]) -> TensorDict:
        for other in answered:
            original(queue, other, ["rm_scores"])
            queue.kv_clear(keys=other.keys, partition_id=other.partition_id)
        answered.clear()
        return original(queue, batch, names)

    return {
        "lineage.trainer.stages.validate._clear": lambda _, __, batch: answered.append(batch),
        "lineage.trainer.stages.metrics.fetch": fetch,
    }
