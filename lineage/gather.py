"""Small batches of one kind, kept as they come and turned into columns together.

Sessions write their trajectories one by one. Making columns of each would cost more than all the statistics of a step,
so the snapshots are kept and the rest is done once, when the stage ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lineage.batch import FieldColumn, column
from lineage.freeze import Frozen, FrozenNested, FrozenObjects, FrozenTensor

FEW = 4  # elements up to which a batch is small

Kind = tuple[str, type, str, str | None]  # field, class of its snapshots, dtype, device


@dataclass
class Gather:
    """Batches of one kind: the same op, fields, kinds and context.

    Attributes:
        op, entity, context: how the batches were recorded.
        kinds: what their fields are.
        seq: event number of the first row they will be.
        time_ns: when the first of them came.
    """

    op: str
    entity: str
    context: dict[str, Any]
    kinds: tuple[Kind, ...]
    seq: int
    time_ns: int
    keys: list[str] = field(default_factory=list)
    columns: list[tuple[int, Mapping[str, Sequence[Any]]]] = field(default_factory=list)
    pieces: list[tuple[Any, ...]] = field(default_factory=list)

    def add(
        self, keys: Sequence[str], items: Mapping[str, Frozen], columns: Mapping[str, Sequence[Any]] | None
    ) -> None:
        """Keep one more batch."""
        self.keys.extend(keys)
        self.columns.append((len(keys), columns or {}))
        self.pieces.append(tuple(items.values()))

    def fields(self) -> dict[str, FieldColumn]:
        """All batches as one column a field."""
        return {
            name: column(name, _joined([pieces[index] for pieces in self.pieces]))
            for index, (name, _, _, _) in enumerate(self.kinds)
        }

    def element_columns(self) -> dict[str, list[Any]]:
        """Element columns of all batches, null where a batch did not say."""
        names = {name for _, given in self.columns for name in given}
        return {name: [value for n, given in self.columns for value in given.get(name, [None] * n)] for name in names}


def kinds_of(items: Mapping[str, Frozen]) -> tuple[Kind, ...] | None:
    """Kinds of a small batch's fields, or None where a field is of a kind that is not gathered: padded tensors."""
    kinds: list[Kind] = []
    for name, item in items.items():
        if isinstance(item, FrozenObjects):
            kinds.append((name, FrozenObjects, item.dtype, None))
        elif (item.values if isinstance(item, FrozenNested) else item.array).ndim != 1:
            return None
        else:
            kinds.append((name, type(item), item.dtype, item.device))
    return tuple(kinds)


def _joined(parts: list[Any]) -> Frozen:
    first = parts[0]
    if isinstance(first, FrozenObjects):
        return FrozenObjects([blob for part in parts for blob in part.blobs], first.dtype)
    if isinstance(first, FrozenTensor):
        array = np.concatenate([part.array for part in parts])
        return FrozenTensor(array, first.dtype, first.device, first.requires_grad)
    values = np.concatenate([part.values for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    return FrozenNested(values, lengths, first.dtype, first.device, first.requires_grad)
