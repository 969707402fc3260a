"""Padding rows: what brings a batch to the multiple that mini-batches and ranks need (``batch_sizes``).

The first half of verl's ``_balance_batch`` (``upsample_batch_to_divisible_size``). A padding row trains nothing: its
mask and reward are 0, its group is its own, its tag says ``is_padding``. It has every field of a real row, because a
field that one row lacks is lost for the whole batch.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from lineage.trainer.protocol import nested_from_list, nested_tokens_last

PAD_PROMPT_TOKENS = 1
# Two, because no session can end on two: the first eos ends it. A padding row then never equals a real one.
PAD_RESPONSE_TOKENS = 2


@dataclass(frozen=True)
class PaddingRows:
    """Rows to add: one key and tag each, and the values of one row (all alike but for the key)."""

    uid: str
    keys: list[str]
    tags: list[dict[str, Any]]


def padding_rows(
    count: int, like: Mapping[str, Any], *, seed: int, global_steps: int, sub_step: int = 0
) -> PaddingRows:
    """Keys and tags of ``count`` padding rows: one group ``pad<hex>`` of its own, sessions 0..count-1.

    Args:
        like: tags of a real row; version tags are copied so that a version check sees no foreign step.
        seed: the run's seed; the uid follows from it, the step and the sub-step, so two runs agree.
        sub_step: batch of the step the rows are for; two of them live in the queue together.
    """
    named = f"{seed}/{global_steps}/{sub_step}/padding"
    digest = hashlib.blake2b(named.encode(), digest_size=16).hexdigest()
    uid = f"pad{digest}"
    tag = {
        **like,
        "is_padding": True,
        "prompt_len": PAD_PROMPT_TOKENS,
        "response_len": PAD_RESPONSE_TOKENS,
        "seq_len": PAD_PROMPT_TOKENS + PAD_RESPONSE_TOKENS,
    }
    return PaddingRows(uid, [f"{uid}_{session}_0" for session in range(count)], [dict(tag) for _ in range(count)])


def padding_fields(like: TensorDict, rows: PaddingRows, eos_token_id: int) -> TensorDict:
    """Values of the padding rows: end-of-sequence tokens, zeros, and empty objects.

    Args:
        like: one real row with all its fields, batch size 1; a field not known here keeps its shape, zeroed.
    """
    prompt = torch.full((PAD_PROMPT_TOKENS,), eos_token_id)
    response = torch.full((PAD_RESPONSE_TOKENS,), eos_token_id)
    sequence = torch.cat([prompt, response])
    known: dict[str, Any] = {
        "prompts": prompt,
        "responses": response,
        "input_ids": sequence,
        "attention_mask": torch.ones_like(sequence),
        "position_ids": _positions(like, len(sequence)),
        "response_mask": torch.zeros_like(response),
        "loss_mask": torch.zeros_like(response),
        "rm_scores": torch.zeros(PAD_RESPONSE_TOKENS),
        "rollout_log_probs": torch.zeros(PAD_RESPONSE_TOKENS),
        "uid": rows.uid,
        "raw_prompt": [],
        "data_source": "",
        "reward_model": {},
        "extra_info": {},
        "extra_fields": {},
        "multi_modal_inputs": {},
    }
    count = len(rows.keys)
    columns = {name: _repeat(known.get(name, _blank(like.get(name))), count) for name in like.keys()}  # noqa: SIM118
    if "position_ids" in columns:
        columns["position_ids"] = nested_tokens_last([known["position_ids"]] * count)
    return TensorDict(columns, batch_size=[count])


def _positions(like: TensorDict, length: int) -> Tensor:
    """0, 1, 2, ... on each axis that a real row has: ``(length,)`` or ``(k, length)``."""
    positions = torch.arange(length)
    real = like.get("position_ids")
    return positions if real is None or real.dim() < 3 else positions.expand(real.shape[1], -1)


def _blank(column: Any) -> Any:
    """A row of the column's kind without content: nothing a real row says may be said by padding."""
    if isinstance(column, Tensor):
        return torch.zeros_like(column.unbind()[0])
    (value,) = column.tolist()
    return type(value)() if isinstance(value, str | bool | int | float | list | dict) else None


def _repeat(value: Any, count: int) -> Any:
    if not isinstance(value, Tensor):
        return NonTensorStack(*[copy.deepcopy(value) for _ in range(count)])
    return torch.stack([value] * count) if value.dim() == 0 else nested_from_list([value] * count)
