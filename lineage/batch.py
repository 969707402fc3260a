"""A batch to columns: one :class:`FieldColumn` a field, its content flat and its row lengths beside it.

Takes TensorDict, DataProto-shaped objects (``batch``, ``non_tensor_batch``) and plain dicts; padded tensors come with
their lengths or with an attention mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from lineage.errors import UserError
from lineage.freeze import Frozen, FrozenNested, FrozenObjects, FrozenTensor, freeze
from lineage.statistics import Rows
from lineage.vocabulary import span_of

Int64 = NDArray[np.int64]

MASK_FIELDS = ("response_mask", "loss_mask")


@dataclass
class FieldColumn:
    """One field of a batch.

    Attributes:
        name: field name.
        rows: content in elements; ``width`` of them make one position.
        width: elements a position holds (1, or the inner size of a ``(k, seq)`` field).
        layout: dense, jagged, object or scalar.
        span: prompt, response, sequence or scalar.
        dtype, device, shape, nbytes, requires_grad: what the container said of itself; -1 is a ragged axis.
    """

    name: str
    rows: Rows
    width: int
    layout: str
    span: str
    dtype: str
    device: str | None
    shape: tuple[int, ...]
    nbytes: int
    requires_grad: bool | None


@dataclass(frozen=True)
class Padding:
    """Where the data of padded tensors lies: valid lengths by span, and their first position where it is not 0."""

    valid: Mapping[str, Int64]
    starts: Mapping[str, Int64]


def container_name(batch: Any) -> str:
    """Name of the container as the schema spells it."""
    if hasattr(batch, "non_tensor_batch") and hasattr(batch, "batch"):
        return "DataProto"
    name = type(batch).__name__
    if name in ("TensorDict", "KVBatchMeta", "BatchMeta"):
        return name
    return "TensorDict" if "TensorDict" in name else "dict"


def items_of(batch: Any) -> Iterator[tuple[str, Any]]:
    """The (field, value) pairs of any container; fields that hold None are left out."""
    if hasattr(batch, "non_tensor_batch") and hasattr(batch, "batch"):
        if batch.batch is not None:
            yield from batch.batch.items()
        yield from (batch.non_tensor_batch or {}).items()
    elif hasattr(batch, "items"):
        for name, value in batch.items():
            if value is not None:
                yield name, value
    else:
        raise UserError(
            f"cannot record a {type(batch).__name__}: give a TensorDict, a DataProto or a dict of tensors and lists"
        )


def frozen_items(batch: Any, fields: Sequence[str] | None = None) -> dict[str, Frozen]:
    """Snapshots of a container's fields, or of some of them."""
    return {name: freeze(value) for name, value in items_of(batch) if fields is None or name in fields}


def padding_of(
    items: Mapping[str, Frozen], lengths: Mapping[str, Sequence[int]] | None = None, left_padded: Sequence[str] = ()
) -> Padding | None:
    """Padding of a batch of dense tensors, as told or from its ``attention_mask``, verl's way.

    Args:
        items: the batch by field.
        lengths: valid lengths by span (prompt, response, sequence).
        left_padded: fields padded on the left, ``prompts`` for one; a sequence then starts where its prompt does.
    """
    if lengths is not None:
        valid = {span: np.asarray(known, dtype=np.int64) for span, known in lengths.items()}
        starts = {}
        prompts = items.get("prompts")
        if "prompts" in left_padded and _is_dense(prompts) and "prompt" in valid:
            starts["prompt"] = starts["sequence"] = prompts.array.shape[-1] - valid["prompt"]
        return Padding(valid, starts)
    attention, responses = items.get("attention_mask"), items.get("responses")
    if not _is_dense(attention) or attention.array.ndim != 2:
        return None
    ones = attention.array != 0
    valid = {"sequence": ones.sum(axis=1, dtype=np.int64)}
    starts = {"sequence": ones.argmax(axis=1).astype(np.int64)}
    if _is_dense(responses) and responses.array.shape[-1] <= ones.shape[1]:
        prompt_width = ones.shape[1] - responses.array.shape[-1]
        valid["response"] = ones[:, prompt_width:].sum(axis=1, dtype=np.int64)
        valid["prompt"] = valid["sequence"] - valid["response"]
        starts["prompt"] = prompt_width - valid["prompt"]
    return Padding(valid, starts)


def _is_dense(value: Frozen | None) -> TypeGuard[FrozenTensor]:
    """True for a dense tensor with a token axis."""
    return isinstance(value, FrozenTensor) and value.array.ndim >= 2


def column(name: str, value: Any, padding: Padding | None = None, span: str | None = None) -> FieldColumn:
    """One field as flat content.

    Args:
        name: field name; a known one brings its span.
        value: anything :func:`lineage.freeze.freeze` takes, or what it gave.
        padding: where the data of padded tensors lies.
        span: overrides the registry's.
    """
    frozen = freeze(value)
    span = span or span_of(name)
    if isinstance(frozen, FrozenNested):
        return _nested_column(name, frozen, span or "response")
    if isinstance(frozen, FrozenObjects):
        return _object_column(name, frozen, span or "scalar")
    return _dense_column(name, frozen, padding, span)


def _nested_column(name: str, frozen: FrozenNested, span: str) -> FieldColumn:
    inner = frozen.values.shape[1:]
    width = int(np.prod(inner, dtype=np.int64)) if inner else 1
    content = frozen.values.reshape(-1)
    lengths = frozen.lengths if width == 1 else frozen.lengths * width
    shape = (len(lengths), -1, *inner)
    return FieldColumn(
        name,
        Rows(content, lengths),
        width,
        "jagged",
        span,
        frozen.dtype,
        frozen.device,
        shape,
        content.nbytes,
        frozen.requires_grad,
    )


def _dense_column(name: str, frozen: FrozenTensor, padding: Padding | None, span: str | None) -> FieldColumn:
    array = frozen.array
    n = array.shape[0] if array.ndim else 1
    per_row = int(np.prod(array.shape[1:], dtype=np.int64)) if array.ndim > 1 else 1
    scalar = array.ndim < 2
    starts = valid = None
    width = 1
    span = span or ("scalar" if scalar else "response")
    if not scalar and padding is not None:
        # (batch, k, seq) fields have the token axis last: bring it outermost, so that a window is a run
        tokens = array.shape[-1]
        if array.ndim > 2:
            array = np.ascontiguousarray(np.moveaxis(array, -1, 1))
            width = per_row // tokens if tokens else 1
        known = padding.valid.get(span)
        if known is not None and len(known) == n and int(known.max(initial=0)) <= tokens:
            valid = known * width
            if span in padding.starts and (padding.starts[span] + known <= tokens).all():
                starts = padding.starts[span] * width
            if int(valid.min(initial=per_row)) == per_row:
                starts = valid = None  # nothing is padded
    return FieldColumn(
        name,
        Rows(array.reshape(-1), np.full(n, per_row, dtype=np.int64), starts, valid),
        width,
        "scalar" if scalar else "dense",
        span,
        frozen.dtype,
        frozen.device,
        tuple(array.shape),
        array.nbytes,
        frozen.requires_grad,
    )


def _object_column(name: str, frozen: FrozenObjects, span: str) -> FieldColumn:
    lengths = np.fromiter(map(len, frozen.blobs), dtype=np.int64, count=len(frozen.blobs))
    flat = np.frombuffer(b"".join(frozen.blobs), dtype=np.uint8)
    rows = Rows(flat, lengths, opaque=True)
    return FieldColumn(name, rows, 1, "object", span, frozen.dtype, None, (len(lengths),), len(flat), None)
