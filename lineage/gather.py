"""Small batches of one kind, kept as they come and turned into columns together.

Sessions write their trajectories one by one. Making columns of each would cost more than all the statistics of a step,
so a snapshot is taken at the call and the rest is done once, when the stage ends.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lineage.batch import FieldColumn, column, is_jagged, is_numbers, is_tensor, jagged_column, object_column, to_numpy
from lineage.fingerprint import canonical_json

FEW = 4  # elements up to which a batch is small

Kind = tuple[str, str, Any]  # field, how its pieces are kept, dtype


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
    pieces: list[list[Any]] = field(default_factory=list)

    def add(self, keys: Sequence[str], pieces: list[Any], columns: Mapping[str, Sequence[Any]] | None) -> None:
        """Keep one more batch."""
        self.keys.extend(keys)
        self.columns.append((len(keys), columns or {}))
        self.pieces.append(pieces)

    def fields(self) -> dict[str, FieldColumn]:
        """All batches as one column a field."""
        return {
            name: _joined(name, kind, [pieces[index] for pieces in self.pieces])
            for index, (name, kind, _) in enumerate(self.kinds)
        }

    def element_columns(self) -> dict[str, list[Any]]:
        """Element columns of all batches, null where a batch did not say."""
        names = {name for _, given in self.columns for name in given}
        return {name: [value for n, given in self.columns for value in given.get(name, [None] * n)] for name in names}


def small_pieces(items: Mapping[str, Any]) -> tuple[tuple[Kind, ...], list[Any]] | None:
    """Kinds and snapshots of a small batch's fields, or None where a field is of a kind that is not gathered."""
    kinds: list[Kind] = []
    pieces: list[Any] = []
    for name, value in items.items():
        if is_tensor(value):
            if not is_jagged(value):
                if value.ndim != 1:
                    return None
                kinds.append((name, "scalar", value.dtype))
                pieces.append(value.detach().clone())
                continue
            values = value._values
            if values.ndim != 1 or value._lengths is not None:
                return None
            kinds.append((name, "jagged", values.dtype))
            pieces.append((values.detach().clone(), value._offsets))
            continue
        rows = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(rows, list):
            return None
        if all(isinstance(row, str) for row in rows):
            kinds.append((name, "str", None))
            pieces.append([row.encode("utf-8", "surrogatepass") for row in rows])
        elif all(type(row) in (int, float, bool) for row in rows):
            kinds.append((name, "number", type(rows[0])))
            pieces.append(list(rows))
        elif all(is_tensor(row) and row.ndim == 1 and not is_jagged(row) for row in rows):
            kinds.append((name, "rows", rows[0].dtype))
            pieces.append([row.detach().clone() for row in rows])
        elif any(is_tensor(row) or isinstance(row, (int, float, np.ndarray)) or is_numbers(row) for row in rows):
            return None
        else:
            kinds.append((name, "object", None))
            pieces.append([canonical_json(row) for row in rows])
    return tuple(kinds), pieces


def _joined(name: str, kind: str, parts: list[Any]) -> FieldColumn:
    if kind in ("str", "object"):
        return object_column(name, [blob for part in parts for blob in part], kind)
    if kind == "number":
        return column(name, [number for part in parts for number in part])
    torch = sys.modules["torch"]
    if kind == "rows":
        tensors = [tensor for part in parts for tensor in part]
        return jagged_column(name, torch.cat(tensors), np.array([len(tensor) for tensor in tensors], dtype=np.int64))
    if kind == "scalar":
        return column(name, torch.cat(parts))
    offsets = to_numpy(torch.cat([offsets for _, offsets in parts]), copy=False).astype(np.int64)
    borders = np.cumsum([len(offsets) for _, offsets in parts])[
        :-1
    ]  # from the last of one part to the first of the next
    lengths = np.delete(np.diff(offsets), borders - 1)
    return jagged_column(name, torch.cat([values for values, _ in parts]), lengths)
