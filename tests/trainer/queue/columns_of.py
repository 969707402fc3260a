"""Short words for the batches of these tests, and the configuration of the real store."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from lineage.trainer.protocol import nested_from_list

TWO_UNITS = {"backend": {"SimpleStorage": {"num_data_storage_units": 2}}}  # so that a batch is spread over both


def nested(*rows: list[float]) -> torch.Tensor:
    """Rows as a jagged tensor."""
    return nested_from_list([torch.tensor(row) for row in rows])


def batch(**fields: Any) -> TensorDict:
    """Fields as a TensorDict of their length."""
    return TensorDict(fields, batch_size=[len(next(iter(fields.values())))])


def rows_of(data: TensorDict, field: str) -> list[list[float]]:
    """Rows of a jagged field as lists."""
    return [row.tolist() for row in data[field].unbind()]


def names(data: TensorDict) -> set[str]:
    """Fields of a batch."""
    return set(data.keys())
