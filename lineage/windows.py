"""How a field is seen: under which mask, through which window of its container, with which borders marked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lineage.batch import MASK_FIELDS, FieldColumn


def flat_mask(item: FieldColumn, mask: FieldColumn | None) -> NDArray[Any] | None:
    """The mask in the field's container coordinates, where the two have the same rows; a mask is its own mask."""
    if item.name in MASK_FIELDS:
        mask = item
    if mask is None or item.width != 1 or item.span != "response":
        return None
    if mask is not item and not _alike(item, mask):
        return None
    flags: NDArray[Any] = mask.rows.values != 0
    return flags if mask.rows.valid is None else flags & window(mask)


def check_mask(item: FieldColumn, mask: FieldColumn) -> None:
    """Refuse a mask that was given for a field and does not lie over it: unseen, it could not be found wrong either.

    Raises:
        ValueError: it has other rows, or rows of other lengths.
    """
    if item.span != "response" or item.width != 1 or item.name in MASK_FIELDS or _alike(item, mask):
        return
    if mask.rows.n != item.rows.n:
        raise ValueError(f"a mask of {mask.rows.n} rows for {item.rows.n} rows of {item.name}")
    row = int(np.flatnonzero(mask.rows.lengths != item.rows.lengths)[0])
    lengths = f"{mask.rows.lengths[row]} elements for {item.rows.lengths[row]}"
    raise ValueError(f"row {row} of the mask has {lengths} of {item.name}: give the mask in the field's own shape")


def _alike(item: FieldColumn, mask: FieldColumn) -> bool:
    return mask.rows.n == item.rows.n and bool((mask.rows.lengths == item.rows.lengths).all())


def window(item: FieldColumn) -> NDArray[Any]:
    """``(sum(lengths),)`` which container elements are data."""
    rows = item.rows
    if rows.valid is None:
        return np.ones(len(rows.values), dtype=bool)
    position = np.arange(len(rows.values)) - np.repeat(np.cumsum(rows.lengths) - rows.lengths, rows.lengths)
    starts = np.zeros_like(rows.valid) if rows.starts is None else rows.starts
    return (position >= np.repeat(starts, rows.lengths)) & (position < np.repeat(starts + rows.valid, rows.lengths))


def cuts_of(item: FieldColumn, prompt_lengths: NDArray[Any] | None) -> NDArray[Any] | None:
    """``(n, 3)`` borders of a sequence-span field in elements: prompt_len - 1, prompt_len, seq_len - 1."""
    if prompt_lengths is None or item.span != "sequence" or len(prompt_lengths) != item.rows.n:
        return None
    valid = item.rows.valid_lengths
    cuts = np.empty((len(valid), 3), dtype=np.int64)
    cuts[:, 1] = prompt = np.minimum(prompt_lengths * item.width, valid)
    cuts[:, 0] = prompt - item.width
    cuts[:, 2] = valid - item.width
    return np.maximum(cuts, 0, out=cuts)
