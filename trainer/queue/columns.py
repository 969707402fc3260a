"""Rows as columns: the layouts in which every queue of the trainer returns its values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from lineage.trainer.protocol import lengths_of, nested_tokens_last, offsets_of

Offsets = dict[tuple[int, ...], Tensor]


def column(rows: list[Any], shared: Offsets) -> Any:
    """Rows as one column, in new memory; columns of the same lengths share their offsets.

    Rows ``(k, j)`` of one k are ragged on their last axis, also where all are equally long: position_ids are.
    Rows that no jagged tensor can hold (dtypes or inner sizes differ) come back as TransferQueue packs them: a
    strided nested tensor of the first row's dtype, which cuts 0.5 to 0 when that is an integer, or a NonTensorStack.

    Args:
        rows: one tensor ``(...)`` or object a row.
        shared: offsets by lengths, of the columns of this batch made so far.
    """
    if not all(isinstance(row, Tensor) for row in rows):
        return NonTensorStack(*copy.deepcopy(rows))
    if all(row.dim() == 0 for row in rows):
        return torch.stack(rows)
    if all(row.dim() == 2 and row.dtype == rows[0].dtype and row.shape[0] == rows[0].shape[0] for row in rows):
        return nested_tokens_last(rows)
    if any(row.dtype != rows[0].dtype or row.shape[1:] != rows[0].shape[1:] or not row.dim() for row in rows):
        try:
            return torch.nested.as_nested_tensor(rows, layout=torch.strided)
        except (RuntimeError, TypeError):
            return NonTensorStack(*(row.clone() for row in rows))
    return _jagged(torch.cat(rows), torch.tensor([row.shape[0] for row in rows]), shared)


def relaid(data: TensorDict, names: list[str] | str | None = None) -> TensorDict:
    """What TransferQueue returned, in the layouts of :func:`column` and the order asked for.

    It makes the first axis of a row the ragged one where rows ``(k, j)`` are equally long and gives up jagged where
    they are not; no two of its columns share offsets, without which torch adds none to another; and it returns its
    fields by the alphabet.

    Args:
        names: fields that were asked for; None leaves them as they are.
    """
    shared: Offsets = {}
    held = set(data.keys())
    order = data.keys() if names is None else dict.fromkeys([names] if isinstance(names, str) else names)
    columns = {name: _relaid(data.get(name), shared) for name in order if name in held}
    return TensorDict(columns, batch_size=data.batch_size)


def _relaid(value: Any, shared: Offsets) -> Any:
    if not isinstance(value, Tensor) or not value.is_nested:
        return value
    if value.dim() == 3:
        return column(list(value.unbind()), shared)
    return _jagged(value.values(), lengths_of(value), shared) if value.layout == torch.jagged else value


def _jagged(values: Tensor, lengths: Tensor, shared: Offsets) -> Tensor:
    offsets = shared.setdefault(tuple(lengths.tolist()), offsets_of(lengths))
    return torch.nested.nested_tensor_from_jagged(values, offsets)
