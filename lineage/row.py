"""One row in the making: pieces of content gathered under one identity, then joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lineage.batch import FieldColumn
from lineage.errors import UsageError
from lineage.schema import CONTEXT, LISTED, WHERE
from lineage.statistics import Rows

# What a caller may say of a row besides its content.
CONTEXT_NAMES = frozenset(
    {column.name for column in (*WHERE, *CONTEXT)} - {"global_steps", "stage", "op"}
    | {"against", "producer", "consumer", "container", "span", "coord", "asked_n", "missing", "parent"}
)
_LISTED_NAMES = frozenset(column.name for column in LISTED)


class Piece(NamedTuple):
    """What one call said of some elements of a row."""

    keys: tuple[str, ...] | None
    n: int
    item: FieldColumn | None
    mask: NDArray[np.bool_] | None
    cuts: NDArray[np.int64] | None
    columns: Mapping[str, Sequence[Any]] | None


@dataclass
class Row:
    """A row that is still open: its scalars are settled, its elements are being gathered.

    ``content`` is set where the content was taken at the call, and the pieces bring none.
    """

    seq: int
    scalars: dict[str, Any]
    pieces: list[Piece] = field(default_factory=list)
    content: int | None = None


@dataclass
class FinishedRow:
    """A row whose elements are all known; its statistics are those of content number ``content``.

    Attributes:
        n: number of elements.
        keys: ``(n,)`` keys, or None.
        columns: listed columns given by the caller.
        tags: tag columns of the keys, shared by the rows of the same keys, or None.
        content: number in the step's content table, or None: the row has no content.
        width: content elements a position holds.
        cuts: ``(n, c)`` positions of the marks, in content elements.
    """

    seq: int
    scalars: dict[str, Any]
    n: int
    keys: tuple[str, ...] | None
    columns: dict[str, Sequence[Any]]
    tags: dict[str, list[Any]] | None = None
    content: int | None = None
    width: int = 1
    cuts: NDArray[np.int64] | None = None


def joined_rows(pieces: Sequence[Piece]) -> Rows | None:
    """Content of all pieces as one, or None where no piece has content."""
    parts = [(piece, piece.item.rows) for piece in pieces if piece.item is not None]
    if not parts:
        return None
    if len(parts) == 1:
        piece, rows = parts[0]
        return replace(rows, mask=piece.mask, cuts=piece.cuts)
    padded = any(rows.valid is not None for _, rows in parts)
    shifted = any(rows.starts is not None for _, rows in parts)
    starts = [_zeros(rows) if rows.starts is None else rows.starts for _, rows in parts]
    return Rows(
        np.concatenate([rows.values for _, rows in parts]),
        np.concatenate([rows.lengths for _, rows in parts]),
        np.concatenate(starts) if shifted else None,
        np.concatenate([rows.valid_lengths for _, rows in parts]) if padded else None,
        _all_or_none([piece.mask for piece, _ in parts]),
        _all_or_none([piece.cuts for piece, _ in parts]),
        parts[0][1].opaque,
    )


def joined_keys(pieces: Sequence[Piece]) -> tuple[str, ...] | None:
    """Keys of all pieces, or None where any piece has elements without keys."""
    if len(pieces) == 1:
        return pieces[0].keys
    if any(piece.keys is None and piece.n for piece in pieces):
        return None
    return tuple(key for piece in pieces for key in piece.keys or ())


def joined_columns(pieces: Sequence[Piece]) -> dict[str, Sequence[Any]]:
    """Listed columns of all pieces, null for the elements of a piece that does not say."""
    given = [piece.columns or {} for piece in pieces]
    names = {name for columns in given for name in columns}
    unknown = names - _LISTED_NAMES
    if unknown:
        raise UsageError(f"unknown element columns {sorted(unknown)}; known: {sorted(_LISTED_NAMES)}")
    result: dict[str, Sequence[Any]] = {}
    for name in names:
        parts = [columns.get(name) for columns in given]
        for piece, part in zip(pieces, parts, strict=True):
            if part is not None and len(part) != piece.n:
                raise UsageError(f"column {name} has {len(part)} values for {piece.n} elements")
        if len(parts) == 1 and parts[0] is not None:
            result[name] = parts[0]
        else:
            result[name] = [
                value
                for piece, part in zip(pieces, parts, strict=True)
                for value in (part if part is not None else [None] * piece.n)
            ]
    return result


def _zeros(rows: Rows) -> NDArray[np.int64]:
    return np.zeros(rows.n, dtype=np.int64)


def _all_or_none(arrays: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    present = [array for array in arrays if array is not None]
    return np.concatenate(present) if len(present) == len(arrays) else None
