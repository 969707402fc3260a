"""Any batch container to columns: one :class:`FieldColumn` a field, its content flat and its row lengths beside it.

Takes TensorDict, DataProto-shaped objects (``batch``, ``non_tensor_batch``), plain dicts of tensors, jagged nested
tensors, padded tensors with lengths or an attention mask, numpy arrays, lists and object arrays. Torch is never
imported: a tensor is known by its own module, which the caller has already loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lineage.errors import UserError
from lineage.fingerprint import canonical_json
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


def is_tensor(value: Any) -> bool:
    """True for a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_jagged(tensor: Any) -> bool:
    """True for a nested tensor in the jagged layout.

    Its properties cost a Python dispatch each, so the class is looked at and the parts are read directly.
    """
    return hasattr(type(tensor), "__tensor_flatten__") and hasattr(tensor, "_offsets")


def _nested(tensor: Any) -> bool:
    return is_jagged(tensor) or bool(tensor.is_nested)


def padding_of(
    items: Mapping[str, Any], lengths: Mapping[str, Sequence[int]] | None = None, left_padded: Sequence[str] = ()
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
        width = _dense_width(items.get("prompts"))
        if "prompts" in left_padded and width is not None and "prompt" in valid:
            starts["prompt"] = starts["sequence"] = width - valid["prompt"]
        return Padding(valid, starts)
    attention = items.get("attention_mask")
    if _dense_width(attention) is None:
        return None
    ones = to_numpy(attention, copy=False) != 0
    if ones.ndim != 2:
        return None
    valid = {"sequence": ones.sum(axis=1, dtype=np.int64)}
    starts = {"sequence": ones.argmax(axis=1).astype(np.int64)}
    response_width = _dense_width(items.get("responses"))
    if response_width is not None and response_width <= ones.shape[1]:
        prompt_width = ones.shape[1] - response_width
        valid["response"] = ones[:, prompt_width:].sum(axis=1, dtype=np.int64)
        valid["prompt"] = valid["sequence"] - valid["response"]
        starts["prompt"] = prompt_width - valid["prompt"]
    return Padding(valid, starts)


def _dense_width(value: Any) -> int | None:
    """Padded width of a dense ``(batch, width)`` tensor, else None."""
    if is_tensor(value) and not _nested(value) and value.ndim >= 2:
        return int(value.shape[-1])
    return None


def column(name: str, value: Any, padding: Padding | None = None, span: str | None = None) -> FieldColumn:
    """One field as flat content, with values of its own: what is recorded cannot change after the call.

    Args:
        name: field name; a known one brings its span.
        value: tensor ``(batch,)``, ``(batch, width, ...)`` or jagged; array; list of numbers, tensors or objects.
        padding: valid lengths of padded tensors, by span.
        span: overrides the registry's.
    """
    span = span or span_of(name)
    if is_tensor(value):
        if _nested(value):
            return _from_nested(name, value, span)
        return _from_dense(name, to_numpy(value), value, padding, span)
    if hasattr(value, "tolist") and not isinstance(value, np.ndarray):
        value = value.tolist()  # tensordict's NonTensorStack
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return _from_dense(name, np.array(value, order="C"), None, padding, span)
    rows = list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value]
    if rows and all(is_tensor(row) or isinstance(row, np.ndarray) for row in rows):
        return _from_sequences(name, [to_numpy(row) if is_tensor(row) else row for row in rows], rows[0], span)
    if rows and all(type(row) in (int, float, bool) for row in rows):
        return _from_dense(name, np.asarray(rows), None, padding, span)
    if rows and all(is_numbers(row) for row in rows) and any(rows):
        dtype = np.float64 if any(type(x) is float for row in rows for x in row) else np.int64
        return _from_sequences(name, [np.asarray(row, dtype=dtype) for row in rows], None, span)
    return _from_objects(name, rows, span)


def to_numpy(tensor: Any, *, copy: bool = True) -> NDArray[Any]:
    """A tensor's content on the host; bfloat16, which numpy lacks, as float32.

    Args:
        tensor: any dense tensor.
        copy: False may give a view of the tensor's memory, for a caller that only looks.
    """
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor, copy = tensor.cpu(), False
    try:
        array = tensor.numpy()
    except TypeError:
        array, copy = tensor.float().numpy(), False
    return np.array(array, order="C") if copy else np.ascontiguousarray(array)


def is_numbers(row: Any) -> bool:
    """True for a list of plain numbers, the empty one included."""
    return isinstance(row, (list, tuple)) and all(type(x) in (int, float, bool) for x in row)


def _dtype_name(tensor: Any, array: NDArray[Any]) -> str:
    return str(tensor.dtype).removeprefix("torch.") if is_tensor(tensor) else str(array.dtype)


def _from_nested(name: str, tensor: Any, span: str | None) -> FieldColumn:
    if not is_jagged(tensor):  # nested in the strided layout: rows of any shape
        return _from_sequences(name, [to_numpy(row) for row in tensor.unbind()], tensor.unbind()[0], span)
    values, ragged_axis, holes = tensor._values, tensor._ragged_idx - 1, tensor._lengths
    with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
        requires_grad = bool(tensor.requires_grad)
    if ragged_axis:
        values = values.movedim(ragged_axis, 0)  # the ragged axis outermost
    offsets = to_numpy(tensor._offsets, copy=False).astype(np.int64)
    return jagged_column(name, values, offsets[1:] - offsets[:-1], holes, span, requires_grad)


def jagged_column(
    name: str, values: Any, lengths: Int64, holes: Any = None, span: str | None = None, requires_grad: bool = False
) -> FieldColumn:
    """A jagged field from its parts.

    Args:
        name: field name; a known one brings its span.
        values: ``(sum(lengths), ...)`` tensor, row after row, the ragged axis outermost.
        lengths: ``(rows,)`` positions of each row.
        holes: ``(rows,)`` positions that are the row's where rows were narrowed in place, else None.
        span: overrides the registry's.
        requires_grad: the nested tensor carries a gradient.
    """
    flat = to_numpy(values)
    width = 1 if flat.ndim == 1 else int(np.prod(flat.shape[1:], dtype=np.int64))
    content, lengths = flat.reshape(-1), lengths * width
    if holes is not None:
        keep = to_numpy(holes).astype(np.int64) * width
        inside = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        content, lengths = content[: len(inside)][inside < np.repeat(keep, lengths)], keep
    return FieldColumn(
        name,
        Rows(content, lengths),
        width,
        "jagged",
        span or span_of(name) or "response",
        _dtype_name(values, flat),
        str(values.device),
        (len(lengths), -1, *flat.shape[1:]),
        content.nbytes,
        requires_grad,
    )


def _from_dense(name: str, array: NDArray[Any], tensor: Any, padding: Padding | None, span: str | None) -> FieldColumn:
    n = array.shape[0] if array.ndim else 1
    per_row = int(np.prod(array.shape[1:], dtype=np.int64)) if array.ndim else 1
    lengths = np.full(n, per_row, dtype=np.int64)
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
        Rows(array.reshape(-1), lengths, starts, valid),
        width,
        "scalar" if scalar else "dense",
        span,
        _dtype_name(tensor, array),
        str(tensor.device) if tensor is not None else None,
        tuple(array.shape),
        array.nbytes,
        bool(tensor.requires_grad) if tensor is not None else None,
    )


def _from_sequences(name: str, rows: list[NDArray[Any]], first: Any, span: str | None) -> FieldColumn:
    scalar = all(row.ndim == 0 for row in rows)
    flat = np.concatenate([row.reshape(-1) for row in rows]) if rows else np.zeros(0)
    lengths = np.fromiter((row.size for row in rows), dtype=np.int64, count=len(rows))
    return FieldColumn(
        name,
        Rows(flat, lengths),
        1,
        "scalar" if scalar else "jagged",
        span or ("scalar" if scalar else "response"),
        _dtype_name(first, flat),
        str(first.device) if is_tensor(first) else None,
        (len(rows),) if scalar else (len(rows), -1),
        flat.nbytes,
        bool(first.requires_grad) if is_tensor(first) else None,
    )


def _from_objects(name: str, rows: list[Any], span: str | None) -> FieldColumn:
    if all(isinstance(row, str) for row in rows):
        return object_column(name, [row.encode("utf-8", "surrogatepass") for row in rows], "str", span)
    return object_column(name, [canonical_json(row) for row in rows], "object", span)


def object_column(name: str, blobs: list[bytes], dtype: str, span: str | None = None) -> FieldColumn:
    """A field of strings or objects from their bytes: UTF-8, or canonical JSON."""
    lengths = np.fromiter(map(len, blobs), dtype=np.int64, count=len(blobs))
    flat = np.frombuffer(b"".join(blobs), dtype=np.uint8)
    return FieldColumn(
        name,
        Rows(flat, lengths, opaque=True),
        1,
        "object",
        span or span_of(name) or "scalar",
        dtype,
        None,
        (len(blobs),),
        len(flat),
        None,
    )
